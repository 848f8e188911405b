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

use super::forward::Softmax;
use super::head::{Head, Inputs, Precision, Rows, dot, f32_at, real, row};
use crate::args::BwdArgs;
use crate::bwd::{BwdProblem, ValidBwd};
use crate::error::ProblemError;
use crate::score::Bias;
use crate::seq::{SeqSpan, spans};

/// Gradients of one (sequence, query head). Those of K and V are this query head's share.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadBackward {
    /// The sequence.
    pub span: SeqSpan,
    /// The query head.
    pub i_head: u32,
    /// dQ `[seqlen_q, head_dim_qk]`.
    pub dq: Vec<f64>,
    /// dK `[seqlen_k, head_dim_qk]`.
    pub dk: Vec<f64>,
    /// dV `[seqlen_k, head_dim_v]`.
    pub dv: Vec<f64>,
    /// dS, the bias' gradient, `[seqlen_q, seqlen_k]`.
    pub ds: Vec<f64>,
    /// dSink.
    pub dsink: f64,
    /// How far independent relative errors of the terms move each gradient, per unit of error. In
    /// [`Precision::Exact`] only, else empty.
    pub spread: BackwardSpread,
}

/// The root of the summed squares of the terms of each gradient, where a difference counts with both
/// its terms: what rounding errors are measured by. Shaped like the gradients.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BackwardSpread {
    /// Of dQ.
    pub dq: Vec<f64>,
    /// Of dK.
    pub dk: Vec<f64>,
    /// Of dV.
    pub dv: Vec<f64>,
    /// Of dS.
    pub ds: Vec<f64>,
    /// Of dSink.
    pub dsink: f64,
}

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
}

/// Every gradient. `args` are in host memory; only inputs are read, O and LSE are computed anew.
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
    };
    let bias_shape = match problem.fwd.bias {
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
    if precision == Precision::AsInput {
        let dtype = problem.dtype_grad;
        for (_, _, grad) in all.dq.iter_mut().chain(&mut all.dk).chain(&mut all.dv) {
            grad.iter_mut().for_each(|x| *x = dtype.round(*x));
        }
        if let Some(dbias) = problem.dbias {
            all.dbias.iter_mut().for_each(|x| *x = dbias.dtype.round(*x));
        }
    }
    Ok(all)
}

fn add(sums: &mut [f64], terms: &[f64]) {
    sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
}

/// One (sequence, query head), gradients not yet rounded to their type.
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
    match precision {
        Precision::Exact => differentiate::<f64>(problem, args, span, i_head, precision),
        Precision::AsInput => differentiate::<f32>(problem, args, span, i_head, precision),
    }
}

