//! A second cache where code runs: its problem, lengths and places, and what a kernel reads of it.

use crate::abi::{AbiStruct as _, FwdParams};
use crate::abi_struct;
use crate::args::{FwdArgs, MaskArgs, SecondArgs, SeqArgs};
use crate::bind::input_params;
use crate::error::{Error, ProblemError};
use crate::lists::{ListParams, list_params};
use crate::masks::{MaskDataParams, mask_data_params};
use crate::problem::FwdProblem;
use crate::seq::{SeqSpan, checked_spans, spans};
use crate::source::Header;

/// A second cache of a call as a call over it alone would have it.
#[derive(Debug)]
pub struct SecondCall<'a> {
    /// The problem over the second cache alone.
    pub problem: FwdProblem,
    /// Its operands.
    pub args: SecondArgs<'a>,
    /// Lengths and places: the call's queries, the second cache's keys.
    pub seq: SeqArgs<'a>,
}

impl<'a> SecondCall<'a> {
    /// The second cache of a call; `None` where it has none.
    ///
    /// # Errors
    /// Operands that are missing.
    pub fn of(
        problem: &FwdProblem,
        args: Option<&SecondArgs<'a>>,
        first: &SeqArgs<'a>,
    ) -> Result<Option<Self>, ProblemError> {
        let Some(second) = &problem.second else { return Ok(None) };
        let args =
            *args.ok_or_else(|| ProblemError::new("second", "second is missing: its problem has one"))?;
        Ok(Some(Self { problem: second.alone(problem), seq: args.seq_beside(first), args }))
    }

    /// The sequences, whose keys are the second cache's.
    ///
    /// # Errors
    /// A length, offset or page that is missing or wrong.
    pub fn spans(&self) -> Result<Vec<SeqSpan>, ProblemError> {
        spans(&self.problem, &self.seq).map_err(named)
    }

    /// Spans as [`spans`](Self::spans) gives them, where every length has to be right.
    ///
    /// # Errors
    /// As [`spans`](Self::spans), and lengths that are negative or too large.
    pub fn checked_spans(&self) -> Result<Vec<SeqSpan>, ProblemError> {
        checked_spans(&self.problem, &self.seq).map_err(named)
    }

    /// Masks as data of the second cache.
    #[must_use]
    pub fn masks(&self) -> MaskArgs<'a> {
        MaskArgs::default().intervals(self.args.intervals)
    }
}

/// An error of the second cache, which says so.
pub(crate) fn named(error: ProblemError) -> ProblemError {
    ProblemError::new("second", format!("second.{}", error.text))
}

/// An error of the second cache, which says so where the caller's numbers are at fault.
pub(crate) fn of_second(error: Error) -> Error {
    match error {
        Error::Problem(error) => named(error).into(),
        other => other,
    }
}

abi_struct! {
    /// Which keys of a cache a kernel walks, and where they lie: those of a list where `indices` is not null, else
    /// those of the band and of intervals.
    pub struct KeySetParams {
        /// Places of its keys and queries.
        pub call: FwdParams,
        /// Its list.
        pub lists: ListParams,
        /// Its intervals; no other mask as data.
        pub masks: MaskDataParams,
        /// 1 where its keys are paged.
        pub is_paged: i32,
        /// 1 where its keys are packed.
        pub is_packed: i32,
    }
}

abi_struct! {
    /// Two caches in one softmax, beside the [`FwdParams`] of the first.
    pub struct TwoCachesParams {
        /// List of the first cache.
        pub lists: ListParams,
        /// Intervals of the first cache.
        pub masks: MaskDataParams,
        /// The second cache.
        pub second: KeySetParams,
    }
}

/// Both caches of a call as a kernel has them; its arguments have passed their check. `None` for a call of one cache.
#[must_use]
pub fn two_caches_params(problem: &FwdProblem, args: &FwdArgs<'_>) -> Option<TwoCachesParams> {
    let call = SecondCall::of(problem, args.second, &args.seq).ok()??;
    let tensors = [args.q, call.args.k, call.args.v.unwrap_or(call.args.k)];
    Some(TwoCachesParams {
        lists: list_params(problem, &args.seq),
        masks: mask_data_params(problem, &args.masks),
        second: KeySetParams {
            call: input_params(&call.problem, tensors, &call.seq),
            lists: list_params(&call.problem, &call.seq),
            masks: mask_data_params(&call.problem, &call.masks()),
            is_paged: call.problem.layout.kv.is_paged().into(),
            is_packed: (call.problem.layout.kv == crate::layout::KvLayout::Packed).into(),
        },
    })
}

/// `fmha/two_caches_params.h`: what this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let definitions = [KeySetParams::c_definition(), TwoCachesParams::c_definition()];
    let includes = ["fmha/lists.h", "fmha/mask_data_params.h"];
    Header::shared("fmha/two_caches_params.h", "fmha", &includes, &definitions)
}
