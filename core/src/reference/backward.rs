//! Backward, by the derivative of the definition.
//!
//! With `Z = keep / (1 - p_drop)` and `P = exp(S - LSE)`:
//!
//! ```text
//! dV[j]     = sum_i Z[i,j] P[i,j] dO[i]
//! dP[i,j]   = Z[i,j] (dO[i] . V[j])
//! D[i]      = dO[i] . O[i]                        ( = sum_j P[i,j] dP[i,j] )
//! dS[i,j]   = P[i,j] (dP[i,j] - D[i] + dLSE[i])
//! dSink     = sum_i exp(sink - LSE[i]) (dLSE[i] - D[i])
//! dBias     = dS                                  summed over broadcast axes
//! dS0[i,j]  = dS[i,j] (1 - tanh^2)                through the soft-cap
//! dQ[i]     = softmax_scale * sum_j dS0[i,j] K[j]
//! dK[j]     = softmax_scale * sum_i dS0[i,j] Q[i]
//! ```

use num_traits::Float;

use super::code::zeros;
use super::forward::Softmax;
use super::head::{Head, Inputs, Precision, Rows, f32_at, real, row};
use super::pair::{HeadSums, Query, axpy};
use crate::args::BwdArgs;
use crate::bwd::{BwdProblem, ValidBwd};
use crate::error::ProblemError;
use crate::score::Bias;
use crate::seq::{SeqSpan, spans};

/// Gradients of one query head of one sequence. For K and V, they are this query head's contribution only.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadBackward {
    /// The sequence whose gradients these are.
    pub span: SeqSpan,
    /// The query head whose gradients these are.
    pub i_head: u32,
    /// dQ `[seqlen_q, head_dim_qk]`.
    pub dq: Vec<f64>,
    /// dK `[seqlen_k, head_dim_qk]`.
    pub dk: Vec<f64>,
    /// dV `[seqlen_k, head_dim_v]`.
    pub dv: Vec<f64>,
    /// dS, the bias' gradient, `[seqlen_q, seqlen_k]`.
    pub ds: Vec<f64>,
    /// The head's contribution to dSink.
    pub dsink: f64,
    /// This head's share of each captured tensor's gradient, dense; empty if only a part of the rows is computed.
    pub dcaptured: Vec<Vec<f64>>,
    /// How far independent relative errors of the terms move each gradient, per unit of error. Computed with
    /// [`Precision::Exact`] only, otherwise empty.
    pub spread: BackwardSpread,
}

/// For each gradient, the root of the sum of its squared terms, to which rounding errors are compared. A difference
/// counts with both its terms. Shaped like the gradients.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BackwardSpread {
    /// Root of the sum of the squared terms, for each element of dQ.
    pub dq: Vec<f64>,
    /// Root of the sum of the squared terms, for each element of dK.
    pub dk: Vec<f64>,
    /// Root of the sum of the squared terms, for each element of dV.
    pub dv: Vec<f64>,
    /// Root of the sum of the squared terms, for each element of dS.
    pub ds: Vec<f64>,
    /// Root of the sum of the squared terms of dSink.
    pub dsink: f64,
    /// Root of the sum of the squared terms, for each element of the gradients of captured tensors.
    pub dcaptured: Vec<Vec<f64>>,
    /// Root of the sum of the squared terms of dK that come from [far](is_far) queries alone.
    pub far_dk: Vec<f64>,
    /// Root of the sum of the squared terms of dV that come from far queries alone.
    pub far_dv: Vec<f64>,
    /// Root of the sum of the squared terms of dSink that come from far queries alone.
    pub far_dsink: f64,
}

/// Limit of |LSE| beyond which a row is *far*: f32 then resolves its scores only to about a tenth of a natural
/// unit, or worse.
pub const FAR_LSE: f64 = 2e5;

/// Whether a row with this LSE is far.
#[must_use]
pub fn is_far(lse: f64) -> bool {
    lse.is_finite() && lse.abs() > FAR_LSE
}

