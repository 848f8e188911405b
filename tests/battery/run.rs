//! Run of one case.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use fmha_core::lists::HostLists;
use fmha_core::masks::{HostMasks, Shown};
use fmha_core::second::SecondCall;
use fmha_core::seq::KvRows;
use fmha_core::tune::TileOptions;
use fmha_core::{BwdPlan, Device, Error, FwdProblem, MemorySpace, PlanOptions, Result, SeqSpan, Shape};
use serde::Serialize;

use crate::case::{Backward, Body, Case, Combine, Forward, Plant};
use crate::check::{
    Selection, appended_bytes, check_bwd, check_combine, check_fwd, intact_bwd, intact_combine, intact_fwd,
    quantises,
};
use crate::declared;
use crate::execute::{run_bwd, run_combine, run_fwd};
use crate::memory::Placement;
use crate::tensor::{Operand, Tensor};
use crate::tensors::{HostBwd, HostCombine, HostFwd, set_page_byte};
use crate::verdict::Verdict;

/// Outcome of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The case ran, and its results are correct.
    Passed,
    /// The case ran and its result is wrong, or it did not run for an undeclared reason.
    Failed,
    /// The backend refused the case, as declared.
    Refused,
    /// The case needs something that this machine lacks.
    Absent,
}

/// Options for running cases.
#[derive(Clone, Debug)]
pub struct Options {
    /// Plan options, such as the kernel; a fallback may be used unless the caller forbids it.
    pub plan: PlanOptions,
    /// Whether cases that reserve gigabytes run on a device too; on the host they use little memory.
    pub huge_on_device: bool,
    /// Options of `fmha conformance` that repeat a case, besides the backend's name: `--emulate gfx942`.
    pub repro_words: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            plan: PlanOptions::default().allow_fallback(true),
            huge_on_device: false,
            repro_words: String::new(),
        }
    }
}

/// Parses a tile's fields, `block_m=128,stages=3`, to the form of plan options.
#[must_use]
pub fn tile_fields(words: &str) -> TileOptions {
    let fields = words.split(',').filter_map(|word| word.split_once('='));
    fields.map(|(field, value)| (field.to_owned(), value.to_owned())).collect()
}

/// A case's outcome, and a sentence that describes it.
pub type Ended = (Outcome, String);

impl Case {
    /// Runs the case. A panic of the backend counts as a failure of the case.
    #[must_use]
    pub fn run(&self, backend: &Device, options: &Options) -> Ended {
        if let Some(reason) = self.absent(backend, options) {
            return (Outcome::Absent, reason);
        }
        let result = catch_unwind(AssertUnwindSafe(|| match &self.body {
            Body::Forward(forward) => run_forward(forward, backend, options),
            Body::Backward(backward) => run_backward(backward, backend, options),
            Body::Combine(combine) => run_merge(combine, backend, options),
            Body::Law(law) => law.run(backend, options),
        }));
        match result {
            Ok(Ok(verdict)) if verdict.pass() => (Outcome::Passed, verdict.to_string()),
            Ok(Ok(verdict)) => (Outcome::Failed, verdict.to_string()),
            Ok(Err(error @ Error::Unsupported { .. })) => {
                match declared::why(backend.kind(), &options.plan, self) {
                    Some(why) => (Outcome::Refused, format!("{why}: {error}")),
                    None => (Outcome::Failed, format!("undeclared refusal: {error}")),
                }
            }
            Ok(Err(error)) => (Outcome::Failed, error.to_string()),
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied())
                    .unwrap_or("no message");
                (Outcome::Failed, format!("panic: {text}"))
            }
        }
    }

    /// Reason why a case can not run here.
    fn absent(&self, backend: &Device, options: &Options) -> Option<String> {
        let host = backend.memory().space() == MemorySpace::Host;
        let checked = backend.memory().checks_bounds();
        match self.data().room.placement {
            Placement::Margins => None,
            Placement::EndsAtUnmapped | Placement::BeginsAtUnmapped => {
                if checked {
                    // Tensors share no margins: each is an allocation of its exact extent.
                    None
                } else if !host {
                    let none =
                        "guard pages need host memory, or a device's that checks bounds or can be mapped";
                    match backend.memory().alloc_at_edge(1, true) {
                        Ok(Some(_)) => None,
                        Ok(None) => Some(none.into()),
                        Err(error) => Some(format!("{none}: {error}")),
                    }
                } else if cfg!(unix) {
                    None
                } else {
                    Some("guard pages need mmap".into())
                }
            }
            Placement::Sparse => {
                if (host || checked) && cfg!(target_os = "linux") || !host && options.huge_on_device {
                    None
                } else {
                    Some(
                        "gigabytes of reserved memory are used on the host under Linux, or on request".into(),
                    )
                }
            }
        }
    }
}

