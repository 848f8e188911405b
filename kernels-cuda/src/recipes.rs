//! The recipes, best first: a line each. What a recipe is made of lies in its folder, its device text under `fmha/`.

use fmha_gpu::{BwdKernel, CombineKernel, FwdKernel, Kernel};

use crate::nvidia::Nvidia;
use crate::{combine, simt, sm80, sm80_bwd, sm90, sm90_bwd, sm90_mla, sm90_widened, sm100, sm100_bwd};

/// Of the forward.
#[must_use]
pub fn forward<V: Nvidia>() -> Vec<FwdKernel<V>> {
    vec![
        Kernel::new(sm100::recipe::Sm100::default()),
        Kernel::new(sm90::recipe::Sm90::default()),
        Kernel::new(sm90_widened::recipe::Widened::<V, sm90::recipe::Sm90>::default()),
        Kernel::new(sm90_mla::recipe::Sm90Mla::default()),
        Kernel::new(sm90_widened::recipe::Widened::<V, sm100::recipe::Sm100>::default()),
        Kernel::new(sm80::recipe::Sm80::default()),
        Kernel::new(simt::recipe::Simt),
    ]
}

/// Of the backward.
#[must_use]
pub fn backward<V: Nvidia>() -> Vec<BwdKernel<V>> {
    vec![
        Kernel::new(sm100_bwd::recipe::Sm100Bwd::default()),
        Kernel::new(sm90_bwd::recipe::Sm90Bwd::default()),
        Kernel::new(sm80_bwd::recipe::Sm80Bwd::default()),
        Kernel::new(simt::recipe_bwd::SimtBwd::default()),
    ]
}

/// Of the merging of partial results.
#[must_use]
pub fn combine<V: Nvidia>() -> Vec<CombineKernel<V>> {
    vec![Kernel::new(combine::recipe::Merge)]
}
