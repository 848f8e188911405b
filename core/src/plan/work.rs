//! Size of a problem: visible pairs, floating-point operations, bytes.

use crate::dtype::DType;
use crate::error::ProblemError;
use crate::mask::{MaskBand, MaskSpec};
use crate::masks::HostMasks;
use crate::problem::FwdProblem;
use crate::seq::SeqSpan;

/// The work of a problem with known lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// (query, key) pairs that the mask shows, over all query heads.
    pub pairs: u64,
    /// Floating-point operations of the two products forward: `2 (head_dim_qk + head_dim_v)` a pair.
    pub fwd_flops: u64,
    /// Floating-point operations of the five products backward: `2 (3 head_dim_qk + 2 head_dim_v)` a pair.
    pub bwd_flops: u64,
    /// Bytes of Q, K, V and O, with each element in use counted once.
    pub fwd_bytes: u64,
}

impl Work {
    /// Counts exactly the pairs in the mask's band. Masks as data and as code are ignored; every entry of a list of
    /// keys counts as an existing key, and so does every key of a second cache that is read whole or by intervals.
    ///
    /// # Errors
    /// [`ProblemError`] of `seqlen_q`, if a count does not fit 64 bits.
    pub fn count(problem: &FwdProblem, spans: &[SeqSpan]) -> Result<Self, ProblemError> {
        let heads_q = u128::from(problem.dims.num_heads_q);
        // The counts fit: 32 bits of sequences times 64 bits of pairs per sequence need less than 128 bits.
        let of_second = |span: &SeqSpan| {
            problem
                .second
                .map_or(0, |second| u128::from(span.seqlen_q) * u128::from(second.most_walked_keys()))
        };
        let pairs = |span: &SeqSpan| match problem.lists {
            Some(lists) => u128::from(span.seqlen_q) * u128::from(lists.most_keys()) + of_second(span),
            None => u128::from(visible_pairs(problem.mask, span.seqlen_q, span.seqlen_k)) + of_second(span),
        };
        Self::of_pairs(problem, spans, spans.iter().map(pairs).sum::<u128>().checked_mul(heads_q))
    }

    /// Counts exactly the pairs that the band and masks as data in host memory show.
    ///
    /// # Errors
    /// [`ProblemError`] of `seqlen_q`, if a count does not fit 64 bits.
    pub fn count_shown(
        problem: &FwdProblem,
        spans: &[SeqSpan],
        masks: &HostMasks<'_>,
    ) -> Result<Self, ProblemError> {
        let heads = || 0..problem.dims.num_heads_q;
        let pairs = |span: &SeqSpan| {
            let band = problem.band(span.seqlen_q, span.seqlen_k);
            heads().map(|head| u128::from(masks.head(span, head).pairs(&band))).sum::<u128>()
        };
        Self::of_pairs(problem, spans, Some(spans.iter().map(pairs).sum()))
    }

    fn of_pairs(problem: &FwdProblem, spans: &[SeqSpan], pairs: Option<u128>) -> Result<Self, ProblemError> {
        let dims = problem.dims;
        let (qk, v) = (u128::from(dims.head_dim_qk), u128::from(dims.head_dim_v));
        let (heads_q, heads_kv) = (u128::from(dims.num_heads_q), u128::from(dims.num_heads_kv));
        let size = |dtype: DType| u128::from(dtype.size_bytes());
        // Values that lie in the rows of K are read with K, so they add no bytes.
        let values = if problem.cache.v_in_k { 0 } else { v * size(problem.dtypes.v) };
        let mut bytes = 0u128;
        for span in spans {
            let rows_q = u128::from(span.seqlen_q);
            // A kernel over lists reads each listed key once, and no other keys.
            let listed = problem.lists.map_or(u128::MAX, |lists| rows_q * u128::from(lists.most_keys()));
            let rows_k = u128::from(span.seqlen_k).min(listed)
                + problem.second.map_or(0, |second| {
                    let listed = rows_q * u128::from(second.most_walked_keys());
                    u128::from(second.seqlen_k).min(listed)
                });
            bytes += rows_q * heads_q * (qk * size(problem.dtypes.qk) + v * size(problem.dtypes.o))
                + rows_k * heads_kv * (qk * size(problem.dtypes.qk) + values);
        }
        let fits = |what: &str, count: Option<u128>| {
            count.and_then(|count| u64::try_from(count).ok()).ok_or_else(|| {
                ProblemError::new(
                    "seqlen_q",
                    format!(
                        "seqlen_q {} by seqlen_k {}, over batch {} and num_heads_q {}, make more than {} {what}",
                        dims.seqlen_q,
                        dims.seqlen_k,
                        dims.batch,
                        dims.num_heads_q,
                        u64::MAX
                    ),
                )
            })
        };
        let flops = |a_pair: u128| fits("operations", pairs.and_then(|pairs| pairs.checked_mul(a_pair)));
        Ok(Self {
            pairs: fits("visible pairs", pairs)?,
            fwd_flops: flops(2 * (qk + v))?,
            bwd_flops: flops(2 * (3 * qk + 2 * v))?,
            fwd_bytes: fits("bytes", Some(bytes))?,
        })
    }
}

