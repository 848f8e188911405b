//! Checks of O, LSE and the keep mask of a forward call.

use std::sync::atomic::{AtomicU64, Ordering};

use fmha_core::reference::{HeadForward, Inputs, Precision, forward_rows, is_far};
use fmha_core::{ElemType, FwdProblem, ProblemError, Result};
use rayon::prelude::*;

use super::{Progress, Selection, inner_roundoff, logits_bound};
use crate::tensor::{Operand, Operands};
use crate::tensors::HostFwd;
use crate::tolerance::{Yardstick, bound, least_cosine, lse_bound, smallest_subnormal};
use crate::verdict::{Groups, Place, Stat, TensorVerdict, Verdict};

/// Comparison of O and LSE of some (sequence, head) pairs with the reference.
#[derive(Default)]
pub(super) struct Forward {
    o: Groups,
    /// Errors of LSE. In far rows they are relative to the reference.
    lse: Groups,
    /// Largest scores of rows that are not far, and of far rows.
    logits: [f64; 2],
    max_lse: f64,
    /// Largest ratio of scores to LSE in far rows.
    far_ratio: f64,
    faults: Vec<String>,
}

/// Compares the O, LSE and keep mask that `host` holds with the reference, on all cores.
///
/// FP8 O is compared as it is stored, that is times `scale_o` and clamped to the type's range.
///
/// # Errors
/// Operands that are missing.
pub fn check_fwd(host: &HostFwd, selection: &Selection, progress: Progress<'_>) -> Result<Verdict> {
    let pairs = selection.pairs(host.problem.dims.num_heads_q, &host.spans);
    let done = AtomicU64::new(0);
    // The reference gives O before `scale_o`, so FP8 O is scaled and rounded here.
    let mut unscaled = (*host.problem).clone();
    if unscaled.dtypes.o.is_fp8() {
        unscaled.dtypes.o = fmha_core::DType::F32;
    }
    let inputs = host.inputs();
    let parts = pairs
        .par_iter()
        .map(|&(span, i_head)| {
            let part = check_head(host, &unscaled, &inputs, span, i_head, selection);
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, pairs.len() as u64);
            part
        })
        .collect::<Result<Vec<Forward>, ProblemError>>()?;

    let mut all = Forward::default();
    parts.into_iter().for_each(|part| all.merge(part));
    let tensors = all.verdicts(&host.problem, host.rounds_p, host.problem.write_lse);
    if !selection.is_partial() {
        all.faults.extend(small_outputs(host, &inputs)?);
    }
    all.faults.truncate(4);
    Ok(Verdict { logits: all.logits(), tensors, faults: all.faults, note: None })
}

/// Tolerance of f32 small outputs (such as row maxima): a number may differ from the expected one, `want`, by this
/// times `1 + |want|`.
const SMALL_TOLERANCE: f64 = 3e-5;

/// Faults in the small outputs that a call has written.
fn small_outputs(host: &HostFwd, inputs: &Inputs<'_>) -> Result<Vec<String>, ProblemError> {
    let problem = &*host.problem;
    let mut faults = Vec::new();
    if problem.outputs.is_empty() {
        return Ok(faults);
    }
    let heads = problem.dims.num_heads_q;
    let of = |operand| host.operands.get(operand);
    let mut compare = |what: &str, at: String, got: f64, want: f64| {
        let equal = got == want || got.is_nan() && want.is_nan();
        let near = (got - want).abs() <= SMALL_TOLERANCE * (1.0 + want.abs());
        if !equal && !near {
            faults.push(format!("{what} of {at} is {got}, not {want}"));
        }
    };
    let mut greatest = vec![f64::NEG_INFINITY; heads as usize];
    let mut of_rows: Vec<usize> = Vec::new();
    for span in &host.spans {
        for i_head in 0..heads {
            let rows: Vec<u32> = (0..span.seqlen_q).collect();
            let head = forward_rows(problem, inputs, *span, i_head, &rows, Precision::Exact)?;
            let place = format!("batch {} head {i_head}", span.i_batch);
            for (&i, &max) in rows.iter().zip(&head.row_max) {
                let so_far = &mut greatest[i_head as usize];
                *so_far = if max > *so_far || max.is_nan() { max } else { *so_far };
                if let Some(tensor) = of(Operand::RowMax) {
                    let at = span.lse_index(problem, i_head, i);
                    of_rows.push(at);
                    compare("row_max", format!("{place} row {i}"), tensor.nth(at), max);
                }
            }
            if let Some(tensor) = of(Operand::KeySum) {
                let first = u64::from(span.i_batch * heads + i_head) * u64::from(problem.dims.seqlen_k);
                for key in 0..problem.dims.seqlen_k {
                    let want = head.key_sum.get(key as usize).copied().unwrap_or(0.0);
                    let got = tensor.nth((first + u64::from(key)) as usize);
                    compare("key_sum", format!("{place} key {key}"), got, want);
                }
            }
        }
    }
    if let Some(tensor) = of(Operand::HeadMax) {
        for (i_head, &max) in greatest.iter().enumerate() {
            compare("head_max", format!("head {i_head}"), tensor.nth(i_head), max);
        }
    }
    if let Some(tensor) = of(Operand::RowMax) {
        of_rows.sort_unstable();
        let elems = problem.extents(host.totals).lse_elems as usize;
        let written = (0..elems).find(|at| of_rows.binary_search(at).is_err() && !tensor.nth(*at).is_nan());
        faults.extend(written.map(|at| format!("row_max at {at}, which no sequence has, was written")));
    }
    Ok(faults)
}