fn differentiate<T: Float>(
    problem: &BwdProblem,
    args: &BwdArgs<'_>,
    span: SeqSpan,
    i_head: u32,
    precision: Precision,
) -> Result<HeadBackward, ProblemError> {
    let fwd = &problem.fwd;
    let head = Head::<T>::gather(fwd, &Inputs::from(args), span, i_head, precision)?;
    let (dim_qk, dim_v) = (head.head_dim_qk, head.head_dim_v);
    let dout = Rows { name: "dout", slice: args.dout, dtype: fwd.dtype_o, strides: problem.dout };
    let dout: Vec<T> =
        dout.gather(span.storage_batch, i_head, span.q_row, span.seqlen_q, dim_v as u32, T::one())?;

    let zeros = |rows: u32, dim: usize| vec![T::zero(); rows as usize * dim];
    let mut dq = zeros(span.seqlen_q, dim_qk);
    let mut dk = zeros(span.seqlen_k, dim_qk);
    let mut dv = zeros(span.seqlen_k, dim_v);
    let mut ds_all = zeros(span.seqlen_q, span.seqlen_k as usize);
    let mut dsink = T::zero();
    // Squares of the terms, summed beside the terms themselves.
    let exact = head.is_exact();
    let squares = |len: usize| vec![T::zero(); if exact { len } else { 0 }];
    let (mut dq_square, mut dk_square) = (squares(dq.len()), squares(dk.len()));
    let (mut dv_square, mut ds_square) = (squares(dv.len()), squares(ds_all.len()));
    let mut dsink_square = T::zero();

    for i in 0..span.seqlen_q {
        let softmax = Softmax::of_row(&head, i);
        let dout_i = row(&dout, i, dim_v);
        let dlse = match (problem.has_dlse, args.dlse) {
            (true, dlse) => f32_at("dlse", dlse.as_ref(), span.lse_index(fwd, i_head, i))?,
            (false, _) => T::zero(),
        };
        let p: Vec<T> = softmax.weights.iter().map(|&weight| weight / softmax.row_sum).collect();

        let mut o = vec![T::zero(); dim_v];
        for (&j, &p) in softmax.visible.iter().zip(&p) {
            let p = head.probability(p) * head.keep_factor(i, j);
            axpy(&mut o, p, row(&head.v, j, dim_v));
            axpy(row_mut(&mut dv, j, dim_v), p, dout_i);
            if exact {
                axpy_squares(row_mut(&mut dv_square, j, dim_v), p, dout_i);
            }
        }
        let o: Vec<T> = o.iter().map(|&o| real(head.as_result(o, fwd.dtype_o))).collect();
        let d = dot(dout_i, &o);
        let d_square = dout_i.iter().zip(&o).fold(d * d, |sum, (&x, &y)| sum + (x * y) * (x * y));

        for (&j, &p) in softmax.visible.iter().zip(&p) {
            let dp = head.keep_factor(i, j) * dot(dout_i, row(&head.v, j, dim_v));
            let ds = p * (dp - d + dlse);
            ds_all[i as usize * span.seqlen_k as usize + j as usize] = ds;
            let (_, slope) = head.capped(i, j);
            if exact {
                let size = p * (dp * dp + d_square + dlse * dlse).sqrt();
                ds_square[i as usize * span.seqlen_k as usize + j as usize] = size * size;
                let size = size * slope * head.softmax_scale;
                axpy_squares(row_mut(&mut dq_square, i, dim_qk), size, row(&head.k, j, dim_qk));
                axpy_squares(row_mut(&mut dk_square, j, dim_qk), size, row(&head.q, i, dim_qk));
            }
            let ds = head.score_gradient(ds * slope, problem.dtype_grad) * head.softmax_scale;
            axpy(row_mut(&mut dq, i, dim_qk), ds, row(&head.k, j, dim_qk));
            axpy(row_mut(&mut dk, j, dim_qk), ds, row(&head.q, i, dim_qk));
        }
        if let Some(sink) = head.sink {
            let share = (sink - softmax.lse).exp();
            dsink = dsink + share * (dlse - d);
            dsink_square = dsink_square + share * share * (dlse * dlse + d_square);
        }
    }

    let plain =
        |values: Vec<T>| values.into_iter().map(|x| x.to_f64().unwrap_or(f64::NAN)).collect::<Vec<_>>();
    let roots = |squares: Vec<T>| plain(squares).into_iter().map(f64::sqrt).collect();
    Ok(HeadBackward {
        span,
        i_head,
        dq: plain(dq),
        dk: plain(dk),
        dv: plain(dv),
        ds: plain(ds_all),
        dsink: dsink.to_f64().unwrap_or(f64::NAN),
        spread: BackwardSpread {
            dq: roots(dq_square),
            dk: roots(dk_square),
            dv: roots(dv_square),
            ds: roots(ds_square),
            dsink: dsink_square.sqrt().to_f64().unwrap_or(f64::NAN),
        },
    })
}

fn row_mut<T>(matrix: &mut [T], index: u32, dim: usize) -> &mut [T] {
    &mut matrix[index as usize * dim..][..dim]
}

fn axpy_squares<T: Float>(y: &mut [T], a: T, x: &[T]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y = *y + (a * x) * (a * x));
}

fn axpy<T: Float>(y: &mut [T], a: T, x: &[T]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y = *y + a * x);
}
