//! The order of a row's keys that Hopper's kernel of `wgmma` and `sm80` have in common, so that a row has the same bits
//! in a call of either: where plans are asked for `row_invariant`.
//!
//! Both multiply 16 products of the depth at a time, in ascending order, and have one softmax and one merge. What is
//! left to agree on is the blocks of keys, the parts, which follow the blocks, and by how much a maximum may lag.
//! Hopper sums the 16 products of a `wgmma` and of an `mma.sync` alike: one function gives every bit of both that an
//! H200 has recorded (`tests/emulators/ptx/silicon/tests/sums.rs`).

use fmha_core::spec::FwdSpec;
use fmha_core::{Bias, BwdProblem, DType, FwdProblem, MaskKind, VLayout};

use crate::nvidia::DeviceFacts;
use crate::{sm80, sm90};

/// Keys of a block of problems whose rows both kernels take, on a device that has both.
///
/// The answer follows from no sequence, length or layout of Q and K: a row's other calls have the same one. `sm80` and
/// `sm90` refuse a column-major V.
pub(crate) fn shared_block(problem: &FwdProblem, facts: &DeviceFacts) -> Option<i32> {
    let (dtypes, dims, score) = (problem.dtypes, problem.dims, &problem.score);
    let is_wide =
        matches!(dtypes.qk, DType::F16 | DType::Bf16) && dtypes.v == dtypes.qk && !dtypes.o.is_fp8();
    let is_narrow = dims.head_dim_qk.max(dims.head_dim_v) <= 256 && problem.layout.v == VLayout::RowMajor;
    let is_plain = score.softcap.is_none() && matches!(score.bias, Bias::None) && problem.code.is_empty();
    let is_band = problem.masks.is_empty() && problem.mask.sink_columns == 0 && problem.lists.is_none();
    let is_shared =
        facts.instructions.wgmma && is_wide && is_narrow && is_plain && is_band && !problem.drops();
    is_shared.then(|| sm90::default_tile(&under_a_mask(FwdSpec::of(problem))).block_n)
}

/// Whether the gradients of a problem's rows are those of Hopper's backward of `wgmma`, on a device that has it. The
/// order of `sm80`'s backward is another one, so each problem is one kernel's alone, in every layout.
///
/// The answer follows from no sequence, length or stride. Rows of head dimensions that are no multiples of eight seldom
/// lie as TMA wants them.
pub(crate) fn has_gradients_of_wgmma(problem: &BwdProblem, facts: &DeviceFacts) -> bool {
    let (fwd, dims) = (&problem.fwd, problem.fwd.dims);
    let takes = |dim: u32| dim <= 128 && dim.is_multiple_of(8);
    shared_block(fwd, facts).is_some()
        && fwd.dtypes.o == fwd.dtypes.v
        && takes(dims.head_dim_qk)
        && takes(dims.head_dim_v)
        && problem.dbias.is_none()
        && problem.dcaptured.is_empty()
}

/// The spec of a problem's text under a mask: a row that sees the same keys without one has the same bits only by it.
/// Without a mask P of bf16 lies lower, and its shift rounds otherwise.
pub(crate) fn under_a_mask(spec: FwdSpec) -> FwdSpec {
    if spec.mask == MaskKind::Full { FwdSpec { mask: MaskKind::Upper, ..spec } } else { spec }
}

/// By how much a maximum may lag, in log2, of a call that both kernels may have.
pub(crate) const LAG_LOG2: i32 = sm80::LAG_LOG2;
