//! How much a problem is: visible pairs, floating-point operations, bytes.

use crate::layout::Shape;
use crate::mask::MaskSpec;
use crate::problem::FwdProblem;
use crate::seq::SeqSpan;

/// The work of a problem with known lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// (query, key) pairs that the mask shows, over all query heads.
    pub pairs: u64,
    /// Floating-point operations of the two products forward: `2 (head_dim_qk + head_dim_v)` a pair.
    pub fwd_flops: u64,
    /// Of the five products backward: `2 (3 head_dim_qk + 2 head_dim_v)` a pair.
    pub bwd_flops: u64,
    /// Q, K, V and O, each logical element once.
    pub fwd_bytes: u64,
}

impl Work {
    /// Counts exactly, row by row.
    #[must_use]
    pub fn count(problem: &FwdProblem, spans: &[SeqSpan]) -> Self {
        let dims = problem.dims;
        let (qk, v) = (u64::from(dims.head_dim_qk), u64::from(dims.head_dim_v));
        let heads = u64::from(dims.num_heads_q);
        let pairs =
            heads * spans.iter().map(|s| visible_pairs(problem.mask, s.seqlen_q, s.seqlen_k)).sum::<u64>();
        let elems = |seq, head, dim| Shape { batch: 1, seq, head, dim }.num_elems();
        let fwd_bytes = spans
            .iter()
            .map(|s| {
                elems(s.seqlen_q, dims.num_heads_q, dims.head_dim_qk) * problem.dtype_qk.size_bytes()
                    + elems(s.seqlen_k, dims.num_heads_kv, dims.head_dim_qk) * problem.dtype_qk.size_bytes()
                    + elems(s.seqlen_k, dims.num_heads_kv, dims.head_dim_v) * problem.dtype_v.size_bytes()
                    + elems(s.seqlen_q, dims.num_heads_q, dims.head_dim_v) * problem.dtype_o.size_bytes()
            })
            .sum();
        Self { pairs, fwd_flops: 2 * (qk + v) * pairs, bwd_flops: 2 * (3 * qk + 2 * v) * pairs, fwd_bytes }
    }
}

/// (query, key) pairs of one sequence and head that the mask shows.
#[must_use]
pub fn visible_pairs(mask: MaskSpec, seqlen_q: u32, seqlen_k: u32) -> u64 {
    let band = mask.band(seqlen_q, seqlen_k);
    (0..seqlen_q)
        .map(|i| {
            let range = band.k_range(i..i + 1, seqlen_k);
            let sinks = band.sink_range(i..i + 1, seqlen_k);
            (range.len() + sinks.len()) as u64
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_pairs_are_those_the_band_shows() {
        for text in ["0", "t", "b", "t:3,1", "b:2,0,2", "g:2,3", "g:-1,9,3", "b:0,-1,4"] {
            let mask: MaskSpec = text.parse().unwrap();
            for (seqlen_q, seqlen_k) in [(0, 3), (3, 0), (5, 9), (9, 5), (7, 7)] {
                let band = mask.band(seqlen_q, seqlen_k);
                let counted = (0..seqlen_q)
                    .map(|i| (0..seqlen_k).filter(|&j| band.visible(i, j)).count() as u64)
                    .sum::<u64>();
                assert_eq!(visible_pairs(mask, seqlen_q, seqlen_k), counted, "{text} {seqlen_q}x{seqlen_k}");
            }
        }
    }
}
