//! The order of a row's keys that Hopper's kernel on `wgmma` and `sm80` share in plans with `row_invariant`, so
//! that a row has equal bits in a call of either kernel.
//!
//! Both multiply 16 products of the depth at a time, in ascending order, and share the code of softmax and merge.
//! They must also agree on the blocks of keys, on the parts, which follow from the blocks, and on how far the
//! running maximum may lag. Hopper sums the 16 products of a `wgmma` and of an `mma.sync` alike: one function
//! reproduces every bit of both that was recorded on an H200 (`tests/emulators/ptx/silicon/tests/sums.rs`).

use fmha_core::spec::FwdSpec;
use fmha_core::{Bias, BwdProblem, DType, FwdProblem, MaskKind, VLayout};

use crate::nvidia::DeviceFacts;
use crate::{sm80, sm90};

/// Keys of a block for problems that both kernels may compute, on a device that has both. The result depends on no
/// sequence, length or layout of Q and K, so that a row's other calls have the same block. `sm80` and `sm90` refuse
/// a column-major V.
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

/// Whether the gradients of a problem's rows are computed by Hopper's backward on `wgmma`, if the device has it.
/// `sm80`'s backward has another order of sums, so one kernel must compute a problem in every layout. The result
/// depends on no sequence, length or stride. Head dimensions that are no multiple of eight are left out, since
/// their rows seldom have the alignment that TMA needs.
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

/// The problem's spec with a mask: a row has equal bits with a mask that hides none of its keys and without one only if
/// both kernels are compiled for a mask. Without a mask P of bf16 is shifted by another power of two, and rounds
/// differently.
pub(crate) fn under_a_mask(spec: FwdSpec) -> FwdSpec {
    if spec.mask == MaskKind::Full { FwdSpec { mask: MaskKind::Upper, ..spec } } else { spec }
}

/// Log2 of the factor by which scores may exceed the running maximum before it is raised, in calls that either kernel
/// may compute.
pub(crate) const LAG_LOG2: i32 = sm80::LAG_LOG2;
