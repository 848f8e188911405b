//! All kernels with their checks and launches (recipes), best first. A recipe's code is in the folder of its name,
//! its device text under `fmha/`.

use fmha_core::sparse::{ValidChoose, ValidIndexLoss};
use fmha_core::{ValidBwd, ValidCombine, ValidFwd};
use fmha_gpu::{
    Choose, Combine, IndexLoss, NoIndexer, OfValues, Recipe, Simt, SimtBwd, SimtIndexer, SimtLists,
};

use crate::nvidia::Nvidia;
use crate::sm80::recipe::Sm80;
use crate::sm80_bwd::recipe::Sm80Bwd;
use crate::sm80_index::Sm80Index;
use crate::sm80_index_loss::Sm80IndexLoss;
use crate::sm80_lists_bwd::recipe::Sm80ListsBwd;
use crate::sm90::recipe::Sm90;
use crate::sm90_bwd::recipe::Sm90Bwd;
use crate::sm90_index::Sm90Index;
use crate::sm90_lists_bwd::recipe::Sm90ListsBwd;
use crate::sm90_mla::recipe::Sm90Mla;
use crate::sm90_widened::recipe::Widened;
use crate::sm100::recipe::Sm100;
use crate::sm100_bwd::recipe::Sm100Bwd;
use crate::sm100_mla::recipe::Sm100Mla;

/// Recipes of the forward: for each kernel what it supports, and its launches.
#[must_use]
pub fn forward<V: Nvidia>() -> Vec<Recipe<ValidFwd, V>> {
    vec![
        Recipe::of::<Sm100>(),
        Recipe::of::<Sm90>(),
        Recipe::of::<Widened<Sm90>>(),
        Recipe::of::<Sm90Mla>(),
        Recipe::of::<Sm100Mla>(),
        Recipe::of::<Widened<Sm100>>(),
        Recipe::of::<Widened<Sm100Mla>>(),
        Recipe::of::<Sm80>(),
        Recipe::of::<Widened<Sm80>>(),
        Recipe::of::<Simt>(),
    ]
}

/// Recipes of the backward: for each kernel what it supports, and its launches.
#[must_use]
pub fn backward<V: Nvidia>() -> Vec<Recipe<ValidBwd, V>> {
    vec![
        Recipe::of::<Sm100Bwd>(),
        Recipe::of::<OfValues<Sm100Bwd>>(),
        Recipe::of::<Sm90Bwd>(),
        Recipe::of::<Sm80Bwd>(),
        Recipe::of::<Sm90ListsBwd>(),
        Recipe::of::<Sm80ListsBwd>(),
        Recipe::of::<SimtBwd>(),
    ]
}

/// Recipes of the choice of keys: for each kernel what it supports, and its launches.
#[must_use]
pub fn choose<V: Nvidia>() -> Vec<Recipe<ValidChoose, V>> {
    vec![
        Recipe::of::<Choose<Sm90Index>>(),
        Recipe::of::<Choose<Sm80Index>>(),
        Recipe::of::<Choose<NoIndexer>>(),
        Recipe::of::<Choose<SimtIndexer>>(),
    ]
}

/// Recipes of the loss that trains an indexer: for each kernel what it supports, and its launches.
#[must_use]
pub fn index_loss<V: Nvidia>() -> Vec<Recipe<ValidIndexLoss, V>> {
    vec![Recipe::of::<IndexLoss<Sm80IndexLoss>>(), Recipe::of::<IndexLoss<SimtLists>>()]
}

/// Recipes of the merging of partial results: for each kernel what it supports, and its launches.
#[must_use]
pub fn combine<V: Nvidia>() -> Vec<Recipe<ValidCombine, V>> {
    vec![Recipe::of::<Combine>()]
}