pub(crate) fn run_forward(case: &Forward, backend: &Device, options: &Options) -> Result<Verdict> {
    let plan = backend.plan_fwd(&case.problem.clone().validate()?, &options.plan)?;
    let mut host = HostFwd::new(case.problem.clone(), &case.lengths, case.data)?;
    plant(&mut host, case.plant)?;
    run_fwd(backend, &plan, &mut host)?;
    let mut verdict = check_fwd(&host, &Selection::default(), &|_, _| ())?;
    if case.data.room.placement != Placement::Sparse {
        verdict.faults.extend(intact_fwd(&host));
    }
    verdict.faults.extend(constant_v_fault(case, &host));
    if quantises(&host) {
        let mut before = HostFwd::new(case.problem.clone(), &case.lengths, case.data)?;
        plant(&mut before, case.plant)?;
        verdict.faults.extend(appended_bytes(&host, before)?);
    }
    Ok(verdict)
}

fn run_backward(case: &Backward, backend: &Device, options: &Options) -> Result<Verdict> {
    let plan = backend.plan_bwd(&case.problem.clone().validate()?, &case.options(&options.plan))?;
    let mut host = HostBwd::new(case.problem.clone(), &case.lengths, case.data)?;
    for &(operand, at, value) in &case.planted {
        host.operands.expect_mut(operand).set(at, value);
    }
    host.fill_forward()?;
    run_bwd(backend, &plan, &mut host)?;
    let mut verdict = check_bwd(&host, &Selection::default(), &|_, _| ())?;
    if case.data.room.placement != Placement::Sparse {
        verdict.faults.extend(intact_bwd(&host));
    }
    // A second run must have equal bits, whatever order the device uses. It is made only if the case asks for it;
    // if the caller's option sufficed, every case would run twice.
    if case.deterministic && plan.promises().deterministic {
        verdict.faults.extend(differs_in_another_run(backend, &plan, &mut host)?);
    }
    Ok(verdict)
}

/// Runs the call once more, and returns the first gradient whose bits differ.
fn differs_in_another_run(backend: &Device, plan: &BwdPlan, host: &mut HostBwd) -> Result<Option<String>> {
    let gradients = [Operand::Dq, Operand::Dk, Operand::Dv, Operand::Dbias, Operand::Dsink];
    let before = gradients.map(|operand| host.operands.get(operand).map(|tensor| tensor.elems().to_vec()));
    for operand in gradients {
        host.operands.get_mut(operand).into_iter().for_each(Tensor::repoison);
    }
    run_bwd(backend, plan, host)?;
    Ok(gradients.into_iter().zip(before).find_map(|(operand, before)| {
        let at = before?.iter().zip(host.operands.get(operand)?.elems()).position(|(a, b)| a != b)?;
        Some(format!("{operand:?}: another run has other bits from byte {at} on"))
    }))
}

fn run_merge(case: &Combine, backend: &Device, options: &Options) -> Result<Verdict> {
    let plan = backend.plan_combine(&case.problem.clone().validate()?, &options.plan)?;
    let mut host = HostCombine::new(case.problem.clone(), case.data, case.lse_offset)?;
    run_combine(backend, &plan, &mut host)?;
    let mut verdict = check_combine(&host)?;
    verdict.faults.extend(intact_combine(&host));
    Ok(verdict)
}

/// Checks a constant V: rows of P sum to 1, so O must equal V within one rounding of O and the error of P's
/// rounding, independent of the reference. All weights must be in the sum: no sink, no dropout.
fn constant_v_fault(case: &Forward, host: &HostFwd) -> Option<String> {
    let problem = &case.problem;
    let wide = !problem.dtypes.v.is_fp8() && !problem.dtypes.o.is_fp8();
    let plain = case.data.init == crate::init::Init::ConstantV && case.plant == Plant::Nothing;
    if !plain || !wide || problem.score.sink || problem.drops() {
        return None;
    }
    let u = problem.dtypes.v.unit_roundoff() + problem.dtypes.o.unit_roundoff() + 1e-5;
    let most = 2.0 * u * crate::init::CONSTANT_V;
    let o = host.operands.expect(Operand::O);
    for span in &host.spans {
        let band = problem.band(span.seqlen_q, span.seqlen_k);
        for i in 0..span.seqlen_q {
            if !(0..span.seqlen_k).any(|j| band.visible(i, j)) {
                continue;
            }
            for head in 0..problem.dims.num_heads_q {
                let got = o.get(span.q_batch, span.q_row + i, head, 0);
                // The test uses `<=`, not the inverse `>`, so that NaN counts as a fault too.
                if (got - crate::init::CONSTANT_V).abs() <= most {
                    continue;
                }
                return Some(format!(
                    "every V is {}, but o at batch {} head {head} row {i} is {got}",
                    crate::init::CONSTANT_V,
                    span.i_batch
                ));
            }
        }
    }
    None
}

