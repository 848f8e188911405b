//! Comparison of results with the f64 reference.

mod appended;
mod bwd;
mod canary;
mod combine;
mod fwd;

pub use appended::{appended_bytes, quantises};
pub use bwd::check_bwd;
pub use canary::{intact_bwd, intact_combine, intact_fwd};
pub use combine::check_combine;
pub use fwd::check_fwd;

use fmha_core::scaled_rows::ScaledRows;
use fmha_core::{Bias, BwdProblem, DType, FwdProblem, ScoreArgs, SeqSpan};

use crate::tensor::{Operand, Operands};

/// Called from any thread with the work that is done and the total work.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Results that are compared: all, or as many as time permits.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Selected pairs of a sequence's index and a query head (for gradients, a kv head); `None` selects all.
    pub heads: Option<Vec<(usize, u32)>>,
    /// Number of rows to check of each tensor (of gradients, queries and keys), evenly spread, the first and
    /// the last among them; `None` = all.
    pub rows: Option<u32>,
}

impl Selection {
    /// Selection of as many (sequence, query head) pairs and rows as about `budget` multiplications by the
    /// forward reference allow: heads evenly spread, at least one; rows at least 16 where there are so many.
    #[must_use]
    pub fn within(problem: &FwdProblem, spans: &[SeqSpan], budget: f64) -> Self {
        let dims = problem.dims;
        let per_pair = f64::from(dims.head_dim_qk + dims.head_dim_v);
        let pairs = |span: &SeqSpan, rows: u32| f64::from(span.seqlen_k) * f64::from(span.seqlen_q.min(rows));
        Self::of(dims.num_heads_q, spans, budget, |span, rows| per_pair * pairs(span, rows))
    }

    /// Selection for gradients: (sequence, kv head) pairs and rows of dQ, dK and dV, chosen as in
    /// [`within`](Self::within).
    #[must_use]
    pub fn within_bwd(problem: &BwdProblem, spans: &[SeqSpan], budget: f64) -> Self {
        let dims = problem.fwd.dims;
        let per_pair =
            f64::from(3 * dims.head_dim_qk + 2 * dims.head_dim_v) * f64::from(problem.fwd.gqa_ratio());
        let pairs = |span: &SeqSpan, rows: u32| {
            let (seqlen_q, seqlen_k) = (f64::from(span.seqlen_q), f64::from(span.seqlen_k));
            let rows = f64::from(rows);
            (rows * (seqlen_q + seqlen_k)).min(seqlen_q * seqlen_k)
        };
        Self::of(dims.num_heads_kv, spans, budget, |span, rows| per_pair * pairs(span, rows))
    }

    /// Selection within `budget`; `cost` returns the cost of one row in one head of a sequence.
    fn of(num_heads: u32, spans: &[SeqSpan], budget: f64, cost: impl Fn(&SeqSpan, u32) -> f64) -> Self {
        let all = Self::default().pairs(num_heads, spans);
        let cost = |pairs: &[(usize, u32)], rows: u32| -> f64 {
            pairs.iter().map(|&(span, _)| cost(&spans[span], rows)).sum()
        };
        if cost(&all, u32::MAX) <= budget {
            return Self::default();
        }
        let mut heads = all;
        let mut rows = spans.iter().map(|span| span.seqlen_q.max(span.seqlen_k)).max().unwrap_or(0);
        while cost(&heads, rows) > budget && (rows > 16 || heads.len() > 1) {
            if rows > 256 || heads.len() == 1 {
                rows = (rows / 2).max(16);
                if heads.len() == 1 && rows == 16 {
                    break;
                }
            } else if heads.len() > 4 || rows <= 16 {
                let kept = heads.len().div_ceil(2);
                heads = spread(heads.len() as u32, kept as u32).map(|at| heads[at as usize]).collect();
            } else {
                rows = (rows / 2).max(16);
            }
        }
        Self { heads: Some(heads), rows: Some(rows) }
    }

    /// Whether the selection leaves out some results.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.heads.is_some() || self.rows.is_some()
    }

    /// Selected (sequence, head) pairs, where each sequence has `num_heads` heads.
    fn pairs(&self, num_heads: u32, spans: &[SeqSpan]) -> Vec<(usize, u32)> {
        self.heads.clone().unwrap_or_else(|| {
            (0..spans.len()).flat_map(|span| (0..num_heads).map(move |head| (span, head))).collect()
        })
    }

    fn rows(&self, seqlen: u32) -> Vec<u32> {
        spread(seqlen, self.rows.unwrap_or(seqlen).min(seqlen)).collect()
    }
}

/// Chooses `count` numbers of `0..total`, evenly spread, with both ends.
fn spread(total: u32, count: u32) -> impl Iterator<Item = u32> {
    let (last, gaps) = (u64::from(total.saturating_sub(1)), u64::from(count.saturating_sub(1)).max(1));
    (0..count).map(move |n| if count == 1 { total / 2 } else { (u64::from(n) * last / gaps) as u32 })
}

/// Relative error of the rounding of P and dS before their products.
fn inner_roundoff(problem: &FwdProblem) -> f64 {
    match problem.dtypes.v {
        // f32 arithmetic already includes the rounding to f32.
        DType::F32 => 0.0,
        dtype => dtype.unit_roundoff(),
    }
}

fn abs_max(most: f64, x: f64) -> f64 {
    most.max(x.abs())
}

