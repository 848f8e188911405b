//! A second cache of keys and values in the same softmax.

use super::{Dims, FwdProblem, KeyLists, ListEntries, check_input, check_unit_stride, check_v};
use crate::error::{ProblemError, Refusal, ensure};
use crate::layout::{KvLayout, Strides, VLayout};
use crate::masks::Intervals;
use crate::score::Bias;

/// A second set of keys and values that joins the first in one softmax: a row's probabilities sum to 1 over its
/// visible keys in both caches. Number of kv heads, head dimensions, types and `v_in_k` are those of the first.
///
/// Rows see a second cache whole, by intervals or by lists; the mask's band applies to the first cache alone. In
/// the first cache a row sees the keys of its band and intervals, or those of its list.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct SecondCache {
    /// Layout of the second cache's K and V.
    pub layout: KvLayout,
    /// Number of keys of a sequence; packed or paged, an upper bound over the sequences.
    pub seqlen_k: u32,
    /// Whether a call gives the second cache's own `seqused_k`, the number of keys in use of each sequence.
    pub seqused_k: bool,
    /// Strides of the second cache's K.
    pub k: Strides,
    /// Strides of the second cache's V; equal to `k` if V lies in K's rows.
    pub v: Strides,
    /// Lists of the second cache's keys that each query uses.
    pub lists: Option<KeyLists>,
    /// Ranges of the second cache's keys that each query row sees; 1 or `num_heads_kv` heads.
    pub intervals: Option<Intervals>,
    /// Whether LSE leaves out the sink, if there is one.
    pub lse_without_sink: bool,
}

impl SecondCache {
    /// A contiguous second cache of this layout; every row sees all its keys.
    #[must_use]
    pub fn new(problem: &FwdProblem, layout: KvLayout, seqlen_k: u32) -> Self {
        let unset = Strides { batch: 0, seq: 0, head: 0, dim: 1 };
        let (lists, intervals) = (None, None);
        let mut second = Self {
            layout,
            seqlen_k,
            seqused_k: false,
            k: unset,
            v: unset,
            lists,
            intervals,
            lse_without_sink: false,
        };
        let alone = second.alone(problem);
        second.k = Strides::bshd(alone.k_in_memory(alone.shape_k()).0);
        second.v = if problem.cache.v_in_k { second.k } else { Strides::bshd(alone.shape_v()) };
        second
    }

    crate::setters::setters! {
        /// Whether a call gives the second cache's `seqused_k`, the number of keys in use of each sequence.
        seqused_k: bool => seqused_k;
        /// Strides of the second cache's K.
        k: Strides => k;
        /// Strides of the second cache's V.
        v: Strides => v;
        /// The second cache's keys that each query lists.
        lists: impl Into<Option<KeyLists>> => lists;
        /// Ranges of the second cache's keys that each query row sees.
        intervals: impl Into<Option<Intervals>> => intervals;
        /// Whether LSE leaves out the sink.
        lse_without_sink: bool => lse_without_sink;
    }

    /// The problem on this cache alone, without mask, score and options: only shapes, lists and intervals.
    #[must_use]
    pub fn alone(&self, problem: &FwdProblem) -> FwdProblem {
        let dims = Dims { seqlen_k: self.seqlen_k, ..problem.dims };
        let mut alone = FwdProblem::new(problem.layout.q, self.layout, problem.dtypes.qk, dims);
        (alone.dtypes, alone.strides) = (problem.dtypes, problem.strides);
        (alone.strides.k, alone.strides.v) = (self.k, self.v);
        (alone.layout.seqused_q, alone.layout.seqused_k) = (problem.layout.seqused_q, self.seqused_k);
        (alone.cache.v_in_k, alone.cache.rows) = (problem.cache.v_in_k, problem.cache.rows);
        (alone.lists, alone.masks.intervals) = (self.lists, self.intervals);
        alone
    }