/// Writes the values that the case plants.
fn plant(host: &mut HostFwd, plant: Plant) -> Result<()> {
    let dims = host.problem.dims;
    let spans = host.spans.clone();
    match plant {
        Plant::Nothing => {}
        Plant::At(operand, at, value) => host.operands.expect_mut(operand).set(at, value),
        Plant::Shifted(operand, elems) => host.operands.expect_mut(operand).shift(elems)?,
        Plant::FaintWeights { score } => faint_weights(host, score),
        Plant::LargeValues(value) => {
            let tensor = host.operands.expect_mut(Operand::V);
            let Shape { batch, seq, head, dim } = tensor.shape;
            for (b, s) in (0..batch).flat_map(|b| (0..seq).map(move |s| (b, s))) {
                for (h, d) in (0..head).flat_map(|h| (0..dim).map(move |d| (h, d))) {
                    let share = 1.0 - f64::from((b * 5 + s * 37 + h * 11 + d * 29) % 128) / 256.0;
                    tensor.set([b, s, h, d], if d % 2 == 1 { -value } else { value } * share);
                }
            }
        }
        Plant::FarRows { bias, sink } => {
            if let Some(bias) = bias {
                let tensor = host.operands.expect_mut(Operand::Bias);
                let Shape { batch, seq, head, dim } = tensor.shape;
                for at in (0..batch).flat_map(|b| (0..seq).step_by(8).map(move |s| (b, s))) {
                    for (h, d) in (0..head).flat_map(|h| (0..dim).map(move |d| (h, d))) {
                        tensor.set([at.0, at.1, h, d], bias);
                    }
                }
            }
            for head in 0..dims.num_heads_q {
                if let Some(sink) = sink {
                    host.operands.expect_mut(Operand::Sink).set_nth(head as usize, sink);
                }
            }
        }
        Plant::HiddenKeys => hide_keys(host)?,
        Plant::LastKeys => last_keys(host)?,
        Plant::FarBelow { begin, end, key } => {
            for span in spans {
                for (i, head) in
                    (0..span.seqlen_q).flat_map(|i| (0..dims.num_heads_q).map(move |head| (i, head)))
                {
                    host.operands.expect_mut(Operand::Q).set([span.q_batch, span.q_row + i, head, 0], -1.0);
                }
                for (j, head) in (begin..end).flat_map(|j| (0..dims.num_heads_kv).map(move |head| (j, head)))
                {
                    let at = [span.k_batch, span.k_row + j, head, 0];
                    host.operands.expect_mut(Operand::K).set(at, key);
                }
            }
        }
    }
    Ok(())
}

/// Sets the first element of each Q to 4, and that of each sequence's last key such that its score is `ABOVE` the
/// others'; its V is 3.
fn last_keys(host: &mut HostFwd) -> Result<()> {
    const ABOVE: f64 = 9.0;
    let (problem, dims) = (host.problem.clone(), host.problem.dims);
    let key = ABOVE / (4.0 * f64::from(problem.resolved_softmax_scale()));
    let seq = host.inputs().seq;
    let rows = KvRows::of(&problem, &seq)?;
    let last: Vec<(u32, u32)> = host
        .spans
        .iter()
        .filter(|span| span.seqlen_k > 0)
        .map(|span| rows.at(span, span.seqlen_k - 1))
        .collect();
    for span in host.spans.clone() {
        for (i, head) in (0..span.seqlen_q).flat_map(|i| (0..dims.num_heads_q).map(move |head| (i, head))) {
            host.operands.expect_mut(Operand::Q).set([span.q_batch, span.q_row + i, head, 0], 4.0);
        }
    }
    for ((batch, row), head) in last.iter().flat_map(|&at| (0..dims.num_heads_kv).map(move |head| (at, head)))
    {
        if !problem.cache.v_in_k {
            for d in 0..dims.head_dim_v {
                host.operands.expect_mut(Operand::V).set([batch, row, head, d], 3.0);
            }
        }
        host.operands.expect_mut(Operand::K).set([batch, row, head, 0], key);
    }
    Ok(())
}