/// Bound of the scores of some queries of one (sequence, query head), by the inequality of Cauchy and Schwarz, the
/// soft-cap and the bias.
fn logits_bound(
    problem: &FwdProblem,
    operands: &Operands,
    span: SeqSpan,
    i_head: u32,
    rows: impl Iterator<Item = u32> + Clone,
) -> f64 {
    if rows.clone().next().is_none() {
        return 0.0;
    }
    let i_head_kv = i_head / problem.gqa_ratio();
    let scaled = problem.block_scales.and_then(|_| {
        let score = ScoreArgs::default()
            .block_scale_q(operands.input(Operand::BlockScaleQ))
            .block_scale_k(operands.input(Operand::BlockScaleK))
            .block_scale_v(operands.input(Operand::BlockScaleV));
        let tensors = [Operand::Q, Operand::K, Operand::V].map(|operand| operands.expect(operand).slice());
        ScaledRows::of(problem, tensors, &score).ok().flatten()
    });
    // Rotary embedding rotates rows and so keeps their norms.
    let norm_of = |operand, head, batch: u32, row: u32| {
        let Some(tensor) = operands.get(operand) else { return 0.0 };
        if let Some([q, k, _]) = &scaled {
            let mut values = vec![0f32; problem.dims.head_dim_qk as usize];
            let rows = if operand == Operand::Q { q } else { k };
            rows.read((batch, row, head), &mut values);
            let norm = values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            return if norm.is_finite() { norm } else { 0.0 };
        }
        let square = |d| tensor.get(batch, row, head, d).powi(2);
        let norm = (0..problem.dims.head_dim_qk).map(square).sum::<f64>().sqrt();
        if norm.is_finite() { norm } else { 0.0 }
    };
    let norm = |operand, head, batch: u32, rows: std::ops::Range<u32>| {
        rows.map(|row| norm_of(operand, head, batch, row)).fold(0.0, f64::max)
    };
    // Pages may belong to any sequence, so the longest key of all pages is the bound.
    let of_all = |operand| {
        let Some(shape) = operands.get(operand).map(|tensor| tensor.shape) else { return 0.0 };
        (0..shape.batch).map(|batch| norm(operand, i_head_kv, batch, 0..shape.seq)).fold(0.0, f64::max)
    };
    // The largest scale of a cache's rows. Scales of rows that are not in use are NaN.
    let by_rows = operands.get(Operand::KScale).map_or(1.0, |scales| {
        let places = (0..scales.shape.batch).flat_map(|b| (0..scales.shape.seq).map(move |row| (b, row)));
        places.map(|(b, row)| scales.get(b, row, i_head_kv, 0)).fold(0.0, f64::max)
    });
    let keys = if problem.layout.kv.is_paged() || problem.cache.append.is_some() {
        (by_rows * of_all(Operand::K)).max(of_all(Operand::KNew))
    } else {
        by_rows * norm(Operand::K, i_head_kv, span.k_batch, span.k_row..span.k_row + span.seqlen_k)
    };
    let scale_of = |operand, kind: fmha_core::Descale| {
        let index = kind.index(span.i_batch, i_head_kv, problem.dims.num_heads_kv);
        operands.get(operand).map_or(1.0, |tensor| tensor.nth(index).abs())
    };
    let queries = rows.clone().map(|i| norm_of(Operand::Q, i_head, span.q_batch, span.q_row + i));
    let product = queries.fold(0.0, f64::max)
        * keys
        * scale_of(Operand::DescaleQ, problem.scales.descale_q)
        * scale_of(Operand::DescaleK, problem.scales.descale_k)
        * f64::from(problem.resolved_softmax_scale()).abs();
    let capped = problem.score.softcap.map_or(product, |cap| product.min(f64::from(cap)));
    let bias = match problem.score.bias {
        Bias::None => 0.0,
        Bias::Elementwise(bias) => {
            let tensor = operands.expect(Operand::Bias);
            let sink =
                operands.get(Operand::Sink).map_or(f64::NEG_INFINITY, |sink| sink.nth(i_head as usize));
            let (batch, head) = bias.broadcast.index(span.i_batch, i_head);
            let row = |i| {
                let numbers = (0..span.seqlen_k).map(move |j| tensor.get(batch, i, head, j));
                let largest = numbers.clone().filter(|x| x.is_finite()).fold(f64::NEG_INFINITY, f64::max);
                // A key with a score this far below its row's best, or below its sink, has weight 0 in f32,
                // whatever its score's error.
                let least = (largest - 2.0 * capped).max(sink - capped) - 110.0;
                numbers.filter(|x| x.is_finite() && *x >= least).fold(0.0, abs_max)
            };
            rows.map(row).fold(0.0, abs_max)
        }
        Bias::Alibi { per_batch } => {
            let batch = if per_batch { span.i_batch } else { 0 };
            let index = batch * problem.dims.num_heads_q + i_head;
            let slope = operands.get(Operand::AlibiSlopes).map_or(0.0, |slopes| slopes.nth(index as usize));
            slope.abs() * f64::from(span.seqlen_q + span.seqlen_k)
        }
    };
    capped + bias
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_rows_hold_both_ends_and_never_repeat() {
        for (total, count) in [(1, 1), (5, 5), (100, 16), (1000, 3)] {
            let rows: Vec<u32> = spread(total, count).collect();
            assert_eq!(rows.len(), count as usize);
            assert!(rows.windows(2).all(|w| w[0] < w[1]), "{rows:?}");
            assert!(count < 2 || rows[0] == 0 && rows.last() == Some(&(total - 1)));
        }
    }
}
