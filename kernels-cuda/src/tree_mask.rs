//! The tree mask as a kernel parameter: an argument of its own, present only in launches with a tree mask.

use fmha_core::abi::{AbiStruct as _, DevPtr, FwdParams, MaskParams};
use fmha_core::source::Header;
use fmha_core::{FwdArgs, FwdProblem, abi_struct};

abi_struct! {
    /// Which of a sequence's last keys each query sees: bit n of a query's row is for the n-th of these keys.
    pub struct TreeMask {
        /// `[batch, seqlen_q, row_words]`, or packed.
        pub words: DevPtr<i32>,
        /// Number of u32 words in a query's row of the tree mask.
        pub row_words: i32,
        /// Number of rows from one sequence to the next, if Q has a batch axis.
        pub rows: i32,
    }
}

/// Last parameter of an entry.
pub(crate) const PARAM: &str = ", const __grid_constant__ TreeMask tree";

/// The argument of a call.
#[must_use]
pub fn bind(problem: &FwdProblem, args: &FwdArgs<'_>) -> TreeMask {
    let words = args.cache.tree_mask.as_ref().map_or(0, |slice| slice.as_ptr() as u64);
    TreeMask {
        words: DevPtr::new(words),
        row_words: problem.tree_mask_words() as i32,
        rows: problem.dims.seqlen_q as i32,
    }
}

/// The forward kernel's arguments: the tree replaces the causal mask's upper end.
#[must_use]
pub fn without_upper_end(params: &FwdParams) -> FwdParams {
    FwdParams { mask: MaskParams { hi: i32::MAX, ..params.mask }, ..*params }
}

/// `fmha/tree_mask.h`: the types that this file shares with the device.
pub(crate) fn header() -> Header {
    let definitions = [TreeMask::c_definition()];
    Header::shared("fmha/tree_mask.h", "fmha", &["fmha/spec.h"], &definitions)
}
