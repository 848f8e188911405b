//! Laws of equal bits: in every run, and for a sequence alone and next to others.

use fmha_core::{Device, FwdProblem, QLayout, Result, SeqSpan};

use super::{
    BIT_FOR_BIT, Law, LawKind, copy, difference, difference_in_sequence, run as run_plan, same_tile,
};
use crate::case::Forward;
use crate::check::{Selection, check_bwd, check_fwd};
use crate::execute::run_bwd;
use crate::run::Options;
use crate::tensor::Operand;
use crate::tensors::{HostBwd, HostFwd, Lengths};
use crate::verdict::Verdict;

/// Multiplications that the reference may spend on one case. Bits are compared in every row, values only in some.
const REFERENCE_BUDGET: f64 = 5e7;

pub(super) fn run(backend: &Device, options: &Options, law: &Law) -> Result<Verdict> {
    let forward = &law.forward;
    let batch_invariant = law.kind == LawKind::AloneIsInPack;
    let plan_options = options.plan.clone().batch_invariant(batch_invariant);
    let mut together = HostFwd::new(forward.problem.clone(), &forward.lengths, forward.data)?;
    let plan = run_plan(backend, &plan_options, &mut together)?;
    let selection = Selection::within(&together.problem, &together.spans, REFERENCE_BUDGET);
    let mut verdict = check_fwd(&together, &selection, &|_, _| ())?;
    verdict.note = Some(BIT_FOR_BIT);
    if let LawKind::Repeated(times) = law.kind {
        if !plan.promises().deterministic {
            verdict.note = Some("one call within the bound: the plan promises no equal bits");
            return Ok(verdict);
        }
        for _ in 0..times {
            let mut again = again(&together, law)?;
            crate::execute::run_fwd(backend, &plan, &mut again)?;
            verdict.faults.extend(difference(&again, &together, false));
        }
        return Ok(verdict);
    }
    for span in &together.spans {
        let mut alone = alone(&together, span, law)?;
        let plan_alone = run_plan(backend, &plan_options, &mut alone)?;
        // Another tile may give other bits, unless the plan promises otherwise.
        if !batch_invariant && !same_tile(&plan, &plan_alone) {
            verdict.note = Some("within the bound: another kernel or tile alone");
            continue;
        }
        verdict.faults.extend(difference_in_sequence(&together, span, &alone, &alone.spans[0]));
    }
    Ok(verdict)
}

/// Runs the backward of a law's call, and then this many times more.
pub(super) fn keys_of_gradients(
    backend: &Device,
    options: &Options,
    law: &Law,
    times: u32,
) -> Result<Verdict> {
    let Forward { lengths, data, .. } = &law.forward;
    let problem = law.gradients();
    let plan = backend.plan_bwd(&problem.clone().validate()?, &options.plan)?;
    let mut host = HostBwd::new(problem, lengths, *data)?;
    host.fill_forward()?;
    run_bwd(backend, &plan, &mut host)?;
    let mut verdict = check_bwd(&host, &Selection::default(), &|_, _| ())?;
    verdict.note = Some(BIT_FOR_BIT);
    let mut compared = vec![Operand::Dk, Operand::Dv];
    compared.extend(plan.promises().deterministic.then_some(Operand::Dq));
    let all = [Operand::Dq, Operand::Dk, Operand::Dv];
    let before: Vec<Vec<u8>> =
        compared.iter().map(|&operand| host.operands.expect(operand).elems().to_vec()).collect();
    for _ in 0..times {
        all.into_iter().for_each(|operand| host.operands.expect_mut(operand).repoison());
        run_bwd(backend, &plan, &mut host)?;
        for (&operand, before) in compared.iter().zip(&before) {
            let elems = host.operands.expect(operand).elems();
            let differing = before.iter().zip(elems).position(|(a, b)| a != b);
            verdict.faults.extend(
                differing.map(|at| format!("{operand:?}: another run has other bits from byte {at} on")),
            );
        }
    }
    Ok(verdict)
}

/// Makes a new call with the inputs of `together`, not yet run.
fn again(together: &HostFwd, law: &Law) -> Result<HostFwd> {
    let Forward { problem, lengths, data, .. } = &law.forward;
    let mut again = HostFwd::unfilled(problem.clone(), lengths, *data)?;
    for operand in [Operand::Q, Operand::K, Operand::V] {
        copy(together, &mut again, operand, |batch, row, head| (batch, row, head));
    }
    Ok(again)
}

/// Makes a call with one sequence alone, and its numbers.
fn alone(together: &HostFwd, span: &SeqSpan, law: &Law) -> Result<HostFwd> {
    let problem: &FwdProblem = &together.problem;
    let mut one = problem.clone();
    one.dims.batch = 1;
    let mut lengths = Lengths::default();
    if problem.layout.q == QLayout::Packed {
        (one.dims.seqlen_q, one.dims.seqlen_k) = (span.seqlen_q, span.seqlen_k);
        lengths = Lengths::packed(&[(span.seqlen_q, span.seqlen_k)]);
    }
    let mut alone = HostFwd::unfilled(one, &lengths, law.forward.data)?;
    let of = |batch: u32, first_row: u32| move |_, row, head| (batch, first_row + row, head);
    copy(together, &mut alone, Operand::Q, of(span.q_batch, span.q_row));
    copy(together, &mut alone, Operand::K, of(span.k_batch, span.k_row));
    copy(together, &mut alone, Operand::V, of(span.k_batch, span.k_row));
    Ok(alone)
}