/// Size of |LSE| from which on rounding it to f32 changes P visibly. The P of such a row are divided by their own sum.
const ROUNDED_LSE: f64 = 16384.0;

/// Gradients of a whole problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Backward {
    /// dQ of every (sequence, query head): `[seqlen_q, head_dim_qk]` each.
    pub dq: Vec<(SeqSpan, u32, Vec<f64>)>,
    /// dK of every (sequence, kv head): `[seqlen_k, head_dim_qk]` each.
    pub dk: Vec<(SeqSpan, u32, Vec<f64>)>,
    /// dV of every (sequence, kv head): `[seqlen_k, head_dim_v]` each.
    pub dv: Vec<(SeqSpan, u32, Vec<f64>)>,
    /// dBias over the bias' own dense shape; empty where there is no elementwise bias.
    pub dbias: Vec<f64>,
    /// dSink `[num_heads_q]`.
    pub dsink: Vec<f64>,
    /// Gradient of each tensor that the score function captures and the problem wants, dense.
    pub dcaptured: Vec<Vec<f64>>,
}

/// Computes every gradient. `args` are in host memory; only inputs are read, O and LSE are recomputed.
///
/// # Errors
/// Lengths or operands that are missing or do not fit.
pub fn backward(
    problem: &ValidBwd,
    args: &BwdArgs<'_>,
    precision: Precision,
) -> Result<Backward, ProblemError> {
    let dims = problem.fwd.dims;
    let mut all = Backward {
        dq: vec![],
        dk: vec![],
        dv: vec![],
        dbias: vec![],
        dsink: vec![0.0; dims.num_heads_q as usize],
        dcaptured: zeros(problem),
    };
    let bias_shape = match problem.fwd.score.bias {
        Bias::Elementwise(bias) => Some((bias.broadcast, problem.fwd.shape_bias(bias.broadcast))),
        _ => None,
    };
    if let Some((_, shape)) = bias_shape {
        all.dbias = vec![0.0; shape.num_elems() as usize];
    }
    for span in spans(&problem.fwd, &args.seq)? {
        for i_head in 0..dims.num_heads_q {
            let head = backward_head(problem, args, span, i_head, precision)?;
            all.dsink[i_head as usize] += head.dsink;
            all.dcaptured.iter_mut().zip(&head.dcaptured).for_each(|(sums, terms)| add(sums, terms));
            if let Some((broadcast, shape)) = bias_shape {
                let (b, h) = broadcast.index(span.i_batch, i_head);
                for (i, ds) in head.ds.chunks_exact((span.seqlen_k as usize).max(1)).enumerate() {
                    let start = ((b * shape.head + h) as usize * shape.seq as usize + i) * shape.dim as usize;
                    add(&mut all.dbias[start..][..ds.len()], ds);
                }
            }
            all.dq.push((span, i_head, head.dq));
            let i_head_kv = i_head / problem.fwd.gqa_ratio();
            if i_head.is_multiple_of(problem.fwd.gqa_ratio()) {
                all.dk.push((span, i_head_kv, head.dk));
                all.dv.push((span, i_head_kv, head.dv));
            } else if let (Some((_, _, dk)), Some((_, _, dv))) = (all.dk.last_mut(), all.dv.last_mut()) {
                add(dk, &head.dk);
                add(dv, &head.dv);
            }
        }
    }
    if matches!(precision, Precision::AsInput(_)) {
        let dtype = problem.dtype_grad;
        for (_, _, grad) in all.dq.iter_mut().chain(&mut all.dk).chain(&mut all.dv) {
            grad.iter_mut().for_each(|x| *x = dtype.round(*x));
        }
        for (grad, wanted) in all.dcaptured.iter_mut().zip(&problem.dcaptured) {
            grad.iter_mut().for_each(|x| *x = wanted.dtype.round(*x));
        }
        if let Some(dbias) = problem.dbias {
            all.dbias.iter_mut().for_each(|x| *x = dbias.dtype.round(*x));
        }
    }
    Ok(all)
}

