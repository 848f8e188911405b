//! Gradients, computed for one query head at a time.

use fmha_core::{Bias, BwdArgs, ProblemError, ValidBwd};

use super::score::{Head, spans};
use super::{Fault, Input, Output, floats};

pub(super) fn run(problem: &ValidBwd, args: &BwdArgs<'_>, fault: Option<Fault>) -> Result<(), ProblemError> {
    let fwd = problem.fwd();
    let (dims, ratio) = (fwd.dims, fwd.gqa_ratio());
    let is = |which| fault == Some(which);
    let grad = problem.dtype_grad;
    let dq_out = Output::new(&args.dq, grad, problem.dq, fault);
    let dk_out = Output::new(&args.dk, grad, problem.dk, fault);
    let dv_out = Output::new(&args.dv, grad, problem.dv, fault);
    let o = Input::new(args.o, fwd.dtypes.o, fwd.strides.o, fault);
    let dout = Input::new(args.dout, fwd.dtypes.o, problem.dout, fault);
    let (lse, dlse) = (floats(Some(&args.lse)), floats(args.dlse.as_ref()));
    let (dim_qk, dim_v) = (dims.head_dim_qk, dims.head_dim_v);
    let bias = match (problem.dbias, fwd.score.bias) {
        (Some(_), Bias::Elementwise(bias)) => Some((bias.broadcast, fwd.shape_bias(bias.broadcast))),
        _ => None,
    };
    let mut dbias = vec![0f32; bias.map_or(0, |(_, shape)| shape.num_elems() as usize)];
    let mut dsink = vec![0f32; dims.num_heads_q as usize];

    for span in spans(fwd, &args.seq, fault)? {
        let batch = span.q_batch;
        if is(Fault::DbiasOfLastBatch) {
            dbias.fill(0.0);
        }
        for i_head_kv in 0..dims.num_heads_kv {
            let mut dk = vec![0f32; (span.seqlen_k * dim_qk) as usize];
            let mut dv = vec![0f32; (span.seqlen_k * dim_v) as usize];
            for i_head in i_head_kv * ratio..(i_head_kv + 1) * ratio {
                let head = Head::new(fwd, [args.q, args.k, args.v], &args.score, span, i_head, fault);
                let forgotten =
                    is(Fault::DkHeadForgotten) && i_head + 1 == (i_head_kv + 1) * ratio && ratio > 1;
                for i in 0..span.seqlen_q {
                    let row = span.q_row + i;
                    let at = span.lse_index(fwd, i_head, i);
                    let delta: f32 = (0..dim_v)
                        .map(|d| dout.at(batch, row, i_head, d) * o.at(batch, row, i_head, d))
                        .sum();
                    let delta = if is(Fault::DeltaForgotten) { 0.0 } else { delta };
                    let dlse =
                        if is(Fault::DlseForgotten) { 0.0 } else { dlse.get(at).copied().unwrap_or(0.0) };
                    let (origin, log_sum) = normaliser(&head, i, lse[at]);
                    let mut dq = vec![0f32; dim_qk as usize];
                    for j in (0..span.seqlen_k).filter(|&j| head.band.visible(i, j)) {
                        let (s, slope) = head.score(i, j);
                        let p = (s - origin - log_sum).exp();
                        let z = head.keep_factor(i, j);
                        let zv = if is(Fault::DvWithoutDropout) { 1.0 } else { z };
                        let mut dp = 0.0;
                        for d in 0..dim_v {
                            let g = dout.at(batch, row, i_head, d);
                            dv[(j * dim_v + d) as usize] += zv * p * g;
                            dp += z * g * head.v(j, d);
                        }
                        let ds = p * (dp - delta + dlse);
                        if let Some((broadcast, shape)) = bias {
                            let (b, h) = broadcast.index(span.i_batch, i_head);
                            let to = ((b * shape.head + h) * shape.seq + i) * shape.dim + j;
                            dbias[to as usize] += ds;
                        }
                        // The gradient of a dequantised Q contains K's descale, not Q's.
                        let descale_q = descale(args.score.descale_q.as_ref(), fwd.scales.descale_q, &head);
                        let descale_k = descale(args.score.descale_k.as_ref(), fwd.scales.descale_k, &head);
                        let scale = if is(Fault::ScaleDropped) { 1.0 } else { fwd.resolved_softmax_scale() };
                        let ds = ds * slope * scale;
                        let ds_q = if is(Fault::DqWithoutScale) { ds / scale } else { ds };
                        for d in 0..dim_qk {
                            dq[d as usize] += ds_q * head.k(j, d) * descale_k;
                            let last_tile = j >= span.seqlen_k / 32 * 32 && span.seqlen_k > 32;
                            if !(forgotten || last_tile && is(Fault::DkLastTileForgotten)) {
                                dk[(j * dim_qk + d) as usize] += ds * head.q(i, d) * descale_q;
                            }
                        }
                    }
                    // A sink without weight takes no share of a row without keys, whose LSE is -inf too.
                    if let Some(sink) = head.sink.filter(|&sink| sink != f32::NEG_INFINITY) {
                        let share = (sink - origin - log_sum).exp() * (dlse - delta);
                        dsink[i_head as usize] += if is(Fault::DsinkSign) { -share } else { share };
                    }
                    for (d, &value) in dq.iter().enumerate() {
                        dq_out.put([batch, row, i_head, d as u32], value);
                    }
                }
            }
            for j in 0..span.seqlen_k {
                for d in 0..dim_qk {
                    dk_out.put([span.k_batch, span.k_row + j, i_head_kv, d], dk[(j * dim_qk + d) as usize]);
                }
                for d in 0..dim_v {
                    dv_out.put([span.k_batch, span.k_row + j, i_head_kv, d], dv[(j * dim_v + d) as usize]);
                }
            }
        }
    }
    if let (Some((_, shape)), Some(to), Some(slice)) = (bias, problem.dbias, &args.dbias) {
        let out = Output::new(slice, to.dtype, to.strides, fault);
        for (at, &value) in dbias.iter().enumerate() {
            let at = at as u32;
            let (row, dim) = (at / shape.dim % shape.seq, at % shape.dim);
            let (head, batch) =
                (at / shape.dim / shape.seq % shape.head, at / shape.dim / shape.seq / shape.head);
            out.put([batch, row, head, dim], value);
        }
    }
    if let Some(slice) = &args.dsink {
        let out = Output::floats(slice);
        dsink.iter().enumerate().for_each(|(head, &value)| out.put_at(head, value));
    }
    Ok(())
}

/// Origin and logarithm of the sum by which a row's P are normalised, exp(S - origin - log_sum): 0 and its
/// LSE. Where half an ulp of the LSE would show in P, they are the row's maximum and the logarithm of its own
/// sum.
fn normaliser(head: &Head<'_>, i: u32, lse: f32) -> (f32, f32) {
    const LARGEST_PLAIN_LSE: f32 = 16384.0;
    if lse.is_infinite() || lse.abs() < LARGEST_PLAIN_LSE {
        return (lse, 0.0);
    }
    let keys = (0..head.span.seqlen_k).filter(|&j| head.band.visible(i, j));
    let scores: Vec<f32> = keys.map(|j| head.score(i, j).0).chain(head.sink).collect();
    let origin = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    (origin, scores.iter().map(|s| (s - origin).exp()).sum::<f32>().ln())
}

fn descale(slice: Option<&fmha_core::DevSlice<'_>>, kind: fmha_core::Descale, head: &Head<'_>) -> f32 {
    let index = kind.index(head.span.i_batch, head.i_head_kv, head.problem.dims.num_heads_kv);
    floats(slice).get(index).copied().unwrap_or(1.0)
}