fn check_head(
    host: &HostFwd,
    unscaled: &FwdProblem,
    inputs: &Inputs<'_>,
    i_span: usize,
    i_head: u32,
    selection: &Selection,
) -> Result<Forward, ProblemError> {
    let problem = &*host.problem;
    let span = host.spans[i_span];
    let rows = selection.rows(span.seqlen_q);
    let exact = forward_rows(unscaled, inputs, span, i_head, &rows, Precision::Exact)?;
    let same = forward_rows(unscaled, inputs, span, i_head, &rows, Precision::AsInput(host.score_sums))?;
    let scale = host.operands.get(Operand::ScaleO).map_or(1.0, |scale| scale.nth(0));
    let stored = |value: f64| {
        let most = problem.dtypes.o.max_finite();
        if problem.dtypes.o.is_fp8() && value.is_finite() {
            (value * scale).clamp(-most, most)
        } else {
            value
        }
    };
    let mut part = Forward::default();
    part.add(problem, &host.operands, &rows, [&exact, &same], stored);
    check_keep_mask(host, i_span, i_head, &rows, &mut part.faults);
    Ok(part)
}

impl Forward {
    pub(super) fn merge(&mut self, other: Self) {
        self.o.merge(&other.o);
        self.lse.merge(&other.lse);
        for (logits, other) in self.logits.iter_mut().zip(other.logits) {
            *logits = logits.max(other);
        }
        self.max_lse = self.max_lse.max(other.max_lse);
        self.far_ratio = self.far_ratio.max(other.far_ratio);
        self.faults.extend(other.faults);
    }

    /// Bound of the scores' magnitude in rows that are not far, or in far rows if there are no others.
    pub(super) fn logits(&self) -> f64 {
        self.logits[usize::from(self.o.near.count == 0)]
    }

    /// Compares `rows` of O and, if written, LSE with two results of the reference, exact and in the input's precision;
    /// `stored` converts a value to an FP8 O's.
    pub(super) fn add(
        &mut self,
        problem: &FwdProblem,
        operands: &Operands,
        rows: &[u32],
        [exact, same]: [&HeadForward; 2],
        stored: impl Fn(f64) -> f64,
    ) {
        let (span, i_head, dim) = (exact.span, exact.i_head, problem.dims.head_dim_v);
        let o = operands.expect(Operand::O);
        let scale = operands.get(Operand::ScaleO).map_or(1.0, |scale| scale.nth(0));
        let of_kind = |far: bool| {
            let lses = rows.iter().zip(&exact.lse);
            lses.filter(move |&(_, &lse)| is_far(lse) == far).map(|(&i, _)| i)
        };
        for (logits, far) in self.logits.iter_mut().zip([false, true]) {
            *logits = logits.max(logits_bound(problem, operands, span, i_head, of_kind(far)));
        }
        for (at, &i) in rows.iter().enumerate() {
            let far = is_far(exact.lse[at]);
            for d in 0..dim {
                let index = at * dim as usize + d as usize;
                let place = Place {
                    batch: span.i_batch,
                    head: i_head,
                    row: i,
                    dim: d,
                    got: o.get(span.q_batch, span.q_row + i, i_head, d),
                    want: stored(exact.o[index]),
                };
                let same = if problem.dtypes.o.is_fp8() {
                    problem.dtypes.o.round(stored(same.o[index]))
                } else {
                    same.o[index]
                };
                let spread = exact.spread[index] * scale;
                self.o.add(place, same, spread, if far { spread.max(place.want.abs()) } else { 0.0 });
                if exact.lse[at] == f64::NEG_INFINITY && place.got != 0.0 {
                    self.faults.push(format!(
                        "o at batch {} head {i_head} row {i} dim {d} is {}, but that row sees no key: 0",
                        span.i_batch, place.got
                    ));
                }
            }
            if let Some(lse) = operands.get(Operand::Lse) {
                let got = lse.nth(span.lse_index(problem, i_head, i));
                let want = exact.lse[at];
                let unit = if far { want.abs() } else { 1.0 };
                let (got, want) = (got / unit, want / unit);
                let place = Place { batch: span.i_batch, head: i_head, row: i, dim: 0, got, want };
                self.lse.add(place, same.lse[at] / unit, 0.0, f64::from(u8::from(far)));
                if far {
                    let logits = logits_bound(problem, operands, span, i_head, std::iter::once(i));
                    self.far_ratio = self.far_ratio.max(logits / unit);
                } else if want.is_finite() {
                    self.max_lse = self.max_lse.max(want.abs());
                }
            }
        }
    }

