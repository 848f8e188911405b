//! A second cache at run time: its problem, lengths and places, and the parameters that a kernel reads.

use crate::abi::{AbiStruct as _, FwdParams};
use crate::abi_struct;
use crate::args::{FwdArgs, MaskArgs, SecondArgs, SeqArgs};
use crate::bind::input_params;
use crate::error::{Error, ProblemError};
use crate::lists::{ListParams, list_params};
use crate::masks::{MaskDataParams, mask_data_params};
use crate::problem::{FwdProblem, SecondCache};
use crate::seq::{SeqSpan, checked_spans, spans};
use crate::source::Header;

/// A second cache, as the problem and arguments of a call on that cache alone.
#[derive(Debug)]
pub struct SecondCall<'a> {
    /// The problem over the second cache alone.
    pub problem: FwdProblem,
    /// Operands of the second cache.
    pub args: SecondArgs<'a>,
    /// Lengths and places: queries of the call, keys of the second cache.
    pub seq: SeqArgs<'a>,
}

impl<'a> SecondCall<'a> {
    /// The second cache of a call; `None` if the call has one cache.
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

    /// An empty second cache, for a call with one cache: it has no keys and points to the first cache's memory.
    fn empty(problem: &FwdProblem, args: &'a FwdArgs<'_>) -> Self {
        let second = SecondCache::new(problem, problem.layout.kv, 0);
        let seq = SeqArgs { seqused_q: args.seq.seqused_q, ..SeqArgs::default() };
        Self { problem: second.alone(problem), args: SecondArgs::new(args.k_slice(), None), seq }
    }

    /// Spans of the sequences, with the keys of the second cache.
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

    /// Tensors of the second cache's masks.
    #[must_use]
    pub fn masks(&self) -> MaskArgs<'a> {
        MaskArgs::default().intervals(self.args.intervals)
    }
}

/// Adds to an error that it concerns the second cache.
pub(crate) fn named(error: ProblemError) -> ProblemError {
    let ProblemError { text, .. } = error;
    ProblemError::new("second", format!("second.{text}"))
}

/// Adds to an error that it concerns the second cache, if the caller's numbers are at fault.
pub(crate) fn of_second(error: Error) -> Error {
    match error {
        Error::Problem(error) => named(error).into(),
        other => other,
    }
}

abi_struct! {
    /// Which keys of a cache a kernel walks, and where they lie: the keys of a list if `indices` is not null, otherwise
    /// those of the band and of intervals.
    pub struct KeySetParams {
        /// Addresses and sizes of the second cache's keys, and the queries.
        pub call: FwdParams,
        /// Parameters of the lists of the second cache's keys.
        pub lists: ListParams,
        /// Intervals of the cache's keys; other masks as data are not supported here.
        pub masks: MaskDataParams,
        /// 1 if the second cache's keys are paged, otherwise 0.
        pub is_paged: i32,
        /// 1 if the second cache's keys are packed, otherwise 0.
        pub is_packed: i32,
    }
}

abi_struct! {
    /// Kernel parameters of two caches in one softmax, which follow the [`FwdParams`] of the first cache.
    pub struct TwoCachesParams {
        /// Parameters of the lists of the first cache's keys.
        pub lists: ListParams,
        /// Intervals of visible keys of the first cache.
        pub masks: MaskDataParams,
        /// Keys of the second cache.
        pub second: KeySetParams,
    }
}