/// Sets queries to (1, 0, 0, ...), keys to (`score`, 0, ...) or 0, and V at key 0 to 0.
fn faint_weights(host: &mut HostFwd, score: f64) {
    let dims = host.problem.dims;
    for span in host.spans.clone() {
        let mut set = |operand, at: [u32; 4], value| host.operands.expect_mut(operand).set(at, value);
        for (head, d) in (0..dims.num_heads_q).flat_map(|h| (0..dims.head_dim_qk).map(move |d| (h, d))) {
            for i in 0..span.seqlen_q {
                let at = [span.q_batch, span.q_row + i, head, d];
                set(Operand::Q, at, if d == 0 { 1.0 } else { 0.0 });
            }
        }
        for (head, j) in (0..dims.num_heads_kv).flat_map(|h| (0..span.seqlen_k).map(move |j| (h, j))) {
            for d in 0..dims.head_dim_qk {
                let at = [span.k_batch, span.k_row + j, head, d];
                set(Operand::K, at, if (j, d) == (0, 0) { score } else { 0.0 });
            }
            for d in (0..dims.head_dim_v).filter(|_| j == 0) {
                set(Operand::V, [span.k_batch, span.k_row, head, d], 0.0);
            }
        }
    }
}

/// Writes NaN to every row of K and V that no query of its kv head sees, or lists.
fn hide_keys(host: &mut HostFwd) -> Result<()> {
    let (problem, spans) = (host.problem.clone(), host.spans.clone());
    let seq = host.inputs().seq;
    let lists = HostLists::of(&problem, &seq)?;
    let masks = HostMasks::of(&problem, &host.inputs().masks, seq.totals.total_q)?;
    let hidden = hidden_keys(&problem, &spans, KvRows::of(&problem, &seq)?, (lists.as_ref(), masks.as_ref()));
    spoil(host, hidden, [Operand::K, Operand::V]);
    let inputs = host.inputs();
    let Some(second) = SecondCall::of(&problem, inputs.second.as_ref(), &inputs.seq)? else { return Ok(()) };
    let lists = HostLists::of(&second.problem, &second.seq)?;
    let masks = HostMasks::of(&second.problem, &second.masks(), second.seq.totals.total_q)?;
    let places = KvRows::of(&second.problem, &second.seq)?;
    let shown = (lists.as_ref(), masks.as_ref());
    let hidden = hidden_keys(&second.problem, &second.spans()?, places, shown);
    spoil(host, hidden, [Operand::SecondK, Operand::SecondV]);
    Ok(())
}

/// Rows, with their head, that no query of their kv head sees or lists.
fn hidden_keys(
    problem: &FwdProblem,
    spans: &[SeqSpan],
    places: KvRows<'_>,
    (lists, masks): (Option<&HostLists<'_>>, Option<&HostMasks<'_>>),
) -> Vec<((u32, u32), u32)> {
    let mut seen = HashSet::new();
    let mut all = HashSet::new();
    let mut listed = Vec::new();
    for span in spans {
        let band = problem.band(span.seqlen_q, span.seqlen_k);
        for head in 0..problem.dims.num_heads_kv {
            all.extend((0..span.seqlen_cached).map(|j| (places.at(span, j), head)));
            for i in 0..span.seqlen_q {
                match lists {
                    Some(lists) => lists.row(span, head, i, &mut listed),
                    None => listed = (0..span.seqlen_k).collect(),
                }
                let heads = head * problem.gqa_ratio()..(head + 1) * problem.gqa_ratio();
                let shows = |j: u32| {
                    let by = |masks: &HostMasks<'_>, head| masks.head(span, head).shown(i, j) != Shown::No;
                    masks.is_none_or(|masks| heads.clone().any(|head| by(masks, head)))
                };
                let visible =
                    listed.iter().filter(|&&j| j < span.seqlen_cached && band.visible(i, j) && shows(j));
                seen.extend(visible.map(|&j| (places.at(span, j), head)));
            }
        }
    }
    all.difference(&seen).copied().collect()
}

fn spoil(host: &mut HostFwd, rows: Vec<((u32, u32), u32)>, [k, v]: [Operand; 2]) {
    let dims = host.problem.dims;
    if let Some(format) = host.problem.cache.rows {
        let tensor = host.operands.expect_mut(k);
        for ((page, row), _) in rows {
            let [values, _, rotary] = format.places(tensor.shape.seq, row);
            let numbers = (values..values + format.values() as usize).map(|at| (at, 0x7f));
            for (at, nan) in numbers.chain((rotary..rotary + 128).map(|at| (at, 0xff))) {
                set_page_byte(tensor, page, at, nan);
            }
        }
        return;
    }
    for ((batch, row), head) in rows {
        for (operand, dim) in [(k, dims.head_dim_qk), (v, dims.head_dim_v)] {
            if operand == k || !host.problem.cache.v_in_k {
                (0..dim).for_each(|d| host.operands.expect_mut(operand).set([batch, row, head, d], f64::NAN));
            }
        }
    }
}
