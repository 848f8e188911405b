//! Comparison of merged partial results with the reference.

use fmha_core::reference::{combine, is_far};
use fmha_core::{CombineArgs, DType, DevSliceMut, Merge, PartialResult, Result};

use crate::tensor::Operand;
use crate::tensors::HostCombine;
use crate::tolerance::{Bound, MaxRms, Yardstick, bound, lse_bound, smallest_subnormal};
use crate::verdict::{Place, Stat, Verdict};

/// Compares the merged O and LSE that `host` holds with the reference.
///
/// The plain algorithm here is f32 arithmetic with one rounding, so its error is estimated as that of rounding the
/// exact result.
///
/// # Errors
/// Operands that are missing.
pub fn check_combine(host: &HostCombine) -> Result<Verdict> {
    let problem = &*host.problem;
    let operands = &host.operands;
    if problem.adds() {
        return Ok(check_sum(host));
    }
    let parts: Vec<PartialResult<'_>> = (0..problem.num_parts)
        .map(|part| PartialResult {
            o: operands.expect(Operand::PartO(part)).slice(),
            lse: operands.expect(Operand::PartLse(part)).slice(),
        })
        .collect();
    let args = CombineArgs::new(&parts, DevSliceMut::host::<f32>(&mut []));
    let (o, lse) = combine(problem, &args)?;

    let shape = problem.shape();
    let (mut o_stat, mut lse_stat) = (Stat::default(), Stat::default());
    // LSE's rounding errors are relative: a row with a far LSE has a larger bound, which must not apply to other
    // rows.
    let (mut max_lse, mut range, mut lse_range): (f64, f64, f64) = (0.0, 0.0, 0.0);
    let mut faults = Vec::new();
    for (index, &want_lse) in lse.iter().enumerate() {
        let at = index as u32;
        let (row, head, batch) = (at % shape.seq, at / shape.seq % shape.head, at / shape.seq / shape.head);
        let first = ((batch * shape.seq + row) * shape.head + head) as usize * shape.dim as usize;
        let lses = (0..problem.num_parts).map(|part| operands.expect(Operand::PartLse(part)).nth(index));
        let top = lses.clone().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = lses.map(|lse| (lse - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        // A weight is the exponential of a difference of two LSE, and has only a relative error; in f32 it is 0
        // below e^-104.
        let seen = weights.iter().map(|weight| -weight.ln()).filter(|&below| below < 110.0);
        let row_range = seen.fold(0.0, f64::max);
        range = range.max(row_range);
        let weights: Vec<f64> = weights.into_iter().map(|weight| weight / sum).collect();
        for dim in 0..shape.dim {
            let got = operands.expect(Operand::O).get(batch, row, head, dim);
            let want = o[first + dim as usize];
            let place = Place { batch, head, row, dim, got, want };
            let square: f64 = weights
                .iter()
                .enumerate()
                .filter(|&(_, &weight)| weight > 0.0)
                .map(|(part, &weight)| {
                    let term = operands.expect(Operand::PartO(part as u32)).get(batch, row, head, dim);
                    (weight * term).powi(2)
                })
                .sum();
            o_stat.add(place, problem.dtype_o.round(want), square.sqrt());
            if want_lse == f64::NEG_INFINITY && got != 0.0 {
                faults.push(format!("o at row {row} dim {dim} is {got}, but no part saw a key: 0"));
            }
        }
        if let Some(written) = operands.get(Operand::Lse) {
            let unit = if is_far(want_lse) { want_lse.abs() } else { 1.0 };
            let (got, want) = (written.nth(index) / unit, want_lse / unit);
            lse_range = lse_range.max(row_range / unit);
            let place = Place { batch, head, row, dim: 0, got, want };
            lse_stat.add(place, DType::F32.round(want_lse) / unit, 0.0);
            if want_lse.is_finite() {
                max_lse = max_lse.max(want.abs());
            }
        }
    }
    faults.truncate(4);
    let yardstick = Yardstick {
        factor: 2.0,
        max_same: o_stat.max_same,
        rmse_same: o_stat.rmse_same(),
        u_out: problem.dtype_o.unit_roundoff(),
        tiny_out: smallest_subnormal(problem.dtype_o),
        u_inner: 0.0,
        reference: o_stat.reference(),
        spread: o_stat.spread(),
        logits: range,
        far: MaxRms::default(),
        far_logits: 0.0,
        count: o_stat.count,
    };
    let mut verdict =
        Verdict { tensors: vec![o_stat.verdict("o", bound(&yardstick), None)], faults, ..Verdict::default() };
    if problem.write_lse {
        let bound = lse_bound(lse_stat.max_same, lse_range, max_lse);
        verdict.tensors.push(lse_stat.verdict("lse", bound, None));
    }
    Ok(verdict)
}

/// Compares `host`'s sum of parts bit for bit with the terms added in f32, in order, and rounded once.
fn check_sum(host: &HostCombine) -> Verdict {
    let (problem, operands) = (&*host.problem, &host.operands);
    let shape = problem.shape();
    let mut stat = Stat::default();
    for index in 0..problem.lse_elems() as u32 {
        let (row, head, batch) =
            (index % shape.seq, index / shape.seq % shape.head, index / shape.seq / shape.head);
        for dim in 0..shape.dim {
            let term = |part| operands.expect(Operand::PartO(part)).get(batch, row, head, dim) as f32;
            // The old content of O counts as one more part, after all others.
            let held = (problem.merge == Merge::AddTo).then_some(problem.num_parts);
            let total = held
                .into_iter()
                .chain(0..problem.num_parts)
                .map(term)
                .reduce(|sum, term| sum + term)
                .unwrap_or(0.0);
            let want = problem.dtype_o.round(total.into());
            let got = operands.expect(Operand::O).get(batch, row, head, dim);
            stat.add(Place { batch, head, row, dim, got, want }, want, 0.0);
        }
    }
    Verdict { tensors: vec![stat.verdict("o", Bound { max: 0.0, rmse: 0.0 }, None)], ..Verdict::default() }
}
