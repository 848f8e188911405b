//! Forward, by definition.

use num_traits::Float;

use super::head::{Head, Inputs, Precision, real, row};
use crate::args::FwdArgs;
use crate::error::ProblemError;
use crate::problem::FwdProblem;
use crate::seq::{SeqSpan, spans};

/// Forward results of one (sequence, query head).
#[derive(Clone, Debug, PartialEq)]
pub struct HeadForward {
    /// Sequence that the rows belong to.
    pub span: SeqSpan,
    /// Index of the query head.
    pub i_head: u32,
    /// O `[seqlen_q, head_dim_v]`, before `scale_o`.
    pub o: Vec<f64>,
    /// LSE `[seqlen_q]`, natural log.
    pub lse: Vec<f64>,
    /// `sqrt(sum_j (keep / (1 - p_drop) P V)^2)` for each element of O: how far independent relative errors of the
    /// products move the element, per unit of error. Computed with [`Precision::Exact`] only, otherwise empty.
    pub spread: Vec<f64>,
    /// Greatest score `[seqlen_q]` over the visible keys; -inf if there are none.
    pub row_max: Vec<f64>,
    /// Sum over the rows of each key's probability before dropout `[seqlen_k]`.
    pub key_sum: Vec<f64>,
}

/// Computes every (sequence, query head), in that order, and returns their outputs; `args.o` is not written. `args` are
/// in host memory.
///
/// # Errors
/// Lengths or operands that are missing or do not fit.
pub fn forward(
    problem: &FwdProblem,
    args: &FwdArgs<'_>,
    precision: Precision,
) -> Result<Vec<HeadForward>, ProblemError> {
    let inputs = Inputs::from(args);
    let mut heads = Vec::new();
    for span in spans(problem, &args.seq)? {
        for i_head in 0..problem.dims.num_heads_q {
            heads.push(forward_head(problem, &inputs, span, i_head, precision)?);
        }
    }
    Ok(heads)
}

/// Computes one (sequence, query head).
///
/// # Errors
/// Operands that are missing.
pub fn forward_head(
    problem: &FwdProblem,
    inputs: &Inputs<'_>,
    span: SeqSpan,
    i_head: u32,
    precision: Precision,
) -> Result<HeadForward, ProblemError> {
    let rows: Vec<u32> = (0..span.seqlen_q).collect();
    forward_rows(problem, inputs, span, i_head, &rows, precision)
}

/// Computes some queries of one (sequence, query head): O and LSE have a row for each of `rows`, which lie in
/// `0..span.seqlen_q`.
///
/// # Errors
/// Operands that are missing.
pub fn forward_rows(
    problem: &FwdProblem,
    inputs: &Inputs<'_>,
    span: SeqSpan,
    i_head: u32,
    rows: &[u32],
    precision: Precision,
) -> Result<HeadForward, ProblemError> {
    Ok(match precision {
        Precision::Exact => {
            attend(&Head::<f64>::gather(problem, inputs, span, i_head, precision)?, problem, rows)
        }
        Precision::AsInput(_) => {
            attend(&Head::<f32>::gather(problem, inputs, span, i_head, precision)?, problem, rows)
        }
    })
}

fn attend<T: Float>(head: &Head<'_, T>, problem: &FwdProblem, rows: &[u32]) -> HeadForward {
    let mut o = Vec::new();
    let mut lse = Vec::new();
    let mut spread = Vec::new();
    let mut row_max = Vec::new();
    let mut key_sum = vec![0.0; head.num_keys()];
    for &i in rows {
        let softmax = Softmax::of_row(head, i);
        let mut squares = vec![T::zero(); if head.is_exact() { head.head_dim_v } else { 0 }];
        for (&j, &weight) in softmax.visible.iter().zip(&softmax.weights) {
            let p = head.probability(weight) * head.keep_factor(i, j);
            for (square, &v) in squares.iter_mut().zip(row(&head.v, j, head.head_dim_v)) {
                *square = *square + (p * v) * (p * v);
            }
        }
        row_max.push(softmax.max_of_keys.to_f64().unwrap_or(f64::NAN));
        for (&j, &weight) in softmax.visible.iter().zip(&softmax.weights) {
            key_sum[j as usize] += (weight / softmax.row_sum).to_f64().unwrap_or(f64::NAN);
        }
        let row_o = softmax.output(head, i);
        o.extend(row_o.iter().map(|&o| head.as_result(o, problem.dtypes.o)));
        spread.extend(
            squares.iter().map(|square| (square.sqrt() / softmax.row_sum).to_f64().unwrap_or(f64::NAN)),
        );
        let row_lse = if problem.lse_without_sink() { softmax.lse_of_keys } else { softmax.lse };
        lse.push(row_lse.to_f64().unwrap_or(f64::NAN));
    }
    HeadForward { span: head.span, i_head: head.i_head, o, lse, spread, row_max, key_sum }
}

