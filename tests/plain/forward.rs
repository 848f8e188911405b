//! Forward attention in tiles of keys, with an online softmax.

use fmha_core::{FwdArgs, FwdProblem, ProblemError};

use super::score::{Head, spans};
use super::{Fault, Output, floats};

const BLOCK_M: u32 = 16;
const BLOCK_N: u32 = 32;

pub(super) fn run(
    problem: &FwdProblem,
    args: &FwdArgs<'_>,
    fault: Option<Fault>,
) -> Result<(), ProblemError> {
    let o = Output::new(&args.o, problem.dtypes.o, problem.strides.o, fault);
    let lse = args.lse.as_ref().map(Output::floats);
    let scale_o = match fault {
        Some(Fault::ScaleOForgotten) => 1.0,
        _ => floats(args.scale_o.as_ref()).first().copied().unwrap_or(1.0),
    };
    for span in spans(problem, &args.seq, fault)? {
        for i_head in 0..problem.dims.num_heads_q {
            let head = Head::new(
                problem,
                [args.q, args.k_slice(), args.v_slice()],
                &args.score,
                span,
                i_head,
                fault,
            );
            for i in 0..span.seqlen_q {
                let last_of_partial = i + 1 == span.seqlen_q && !span.seqlen_q.is_multiple_of(BLOCK_M);
                if last_of_partial && fault == Some(Fault::LastRowForgotten) {
                    continue;
                }
                let (row, row_lse) = attend(&head, i);
                for (d, value) in row.iter().enumerate() {
                    let at = [span.q_batch, span.q_row + i, i_head, d as u32];
                    let overflows = problem.dtypes.o.is_fp8()
                        && f64::from(value * scale_o).abs() > problem.dtypes.o.max_finite();
                    let saturates = !overflows || fault != Some(Fault::SaturationForgotten);
                    o.put(at, if saturates { value * scale_o } else { f32::NAN });
                }
                if let Some(lse) = &lse {
                    lse.put_at(span.lse_index(problem, i_head, i), row_lse);
                }
                let next_exists = span.q_row + i + 1 < problem.shape_o().seq;
                if last_of_partial && next_exists && fault == Some(Fault::PaddingRowWritten) {
                    o.put([span.q_batch, span.q_row + i + 1, i_head, 0], 0.0);
                }
            }
            if let Some(mask) = &args.keep_mask {
                write_keep_mask(&head, mask.as_mut_ptr());
            }
        }
    }
    Ok(())
}

/// Computes O and LSE of one query.
fn attend(head: &Head<'_>, i: u32) -> (Vec<f32>, f32) {
    let is = |fault| head.fault == Some(fault);
    let seqlen_k = head.span.seqlen_k;
    let dim = head.problem.dims.head_dim_v;
    // O is summed in f64: before the division by the sum it may exceed f32, if V is near f32's largest number.
    let mut o = vec![0f64; dim as usize];
    let (mut row_max, mut row_sum) = (f32::NEG_INFINITY, 0f32);
    let tiles = match seqlen_k.div_ceil(BLOCK_N) {
        tiles if is(Fault::TileCountRoundedDown) => tiles.min((seqlen_k / BLOCK_N).max(1)),
        tiles if is(Fault::LastTileSkipped) && tiles > 2 => tiles - 1,
        tiles => tiles,
    };
    for tile in 0..tiles {
        let keys = tile * BLOCK_N..((tile + 1) * BLOCK_N).min(seqlen_k);
        let scores: Vec<(u32, f32)> =
            keys.clone().filter(|&j| head.band.visible(i, j)).map(|j| (j, head.score(i, j).0)).collect();
        let tile_max =
            scores.iter().fold(row_max, |max, &(_, s)| if s > max || s.is_nan() { s } else { max });
        let new_max = if is(Fault::MaxForgotten) { 0.0 } else { tile_max };
        if new_max == f32::NEG_INFINITY && !is(Fault::EmptyRowDivides) {
            continue;
        }
        let rescale = if row_max == f32::NEG_INFINITY { 0.0 } else { (row_max - new_max).exp() };
        row_max = new_max;
        row_sum *= rescale;
        if !is(Fault::RescaleForgotten) {
            o.iter_mut().for_each(|o| *o *= f64::from(rescale));
        }
        for &(j, s) in &scores {
            let weight = (s - row_max).exp();
            if head.kept(i, j) || !is(Fault::DropoutInTheSum) {
                row_sum += weight;
            }
            let p = f64::from(weight * head.keep_factor(i, j));
            for (d, o) in o.iter_mut().enumerate() {
                *o += p * f64::from(head.v(j, d as u32));
            }
        }
        if is(Fault::HiddenValuesTimesZero) {
            for j in keys.filter(|&j| !head.band.visible(i, j)) {
                for (d, o) in o.iter_mut().enumerate() {
                    *o += 0.0 * f64::from(head.v(j, d as u32));
                }
            }
        }
    }
    if let Some(sink) = head.sink {
        let new_max = row_max.max(sink);
        let rescale = if row_max == f32::NEG_INFINITY { 0.0 } else { (row_max - new_max).exp() };
        o.iter_mut().for_each(|o| *o *= f64::from(rescale));
        row_sum = row_sum * rescale + (sink - new_max).exp();
        if is(Fault::SinkInTheNumerator) {
            o.iter_mut().for_each(|o| *o += f64::from((sink - new_max).exp()));
        }
        row_max = new_max;
    }
    let empty = row_max == f32::NEG_INFINITY || row_sum == 0.0;
    if empty && !is(Fault::EmptyRowDivides) {
        return (vec![0.0; dim as usize], f32::NEG_INFINITY);
    }
    let gain = if is(Fault::GainOfOnePercent) { 1.01 } else { 1.0 };
    let o = o.iter().map(|o| (o / f64::from(row_sum) * gain) as f32).collect();
    let lse = match head.fault {
        Some(Fault::LseInLog2) => row_max * std::f32::consts::LOG2_E + row_sum.log2(),
        Some(Fault::LseWithoutMax) => row_sum.ln(),
        _ => row_max + row_sum.ln(),
    };
    (o, lse)
}

fn write_keep_mask(head: &Head<'_>, to: *mut u8) {
    let dims = head.problem.dims;
    let matrix = (head.span.i_batch * dims.num_heads_q + head.i_head) as usize;
    for i in 0..head.span.seqlen_q {
        let row = (matrix * dims.seqlen_q as usize + i as usize) * dims.seqlen_k as usize;
        for j in 0..head.span.seqlen_k {
            // SAFETY: inside the keep mask, whose size `check_fwd` compared; this call alone writes it.
            unsafe { *to.add(row + j as usize) = u8::from(head.kept(i, j)) };
        }
    }
}
