//! Small outputs as the launches that write them take them: an argument of its own, behind the forward's.

use crate::abi::{AbiStruct as _, DevPtr};
use crate::abi_struct;
use crate::args::{DevSliceMut, FwdArgs};
use crate::problem::FwdProblem;
use crate::source::Header;

abi_struct! {
    /// Small outputs of a call.
    pub struct SmallParams {
        /// Each row's greatest score, of LSE's shape; null when not wanted.
        pub row_max: DevPtr<f32>,
        /// `[num_heads_q]`, the greatest of a head's; null when not wanted.
        pub head_max: DevPtr<f32>,
        /// `[batch, num_heads_q, seqlen_k]`, each key's sum of probabilities; null when not wanted.
        pub key_sum: DevPtr<f32>,
        /// `[batch, num_heads_q, seqlen_q, 3]` in the workspace: a row's greatest score, the number from which its
        /// exponentials are measured, and the inverse of their sum.
        pub rows: DevPtr<f32>,
    }
}

/// The argument of a call whose rows' numbers lie at an address.
#[must_use]
pub fn small_params(args: &FwdArgs<'_>, rows: u64) -> SmallParams {
    let of = |slice: &Option<DevSliceMut<'_>>| {
        slice.as_ref().map_or(DevPtr::NULL, |slice| DevPtr::new(slice.as_mut_ptr() as u64))
    };
    SmallParams {
        row_max: of(&args.row_max),
        head_max: of(&args.head_max),
        key_sum: of(&args.key_sum),
        rows: DevPtr::new(rows),
    }
}

/// Bytes of the rows' numbers; `None`: 2^62 or more.
#[must_use]
pub fn rows_bytes(problem: &FwdProblem) -> Option<u64> {
    let dims = problem.dims;
    let rows = u64::from(dims.batch).checked_mul(u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q))?;
    rows.checked_mul(12).filter(|&bytes| bytes < 1 << 62)
}

/// `fmha/small_params.h`: what this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let definitions = [SmallParams::c_definition()];
    Header::shared("fmha/small_params.h", "fmha", &["fmha/params.h"], &definitions)
}
