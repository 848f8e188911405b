//! The recipes, best first: a line each. What a recipe is made of lies in its folder, its device text under `fmha/`.

use fmha_gpu::{BwdKernel, CombineKernel, FwdKernel, Kernel};

use crate::backward::recipe::Products;
use crate::cdna::Cdna;
use crate::cdna_bwd::Mfma;
use crate::cdna_decode::CdnaDecode;
use crate::decode::recipe::Decode;
use crate::device::Amd;
use crate::forward::recipe::Forward;
use crate::rdna::Rdna;
use crate::rdna_bwd::Wmma;
use crate::rdna_decode::RdnaDecode;
use crate::widened::recipe::Widened;
use crate::{combine, simt, simt_bwd};

/// Of the forward.
#[must_use]
pub fn forward<V: Amd>() -> Vec<FwdKernel<V>> {
    vec![
        Kernel::new(Decode::<CdnaDecode>::default()),
        Kernel::new(Forward::<Cdna>::default()),
        Kernel::new(Decode::<RdnaDecode>::default()),
        Kernel::new(Forward::<Rdna>::default()),
        Kernel::new(Widened::<Cdna>::default()),
        Kernel::new(Widened::<Rdna>::default()),
        Kernel::new(simt::recipe::Simt::default()),
    ]
}

/// Of the backward.
#[must_use]
pub fn backward<V: Amd>() -> Vec<BwdKernel<V>> {
    vec![
        Kernel::new(Products::<Mfma>::default()),
        Kernel::new(Products::<Wmma>::default()),
        Kernel::new(simt_bwd::recipe::SimtBwd::default()),
    ]
}

/// Of the merging of partial results.
#[must_use]
pub fn combine<V: Amd>() -> Vec<CombineKernel<V>> {
    vec![Kernel::new(combine::recipe::Merge::default())]
}