/// The parameters of both caches of a call whose arguments passed their check. `None` for a call whose kernels read
/// one cache ([`FwdProblem::walks_caches`]).
#[must_use]
pub fn two_caches_params(problem: &FwdProblem, args: &FwdArgs<'_>) -> Option<TwoCachesParams> {
    let call = match SecondCall::of(problem, args.second, &args.seq).ok()? {
        Some(call) => call,
        None if problem.walks_caches() => SecondCall::empty(problem, args),
        None => return None,
    };
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

/// `fmha/two_caches_params.h`: the types that this file shares with the device.
#[must_use]
pub fn header() -> Header {
    let definitions = [KeySetParams::c_definition(), TwoCachesParams::c_definition()];
    let includes = ["fmha/lists.h", "fmha/mask_data_params.h"];
    Header::shared("fmha/two_caches_params.h", "fmha", &includes, &definitions)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use super::*;
    use crate::args::{DevSlice, MemorySpace, check_fwd};
    use crate::bwd::BwdProblem;
    use crate::masks::{Intervals, MaskAxes, MaskBits};
    use crate::plan::Workspace;
    use crate::problem::{KeyLists, ListEntries, SecondCache};
    use crate::score::Bias;
    use crate::{Append, DType, DevSliceMut, Dims, KvLayout, MaskSpec, Part, QLayout, Totals, VLayout};

    const DIMS: Dims = Dims::batch(2).seqlens(2, 10).heads(2, 1).head_dim(4);

    fn plain() -> FwdProblem {
        FwdProblem::batch(DType::F32, DIMS)
    }

    /// Adds a second cache of six keys for each sequence, all visible to every row.
    fn both(problem: FwdProblem) -> FwdProblem {
        let second = SecondCache::new(&problem, KvLayout::Strided, 6);
        problem.second(second)
    }

    #[test]
    fn what_does_not_go_with_a_second_cache_is_refused_by_its_name() {
        let second = both(plain()).second.unwrap();
        let with = |second: SecondCache| plain().second(second);
        let alone = second.alone(&plain());
        let lists = KeyLists::new(&alone, 3);
        let intervals = Intervals::batch(&alone, MaskAxes::SHARED, 2);
        let by_heads = Intervals::batch(&alone, MaskAxes { per_batch: false, heads: 2 }, 2);
        let bits = MaskBits::dense(&plain(), MaskAxes::SHARED, Totals::NONE);
        let turned = crate::Strides { seq: -4, ..second.k };
        let append = Append::batch(&plain(), 1);
        for (problem, field, text) in [
            (
                both(plain().bias(Bias::Alibi { per_batch: false })),
                "bias",
                "beside a second cache is not defined",
            ),
            (both(plain().p_drop(0.5)), "p_drop", "p_drop 0.5 beside a second cache"),
            (both(plain().part(Part { position_q: 3, ..Part::default() })), "part", "position_q 3"),
            (both(plain().seqused_k(true).append(append)), "append", "append of seqlen_new 1 beside"),
            (both(plain().arrivals(2)), "arrivals", "arrivals 2 beside"),
            (both(plain().mask_bits(bits)), "mask_bits", "bits of keys beside"),
            (both(plain().v_layout(VLayout::ColMajor)), "v", "v"),
            (both(plain().row_max(true)), "row_max", "row_max is wanted beside a second cache"),
            (
                both(plain().mask_code("k <= q".parse::<crate::expr::Function>().unwrap())),
                "code",
                "mask as code",
            ),
            (with(second.lists(lists).intervals(intervals)), "second", "indices of topk 3 and intervals"),
            (
                with(second.intervals(by_heads)),
                "intervals",
                "second.intervals has 2 heads beside a second cache",
            ),
            (with(second.lse_without_sink(true)), "lse_without_sink", "but sink is false"),
            (with(second.k(turned)), "second", "second.k.seq stride -4 is negative"),
            (
                with(second.lists(lists.entries(ListEntries::Addresses))),
                "second",
                "second.indices: topk 3 addresses need pages, not kv_layout Strided",
            ),
            (
                with(second.lists(lists.entries(ListEntries::Blocks { size: 1 << 30 }))),
                "second",
                "a query walks 3221225482 keys of both caches",
            ),
            (
                with(SecondCache::new(&plain(), KvLayout::Paged { page_size: 0 }, 6)),
                "second",
                "second.page_size 0 is not in 1..=",
            ),
        ] {
            let error = problem.validate().unwrap_err();
            assert_eq!(error.field, field, "{error}");
            assert!(error.text.contains(text), "{error}");
        }
        both(plain().sink(true).softcap(2.0).mask(MaskSpec::CAUSAL)).validate().unwrap();
        let error = BwdProblem::new(both(plain()).write_lse(true)).validate().unwrap_err();
        assert_eq!((error.field, error.text.contains("has no gradient")), ("second", true));
        let refusal = both(plain()).refuse_second("some").unwrap_err();
        assert_eq!(refusal.reason, "a second cache of seqlen_k 6 is not in this kernel");
    }

    #[test]
    fn a_window_counts_as_many_keys_as_it_shows() {
        let window: MaskSpec = "b:2,0".parse().unwrap();
        assert_eq!(both(plain()).most_walked_keys(), 16);
        assert_eq!(both(plain().mask(window)).most_walked_keys(), 3 + 6);
        assert_eq!(plain().mask(window).most_walked_keys(), 10);
        let sinks: MaskSpec = "b:2,0,1".parse().unwrap();
        assert_eq!(both(plain().mask(sinks)).most_walked_keys(), 16);
    }

    #[test]
    fn a_second_cache_of_a_call_is_there_iff_its_problem_has_one() {
        let (q, k, mut o) = ([0f32; 32], [0f32; 80], [0f32; 32]);
        let (lengths, offsets) = ([1i32; 2], [0i32; 3]);
        let mut check = |problem: FwdProblem, second: Option<&SecondArgs<'_>>| {
            let [slice, keys] = [DevSlice::host(&q), DevSlice::host(&k)];
            let args = FwdArgs::new(slice, keys, keys, DevSliceMut::host(&mut o)).second(second);
            let problem = problem.validate().unwrap();
            let checked = check_fwd(&problem, &args, Workspace::NONE, MemorySpace::Host);
            checked.err().map_or(String::new(), |error| error.text)
        };
        let keys = DevSlice::host(&k);
        let given = SecondArgs::new(keys, keys);
        assert_eq!(check(both(plain()), Some(&given)), "");
        assert_eq!(check(both(plain()), None), "second is missing: its problem has one");
        assert_eq!(check(plain(), Some(&given)), "second is given, but the problem has none");
        let few = SecondArgs::new(DevSlice::host(&k[..47]), keys);
        let text = check(both(plain()), Some(&few));
        assert!(text.starts_with("second.k has 188 bytes, but its extents and strides reach 192"), "{text}");
        let text = check(both(plain()), Some(&SecondArgs::new(keys, None)));
        assert!(text.starts_with("second.v is not memory to read"), "{text}");
        let with = |seq| given.seq(seq);
        let text = check(both(plain()), Some(&with(SeqArgs::default().seqused_k(DevSlice::host(&lengths)))));
        assert!(text.starts_with("second.seqused_k is given"), "{text}");
        let text =
            check(both(plain()), Some(&with(SeqArgs::default().cu_seqlens_q(DevSlice::host(&offsets)))));
        assert!(
            text.starts_with("second.cu_seqlens_q is given, but queries are those of the call"),
            "{text}"
        );
        let used = both(plain()).second.unwrap().seqused_k(true);
        let text = check(plain().second(used), Some(&given));
        assert!(text.starts_with("second.seqused_k is missing"), "{text}");
        let text = check(both(plain()), Some(&given.intervals(DevSlice::host(&lengths))));
        assert!(text.starts_with("second.intervals is given"), "{text}");
        assert_eq!(both(plain()).layout.q, QLayout::Batch);
    }
}