/// (query, key) pairs of one sequence and head that the mask shows.
#[must_use]
pub fn visible_pairs(mask: MaskSpec, seqlen_q: u32, seqlen_k: u32) -> u64 {
    let MaskBand { lo, hi, sink_columns } = mask.band(seqlen_q, seqlen_k);
    // Pairs with j < i + diagonal, among the first `keys` keys.
    let below = |diagonal: i64, keys: i64| {
        let (all, end) = (i128::from(keys), i128::from(diagonal) + i128::from(seqlen_q));
        let begin = i128::from(diagonal);
        (up_to(end) - up_to(begin)) - (up_to(end - all) - up_to(begin - all))
    };
    let keys = i64::from(seqlen_k);
    let left = lo.min(hi + 1);
    // The sum fits in 64 bits, because no row is longer than a sequence.
    (below(hi + 1, keys) - below(left, keys) + below(left, sink_columns)) as u64
}

/// The sum of the integers from 1 that are less than `end`.
fn up_to(end: i128) -> i128 {
    let end = end.max(1);
    end * (end - 1) / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Dims;

    #[test]
    fn lists_are_counted_by_their_entries_and_read_no_other_keys() {
        let dims = Dims::batch(1).seqlens(3, 1000).heads(4, 2).head_dims(64, 32);
        let problem = FwdProblem::batch(DType::F16, dims);
        let lists = crate::KeyLists::new(&problem, 20);
        let problem = problem.lists(lists);
        let (i_batch, q_row, k_row) = (0, 0, 0);
        let span = SeqSpan {
            i_batch,
            q_row,
            k_row,
            q_batch: 0,
            k_batch: 0,
            seqlen_q: 3,
            seqlen_k: 1000,
            lse_rows: 0,
            seqlen_cached: 1000,
            new_batch: 0,
            new_row: 0,
        };
        let work = Work::count(&problem, &[span]).unwrap();
        assert_eq!((work.pairs, work.fwd_flops), (3 * 20 * 4, 3 * 20 * 4 * 2 * 96));
        assert_eq!(work.fwd_bytes, 3 * 4 * 2 * 96 + 60 * 2 * 2 * 96);
        // Keys of a short sequence are read once, even if lists name them several times.
        let short = Work::count(&problem, &[SeqSpan { seqlen_k: 50, ..span }]).unwrap();
        assert_eq!((short.pairs, short.fwd_bytes), (work.pairs, 3 * 4 * 2 * 96 + 50 * 2 * 2 * 96));
    }

    #[test]
    fn counts_that_do_not_fit_are_an_error_and_not_their_remainder() {
        let dims = Dims::batch(1).seqlens(1 << 4, 1 << 24).heads(1 << 30, 1 << 30).head_dim(64);
        let problem = FwdProblem::batch(DType::F16, dims);
        let (i_batch, q_row, k_row) = (0, 0, 0);
        let span = SeqSpan {
            i_batch,
            q_row,
            k_row,
            q_batch: 0,
            k_batch: 0,
            seqlen_q: 1 << 4,
            seqlen_k: 1 << 24,
            lse_rows: 0,
            seqlen_cached: 1 << 24,
            new_batch: 0,
            new_row: 0,
        };
        // The number 2^58 of pairs fits 64 bits; 2^8 operations for each of them do not.
        let error = Work::count(&problem, &[span]).unwrap_err();
        assert_eq!(error.field, "seqlen_q");
        assert!(error.text.contains("num_heads_q 1073741824"), "{error}");
        let short = SeqSpan { seqlen_k: 1 << 10, ..span };
        assert_eq!(Work::count(&problem, &[short]).unwrap().pairs, 1 << 44);
    }

    #[test]
    fn operations_and_bytes_are_of_what_each_sequence_has() {
        let dims = Dims::batch(2).seqlens(5, 7).heads(6, 2).head_dims(24, 40);
        let problem = FwdProblem::batch(DType::E4m3Fn, dims)
            .dtype_v(DType::Bf16)
            .dtype_o(DType::F32)
            .mask("t".parse().unwrap());
        let span = |seqlen_q: u32, seqlen_k: u32| SeqSpan {
            i_batch: 0,
            q_row: 0,
            k_row: 0,
            q_batch: 0,
            k_batch: 0,
            seqlen_q,
            seqlen_k,
            lse_rows: 0,
            seqlen_cached: seqlen_k,
            new_batch: 0,
            new_row: 0,
        };
        // Pairs of a head: 1 + 2 + 3 + 4 + 5 in the first sequence, 1 + 2 + 2 in the second.
        let work = Work::count(&problem, &[span(5, 7), span(3, 2)]).unwrap();
        assert_eq!(work.pairs, (15 + 5) * 6);
        assert_eq!(work.fwd_flops, work.pairs * 2 * (24 + 40));
        assert_eq!(work.bwd_flops, work.pairs * 2 * (3 * 24 + 2 * 40));
        let (row_of_q_and_o, row_of_k_and_v) = (24 + 40 * 4, 24 + 40 * 2);
        assert_eq!(work.fwd_bytes, (5 + 3) * 6 * row_of_q_and_o + (7 + 2) * 2 * row_of_k_and_v);
        let wide = FwdProblem::batch(DType::F32, dims).mask(problem.mask);
        let bytes = (5 + 3) * 6 * (24 + 40) * 4 + (7 + 2) * 2 * (24 + 40) * 4;
        assert_eq!(Work::count(&wide, &[span(5, 7), span(3, 2)]).unwrap().fwd_bytes, bytes);
        let latent = wide.v_in_k(true);
        let bytes = bytes - (7 + 2) * 2 * 40 * 4;
        assert_eq!(Work::count(&latent, &[span(5, 7), span(3, 2)]).unwrap().fwd_bytes, bytes);
    }

    #[test]
    fn visible_pairs_are_those_the_band_shows() {
        for text in ["0", "t", "b", "t:3,1", "b:2,0,2", "g:2,3", "g:-1,9,3", "b:0,-1,4", "t:0,0,4", "g:0,0,4"]
        {
            let mask: MaskSpec = text.parse().unwrap();
            for (seqlen_q, seqlen_k) in [(0, 3), (3, 0), (5, 9), (9, 5), (7, 7)] {
                let band = mask.band(seqlen_q, seqlen_k);
                let counted = (0..seqlen_q)
                    .map(|i| (0..seqlen_k).filter(|&j| band.visible(i, j)).count() as u64)
                    .sum::<u64>();
                assert_eq!(visible_pairs(mask, seqlen_q, seqlen_k), counted, "{text} {seqlen_q}x{seqlen_k}");
            }
        }
        let most = u64::from(u32::MAX);
        assert_eq!(visible_pairs(MaskSpec::CAUSAL, u32::MAX, u32::MAX), most * (most + 1) / 2);
        assert_eq!(visible_pairs(MaskSpec::NONE, u32::MAX, u32::MAX), most * most);
    }
}