    /// Largest number of this cache's keys that a kernel reads for one query.
    pub(crate) fn most_walked_keys(&self) -> u32 {
        let of_lists = self.lists.map(|lists| u32::try_from(lists.most_keys()).unwrap_or(u32::MAX));
        of_lists.unwrap_or(self.seqlen_k)
    }
}

impl FwdProblem {
    /// Whether a kernel reads a query's keys one by one: with lists of keys, with a second cache, or from rows of
    /// bytes.
    #[must_use]
    pub fn walks_lists(&self) -> bool {
        self.lists.is_some() || self.walks_caches()
    }

    /// Whether kernels treat a query's keys as those of two caches: with a second cache, and with rows of bytes
    /// without a list, where the second cache is empty.
    #[must_use]
    pub fn walks_caches(&self) -> bool {
        self.second.is_some() || self.cache.rows.is_some() && self.lists.is_none()
    }

    /// Whether LSE leaves out the sink, if there is one.
    #[must_use]
    pub fn lse_without_sink(&self) -> bool {
        self.lists.is_some_and(|lists| lists.lse_without_sink)
            || self.second.is_some_and(|second| second.lse_without_sink)
    }

    /// Largest number of keys in both caches that a kernel reads for one query: those of the longest list, or of
    /// the longest sequence.
    #[must_use]
    pub fn most_walked_keys(&self) -> u32 {
        let of_lists = self.lists.map(|lists| u32::try_from(lists.most_keys()).unwrap_or(u32::MAX));
        let first = of_lists.unwrap_or_else(|| self.most_keys_of_band());
        first.saturating_add(self.second.map_or(0, |second| second.most_walked_keys()))
    }

    /// Largest number of keys that the band shows one row.
    fn most_keys_of_band(&self) -> u32 {
        let (bounds, seqlen_k) = (self.mask.bounds(), self.dims.seqlen_k);
        match (bounds.lo, bounds.hi) {
            (Some(lo), Some(hi)) if self.walks_caches() && self.mask.sink_columns == 0 => {
                (hi - lo + 1).clamp(0, i64::from(seqlen_k)) as u32
            }
            _ => seqlen_k,
        }
    }