/// One row of P, unnormalised: `P[j] = weights[j] / row_sum`.
pub(super) struct Softmax<T> {
    /// The keys that the row sees.
    pub(super) visible: Vec<u32>,
    /// The weight `exp(S[j] - row_max)` of each visible key.
    pub(super) weights: Vec<T>,
    /// The sink's weight `exp(sink - row_max)`; 0 without a sink.
    pub(super) sink: T,
    /// The sum of all weights; 1 for a row without visible keys.
    pub(super) row_sum: T,
    /// Log-sum-exp of the row, with the sink; −inf for a row without visible keys.
    pub(super) lse: T,
    /// Log-sum-exp of the row's keys, without the sink.
    pub(super) lse_of_keys: T,
    /// The greatest score; -inf for a row without visible keys.
    max_of_keys: T,
}

impl<T: Float> Softmax<T> {
    /// O of query `i`, not yet rounded to its type. The sum of weighted V is divided by the sum of weights; if the
    /// former overflows f32, the weights are divided first instead.
    fn output(&self, head: &Head<'_, T>, i: u32) -> Vec<T> {
        let rounded = head.probabilities(&self.visible, &self.weights);
        let sums = |per_weight: T| {
            let mut o = vec![T::zero(); head.head_dim_v];
            for (&j, &weight) in self.visible.iter().zip(&rounded) {
                let p = weight * head.keep_factor(i, j) * per_weight;
                for (o, &v) in o.iter_mut().zip(row(&head.v, j, head.head_dim_v)) {
                    *o = *o + p * v;
                }
            }
            o
        };
        let o: Vec<T> = sums(T::one()).into_iter().map(|o| o / self.row_sum).collect();
        if o.iter().all(|o| o.is_finite()) {
            return o;
        }
        // Only elements that overflowed are replaced.
        let again = sums(self.row_sum.recip());
        o.into_iter().zip(again).map(|(o, again)| if o.is_finite() { o } else { again }).collect()
    }

    pub(super) fn of_row(head: &Head<'_, T>, i: u32) -> Self {
        let visible = head.visible(i);
        let scores = head.scores(i, &visible);
        let nothing: T = real(f64::NEG_INFINITY);
        let lse_of_keys = log_sum_exp(&scores);
        let greatest = |max: T, &s: &T| if s > max || s.is_nan() { s } else { max };
        let max_of_keys = scores.iter().fold(nothing, greatest);
        if head.sink == Some(T::infinity()) && scores.iter().all(|&score| score < T::infinity()) {
            // The sink has infinite weight, so the keys get weights of 0: exp(inf - inf) would be NaN.
            let weights = vec![T::zero(); visible.len()];
            let lse = T::infinity();
            let (sink, row_sum) = (T::one(), T::one());
            return Self { visible, weights, sink, row_sum, lse, lse_of_keys, max_of_keys };
        }
        let row_max = scores.iter().chain(&head.sink).fold(nothing, greatest);
        if row_max == nothing {
            // A row without visible keys gets no weights: exp(-inf - -inf) would be NaN.
            let weights = vec![T::zero(); visible.len()];
            let lse = nothing;
            let (sink, row_sum) = (T::zero(), T::one());
            return Self { visible, weights, sink, row_sum, lse, lse_of_keys, max_of_keys };
        }
        let weights: Vec<T> = scores.iter().map(|&s| (s - row_max).exp()).collect();
        let sink = head.sink.map_or(T::zero(), |sink| (sink - row_max).exp());
        let row_sum = weights.iter().fold(sink, |sum, &weight| sum + weight);
        let lse = row_max + row_sum.ln();
        Self { visible, weights, sink, row_sum, lse, lse_of_keys, max_of_keys }
    }
}

/// Computes `ln sum exp`; -inf for an empty list.
fn log_sum_exp<T: Float>(scores: &[T]) -> T {
    let max = scores.iter().fold(T::neg_infinity(), |max, &s| if s > max || s.is_nan() { s } else { max });
    if max == T::neg_infinity() {
        return max;
    }
    max + scores.iter().fold(T::zero(), |sum, &s| sum + (s - max).exp()).ln()
}