/// The logarithm of a sum, `ln(e^a + e^b)`.
fn add_exponents<T: Float>(a: T, b: T) -> T {
    let max = a.max(b);
    if max.is_infinite() { max } else { max + ((a - max).exp() + (b - max).exp()).ln() }
}

fn add(sums: &mut [f64], terms: &[f64]) {
    sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
}

/// Gradients of one (sequence, query head), not yet rounded to their type.
///
/// # Errors
/// Operands that are missing.
pub fn backward_head(
    problem: &BwdProblem,
    args: &BwdArgs<'_>,
    span: SeqSpan,
    i_head: u32,
    precision: Precision,
) -> Result<HeadBackward, ProblemError> {
    let one = OneHead { problem, args, span, i_head };
    match precision {
        Precision::Exact => one.differentiate::<f64>(precision),
        Precision::AsInput(_) => one.differentiate::<f32>(precision),
    }
}

/// Some gradients of one (sequence, query head), as functions of the O and LSE that `args` hold: dQ and dS have a
/// row for each of `rows`, dK and dV one for each of `keys`; dSink is whole. Whole gradients cost time quadratic in
/// the length, this part linear time.
///
/// # Errors
/// Operands that are missing.
pub fn backward_part(
    problem: &BwdProblem,
    args: &BwdArgs<'_>,
    span: SeqSpan,
    i_head: u32,
    part: Part<'_>,
    precision: Precision,
) -> Result<HeadBackward, ProblemError> {
    let one = OneHead { problem, args, span, i_head };
    match precision {
        Precision::Exact => one.differentiate_part::<f64>(part, precision),
        Precision::AsInput(_) => one.differentiate_part::<f32>(part, precision),
    }
}

/// Which rows of the gradients [`backward_part`] computes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Part<'a> {
    /// The queries, in `0..span.seqlen_q`, whose rows of dQ and dS are computed.
    pub rows: &'a [u32],
    /// The keys, in `0..span.seqlen_k`, whose rows of dK and dV are computed.
    pub keys: &'a [u32],
}

/// One query head of one sequence of a call.
#[derive(Clone, Copy)]
struct OneHead<'a> {
    problem: &'a BwdProblem,
    args: &'a BwdArgs<'a>,
    span: SeqSpan,
    i_head: u32,
}

impl<'a> OneHead<'a> {
    fn differentiate<T: Float>(self, precision: Precision) -> Result<HeadBackward, ProblemError> {
        let (head, dout) = self.gather::<T>(precision)?;
        let Self { problem, span, i_head, .. } = self;
        let fwd = &problem.fwd;
        let mut sums = HeadSums::zeros(&head, problem, span.seqlen_q as usize, span.seqlen_k as usize);
        for i in 0..span.seqlen_q {
            let softmax = Softmax::of_row(&head, i);
            let p: Vec<T> = softmax.weights.iter().map(|&weight| weight / softmax.row_sum).collect();
            let mut o = vec![T::zero(); head.head_dim_v];
            for (&j, &p) in softmax.visible.iter().zip(&p) {
                axpy(&mut o, head.probability(p) * head.keep_factor(i, j), row(&head.v, j, head.head_dim_v));
            }
            let o: Vec<T> = o.iter().map(|&o| real(head.as_result(o, fwd.dtypes.o))).collect();
            let dlse = self.dlse_at(i)?;
            let query = Query::new(&head, i, row(&dout, i, head.head_dim_v), &o, softmax.lse, dlse);
            for (j, pair) in query.pairs(&head, &softmax.visible, &p, problem.dtype_grad) {
                sums.add_to_row(&head, i as usize, j, &pair);
                sums.add_to_captured(&head, problem, (i, j), &pair);
                sums.add_to_key(j as usize, &query, &pair);
            }
            sums.add_sink(&head, &query, softmax.sink / softmax.row_sum);
        }
        Ok(sums.finish(span, i_head))
    }