    /// Refuses options that have no meaning if a query's keys are read one by one without a list: with a second
    /// cache, and from rows of bytes.
    pub(crate) fn check_beside_walk(&self, beside: &str) -> Result<(), ProblemError> {
        let refused = |field: &'static str, what: String| {
            Err(ProblemError::new(field, format!("{field}: {what} beside {beside} is not defined")))
        };
        if self.score.bias != Bias::None {
            return refused("bias", format!("bias {:?}", self.score.bias));
        }
        if let Err(refusal) = self.code.refuse("") {
            return refused("code", refusal.reason);
        }
        if self.drops() || self.dropout.write_keep_mask {
            return refused("p_drop", format!("p_drop {}", self.dropout.p_drop));
        }
        if !self.part.is_whole() {
            let part = &self.part;
            return refused(
                "part",
                format!("position_q {} and position_k {}", part.position_q, part.position_k),
            );
        }
        if self.cache.tree_mask {
            return refused("tree_mask", format!("tree_mask of {} queries", self.dims.seqlen_q));
        }
        if let Some(rotary) = &self.cache.rotary {
            return refused("rotary", format!("rotary of dim {}", rotary.dim));
        }
        if self.arrivals > 0 {
            return refused("arrivals", format!("arrivals {}", self.arrivals));
        }
        if self.masks.bits.is_some() {
            return refused("mask_bits", "bits of keys".to_owned());
        }
        if self.masks.block_lists.is_some() {
            return refused("block_lists", "lists of blocks".to_owned());
        }
        self.check_interval_heads("intervals", self.masks.intervals, beside)
    }

    /// Refuses intervals that differ within a group of query heads.
    fn check_interval_heads(
        &self,
        name: &str,
        intervals: Option<Intervals>,
        beside: &str,
    ) -> Result<(), ProblemError> {
        let Some(intervals) = intervals else { return Ok(()) };
        let (heads, kv) = (intervals.axes.heads, self.dims.num_heads_kv);
        ensure!(
            heads == 1 || heads == kv,
            "intervals",
            "{name} has {heads} heads beside {beside}, not 1 or num_heads_kv {kv}: a group sees the same keys"
        );
        Ok(())
    }

    /// Checks a second cache.
    ///
    /// # Errors
    /// A contradiction in the second cache, or the name of a field that cannot be combined with it.
    pub(crate) fn check_second(&self) -> Result<(), ProblemError> {
        let Some(second) = &self.second else { return Ok(()) };
        let named = |error: ProblemError| ProblemError::new("second", format!("second.{}", error.text));
        self.check_beside_walk("a second cache")?;
        let refused = |field: &'static str, what: String| {
            Err(ProblemError::new(field, format!("{field}: {what} beside a second cache is not defined")))
        };
        if let Some(append) = &self.cache.append {
            return refused("append", format!("append of seqlen_new {}", append.seqlen_new));
        }
        if let Some(cache) = self.cache.dtype {
            return refused("dtype_cache", format!("dtype_cache {cache}"));
        }
        if self.dtypes.qk.is_fp8() || self.dtypes.v.is_fp8() || self.block_scales.is_some() {
            return refused("dtype_qk", format!("dtype_qk {} and dtype_v {}", self.dtypes.qk, self.dtypes.v));
        }
        if self.layout.v == VLayout::ColMajor {
            return refused("v_layout", "v_layout col-major".to_owned());
        }
        self.check_interval_heads("second.intervals", second.intervals, "a second cache")?;
        ensure!(
            second.lists.is_none() || second.intervals.is_none(),
            "second",
            "second has indices of topk {} and intervals: a cache is seen by one of them",
            second.lists.map_or(0, |lists| lists.topk)
        );
        ensure!(
            !second.lse_without_sink || self.score.sink,
            "lse_without_sink",
            "lse_without_sink true, but sink is false"
        );
        // A kernel numbers the keys of both caches in one sequence, so their sum is limited.
        let most = super::MAX_SEQLEN;
        let first = self.lists.map_or(self.dims.seqlen_k.into(), |lists| lists.most_keys());
        let keys = second.lists.map_or(second.seqlen_k.into(), |lists| lists.most_keys()) + first;
        ensure!(
            keys <= most.into(),
            "second",
            "second: a query walks {keys} keys of both caches, more than {most}"
        );
        ensure!(
            !second.lists.is_some_and(|lists| lists.lse_without_sink),
            "second",
            "second.lists.lse_without_sink is true, but LSE is of both caches: second.lse_without_sink says it"
        );
        let alone = second.alone(self);
        alone.check_dims().map_err(named)?;
        let fewest = alone.fewest();
        let ((k, dtype_k), (v, dtype_v)) = (alone.k_in_memory(fewest.k), alone.v_in_memory(fewest.v));
        check_input("k", second.k, k, dtype_k).map_err(named)?;
        check_unit_stride("k", "dim", second.k.dim, k.dim).map_err(named)?;
        check_v("v", second.v, VLayout::RowMajor, v, dtype_v).map_err(named)?;
        alone.check_cache().map_err(named)?;
        alone.check_cache_rows().map_err(named)?;
        alone.check_lists().map_err(named)?;
        alone.check_masks().map_err(named)
    }

    /// Refuses a problem for kernels that read one cache.
    ///
    /// # Errors
    /// A second cache.
    pub fn refuse_second(&self, kernel: &str) -> Result<(), Refusal> {
        match &self.second {
            None => Ok(()),
            Some(second) => {
                let text = format!("a second cache of seqlen_k {} is not in this kernel", second.seqlen_k);
                Err(Refusal::new(kernel, text))
            }
        }
    }

    /// Whether the second cache's lists contain addresses, so that it has no block table.
    #[must_use]
    pub fn second_lists_addresses(&self) -> bool {
        let lists = self.second.and_then(|second| second.lists);
        lists.is_some_and(|lists| lists.entries == ListEntries::Addresses)
    }
}
