//! Loads of a backward call's operands, and stores of its gradients.

use fmha_core::{BwdProblem, Shape, Strides, VLayout};

use super::{DWORD, ELEM_BYTES, FURTHEST_ROW};
use crate::paths::{LoadPath, StorePath};

/// Way of loading operands and storing gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LoadsAndStores {
    pub(crate) load: LoadPath,
    pub(crate) store: StorePath,
}

/// The strides of axes with more than one element, except that of a row's elements.
fn live(strides: Strides, shape: Shape) -> [i64; 3] {
    let of = |extent: u32, stride: i64| if extent > 1 { stride } else { 0 };
    [of(shape.batch, strides.batch), of(shape.seq, strides.seq), of(shape.head, strides.head)]
}

impl LoadsAndStores {
    pub(crate) const BY_ELEMENT: Self = Self { load: LoadPath::Element, store: StorePath::Element };

    pub(crate) fn of(problem: &BwdProblem) -> Self {
        let fwd = &problem.fwd;
        let reads = [
            (fwd.strides.q, fwd.shape_q()),
            (fwd.strides.k, fwd.shape_k()),
            (fwd.strides.v, fwd.shape_v()),
            (problem.dout, fwd.shape_o()),
        ];
        // A descriptor reaches every row of a block.
        let by_dwords = |&(strides, shape): &(Strides, Shape)| {
            i64::from(shape.dim) * ELEM_BYTES % DWORD == 0
                && live(strides, shape).iter().all(|stride| stride.wrapping_mul(ELEM_BYTES) % DWORD == 0)
                && strides.seq.saturating_mul(ELEM_BYTES * FURTHEST_ROW) < 1 << 28
        };
        let is_whole = |dim: u32| dim.is_multiple_of(8);
        let load = match fwd.layout.v == VLayout::RowMajor && reads.iter().all(by_dwords) {
            false => LoadPath::Element,
            true if is_whole(fwd.dims.head_dim_qk) && is_whole(fwd.dims.head_dim_v) => LoadPath::Chunks,
            true => LoadPath::Dwords,
        };
        let gradients =
            [(problem.dq, fwd.shape_q()), (problem.dk, fwd.shape_k()), (problem.dv, fwd.shape_v())];
        let by_runs = |&(strides, shape): &(Strides, Shape)| {
            shape.dim.is_multiple_of(4) && live(strides, shape).iter().all(|stride| stride % 4 == 0)
        };
        let runs = load != LoadPath::Element && gradients.iter().all(by_runs);
        Self { load, store: if runs { StorePath::Vector } else { StorePath::Element } }
    }
}
