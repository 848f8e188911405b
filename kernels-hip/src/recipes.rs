//! All kernels with their checks and launches (recipes), best first. A recipe's code is in the folder of its name,
//! its device text under `fmha/`.

use fmha_core::sparse::{ValidChoose, ValidIndexLoss};
use fmha_core::{ValidBwd, ValidCombine, ValidFwd};
use fmha_gpu::{Choose, Combine, IndexLoss, NoIndexer, Recipe, Simt, SimtBwd, SimtIndexer, SimtLists};

use crate::backward::recipe::Products;
use crate::cdna::Cdna;
use crate::cdna_bwd::Mfma;
use crate::cdna_decode::CdnaDecode;
use crate::decode::recipe::Decode;
use crate::device::Amd;
use crate::forward::recipe::Forward;
use crate::index::{MatrixIndex, MfmaIndex, WmmaIndex};
use crate::index_loss::{MatrixLoss, MfmaLoss, WmmaLoss};
use crate::lists_bwd::{ListsBwd, MfmaLists, WmmaLists};
use crate::rdna::Rdna;
use crate::rdna_bwd::Wmma;
use crate::rdna_decode::RdnaDecode;
use crate::widened::recipe::Widened;

/// Recipes of the forward: for each kernel what it supports, and its launches.
#[must_use]
pub fn forward<V: Amd>() -> Vec<Recipe<ValidFwd, V>> {
    vec![
        Recipe::of::<Decode<CdnaDecode>>(),
        Recipe::of::<Forward<Cdna>>(),
        Recipe::of::<Decode<RdnaDecode>>(),
        Recipe::of::<Forward<Rdna>>(),
        Recipe::of::<Widened<Cdna>>(),
        Recipe::of::<Widened<Rdna>>(),
        Recipe::of::<Simt>(),
    ]
}

/// Recipes of the backward: for each kernel what it supports, and its launches.
#[must_use]
pub fn backward<V: Amd>() -> Vec<Recipe<ValidBwd, V>> {
    vec![
        Recipe::of::<Products<Mfma>>(),
        Recipe::of::<Products<Wmma>>(),
        Recipe::of::<ListsBwd<MfmaLists>>(),
        Recipe::of::<ListsBwd<WmmaLists>>(),
        Recipe::of::<SimtBwd>(),
    ]
}

/// Recipes of the merging of partial results: for each kernel what it supports, and its launches.
#[must_use]
pub fn combine<V: Amd>() -> Vec<Recipe<ValidCombine, V>> {
    vec![Recipe::of::<Combine>()]
}

/// Recipes of the loss that trains an indexer: for each kernel what it supports, and its launches.
#[must_use]
pub fn index_loss<V: Amd>() -> Vec<Recipe<ValidIndexLoss, V>> {
    vec![
        Recipe::of::<IndexLoss<MatrixLoss<MfmaLoss>>>(),
        Recipe::of::<IndexLoss<MatrixLoss<WmmaLoss>>>(),
        Recipe::of::<IndexLoss<SimtLists>>(),
    ]
}

/// Recipes of the choice of keys: for each kernel what it supports, and its launches.
#[must_use]
pub fn choose<V: Amd>() -> Vec<Recipe<ValidChoose, V>> {
    vec![
        Recipe::of::<Choose<MatrixIndex<MfmaIndex>>>(),
        Recipe::of::<Choose<MatrixIndex<WmmaIndex>>>(),
        Recipe::of::<Choose<NoIndexer>>(),
        Recipe::of::<Choose<SimtIndexer>>(),
    ]
}