    /// Verdicts on O, and on LSE if it is wanted. `rounds_p`: the kernel rounds P to the type of V's elements.
    pub(super) fn verdicts(
        &self,
        problem: &FwdProblem,
        rounds_p: bool,
        with_lse: bool,
    ) -> Vec<TensorVerdict> {
        let (u_out, u_inner) = (problem.dtypes.o.unit_roundoff(), inner_roundoff(problem));
        let u_of_p = match problem.block_scales.map(|scales| scales.format.elem()) {
            Some(ElemType::Number(elem)) if rounds_p => elem.unit_roundoff(),
            // Half the spacing of numbers with one bit of mantissa.
            Some(ElemType::E2m1Pair) if rounds_p => 0.25,
            _ => 0.0,
        };
        let of_o = |o: &Stat, name| {
            let yardstick = Yardstick {
                factor: 2.0,
                max_same: o.max_same,
                rmse_same: o.rmse_same(),
                u_out,
                tiny_out: smallest_subnormal(problem.dtypes.o),
                u_inner,
                reference: o.reference(),
                spread: o.spread(),
                logits: self.logits[0],
                far: o.far(),
                far_logits: self.logits[1],
                count: o.count,
            };
            // Cosines are compared only where they mean something: not for few elements, sums that cancel, or far rows.
            let directed = o.count >= 64
                && yardstick.far.max == 0.0
                && yardstick.reference.rms >= yardstick.spread.rms / 2.0;
            o.verdict(name, bound(&yardstick), directed.then(|| least_cosine(u_out, u_inner.max(u_of_p))))
        };
        let mut tensors = self.o.verdicts(["o", "o of far rows"], of_o);
        if with_lse {
            tensors.extend(self.lse.verdicts(["lse", "lse of far rows, relative"], |lse, name| {
                let [logits, size] =
                    if lse.far().max > 0.0 { [self.far_ratio, 1.0] } else { [self.logits[0], self.max_lse] };
                lse.verdict(name, lse_bound(lse.max_same, logits, size), None)
            }));
        }
        tensors
    }
}

/// The keep mask must be exact.
fn check_keep_mask(host: &HostFwd, i_span: usize, i_head: u32, rows: &[u32], faults: &mut Vec<String>) {
    let Some(written) = host.operands.get(Operand::KeepMask) else { return };
    let (problem, span) = (&*host.problem, host.spans[i_span]);
    let dims = problem.dims;
    let mask = problem.keep(host.dropout, span.i_batch, i_head);
    let head = (span.i_batch * dims.num_heads_q + i_head) as usize;
    for &i in rows {
        let row = (head * dims.seqlen_q as usize + i as usize) * dims.seqlen_k as usize;
        for j in 0..span.seqlen_k {
            let (got, want) = (written.elems()[row + j as usize], u8::from(mask.keep(i, j)));
            if got != want {
                faults.push(format!(
                    "keep_mask at batch {} head {i_head} row {i} key {j} is {got}, should be {want}",
                    span.i_batch
                ));
                return;
            }
        }
    }
}