    fn differentiate_part<T: Float>(
        self,
        part: Part<'_>,
        precision: Precision,
    ) -> Result<HeadBackward, ProblemError> {
        let (head, dout) = self.gather::<T>(precision)?;
        let Self { problem, args, span, i_head } = self;
        let fwd = &problem.fwd;
        let o = Rows { name: "o", slice: args.o, dtype: fwd.dtypes.o, strides: fwd.strides.o };
        let dim_v = head.head_dim_v;
        let o: Vec<T> =
            o.gather(|i| (span.q_batch, span.q_row + i), i_head, span.seqlen_q, dim_v as u32, T::one())?;
        let queries = (0..span.seqlen_q)
            .map(|i| {
                let mut lse: T = f32_at("lse", Some(&args.lse), span.lse_index(fwd, i_head, i))?;
                if let Some(sink) =
                    head.sink.filter(|_| fwd.lists.is_some_and(|lists| lists.lse_without_sink))
                {
                    lse = add_exponents(lse, sink);
                }
                let dlse = self.dlse_at(i)?;
                Ok(Query::new(&head, i, row(&dout, i, dim_v), row(&o, i, dim_v), lse, dlse))
            })
            .collect::<Result<Vec<_>, ProblemError>>()?;

        let mut sums = HeadSums::zeros(&head, problem, part.rows.len(), part.keys.len());
        let rounded = |lse: T| lse.is_finite() && lse.abs() >= real(ROUNDED_LSE);
        let own: Vec<Option<Softmax<T>>> =
            queries.iter().map(|query| rounded(query.lse).then(|| Softmax::of_row(&head, query.i))).collect();
        let pair = |query: &Query<'_, T>, j: u32| {
            // A row without visible keys must have P = 0 = exp(S - inf).
            let lse = if query.lse == T::neg_infinity() { T::infinity() } else { query.lse };
            let p = match &own[query.i as usize] {
                None => (head.score(query.i, j) - lse).exp(),
                Some(row) => {
                    row.visible.binary_search(&j).map_or(T::zero(), |at| row.weights[at] / row.row_sum)
                }
            };
            query.pair(&head, j, p, problem.dtype_grad)
        };
        for (at, &i) in part.rows.iter().enumerate() {
            for j in head.visible(i) {
                sums.add_to_row(&head, at, j, &pair(&queries[i as usize], j));
            }
        }
        for (at, &j) in part.keys.iter().enumerate() {
            for query in &queries {
                for _ in 0..head.times_seen(query.i, j) {
                    sums.add_to_key(at, query, &pair(query, j));
                }
            }
        }
        for (query, own) in queries.iter().zip(&own) {
            let share = match (own, head.sink) {
                (Some(row), _) => row.sink / row.row_sum,
                (None, Some(sink)) if sink == T::infinity() => T::one(),
                (None, Some(sink)) => (sink - query.lse).exp(),
                (None, None) => T::zero(),
            };
            sums.add_sink(&head, query, share);
        }
        Ok(sums.finish(span, i_head))
    }

    /// The head's operands, including dO, as plain matrices.
    fn gather<T: Float>(self, precision: Precision) -> Result<(Head<'a, T>, Vec<T>), ProblemError> {
        let Self { problem, args, span, i_head } = self;
        let fwd = &problem.fwd;
        let head = Head::<T>::gather(fwd, &Inputs::from(args), span, i_head, precision)?;
        let dout = Rows { name: "dout", slice: args.dout, dtype: fwd.dtypes.o, strides: problem.dout };
        let dout = dout.gather(
            |i| (span.q_batch, span.q_row + i),
            i_head,
            span.seqlen_q,
            fwd.dims.head_dim_v,
            T::one(),
        )?;
        Ok((head, dout))
    }

    fn dlse_at<T: Float>(self, i: u32) -> Result<T, ProblemError> {
        if !self.problem.has_dlse {
            return Ok(T::zero());
        }
        let index = self.span.lse_index(&self.problem.fwd, self.i_head, i);
        f32_at("dlse", self.args.dlse.as_ref(), index)
    }
}
