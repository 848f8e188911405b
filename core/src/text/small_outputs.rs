//! Parameters of the launches that write small outputs: an argument after the forward kernel's.

use crate::abi::{AbiStruct as _, DevPtr};
use crate::abi_struct;
use crate::args::{DevSliceMut, FwdArgs};
use crate::problem::FwdProblem;
use crate::source::Header;

abi_struct! {
    /// Small outputs of a call.
    pub struct SmallParams {
        /// Greatest score of each row, in LSE's shape; null if not wanted.
        pub row_max: DevPtr<f32>,
        /// Greatest score of each head, `[num_heads_q]`; null if not wanted.
        pub head_max: DevPtr<f32>,
        /// Each key's sum of probabilities, `[batch, num_heads_q, seqlen_k]`; null if not wanted.
        pub key_sum: DevPtr<f32>,
        /// Statistics of each row in the workspace, `[batch, num_heads_q, seqlen_q, 3]`: its greatest score, the
        /// number that is subtracted before exponentials, and the inverse of the sum of exponentials.
        pub rows: DevPtr<f32>,
    }
}

/// The kernel argument of a call whose rows' statistics lie at the address `rows`.
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

/// Bytes of the rows' statistics; `None` if 2^62 or more.
#[must_use]
pub fn rows_bytes(problem: &FwdProblem) -> Option<u64> {
    let dims = problem.dims;
    let rows = u64::from(dims.batch).checked_mul(u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q))?;
    rows.checked_mul(12).filter(|&bytes| bytes < 1 << 62)
}

/// `fmha/small_params.h`: the types that this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let definitions = [SmallParams::c_definition()];
    Header::shared("fmha/small_params.h", "fmha", &["fmha/params.h"], &definitions)
}
