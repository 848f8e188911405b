//! Drawn calls through plans, on slices that know the types of their elements.

use fmha_conformance::case::{Backward, Body, Forward};
use fmha_conformance::check::{Selection, check_bwd, check_fwd, intact_bwd, intact_fwd};
use fmha_conformance::execute::{run_bwd, run_fwd};
use fmha_conformance::tensors::{HostBwd, HostFwd};
use fmha_conformance::verdict::Verdict;
use fmha_core::PlanOptions;

use super::{cases, cpu, held};

fn forward(case: &Forward) -> Result<Verdict, String> {
    let mut host = HostFwd::new(case.problem.clone(), &case.lengths, case.data).unwrap();
    let plan = cpu().plan_fwd(&host.problem, &PlanOptions::default()).map_err(|error| error.to_string())?;
    run_fwd(&cpu(), &plan, &mut host).map_err(|error| error.to_string())?;
    let mut verdict = check_fwd(&host, &Selection::default(), &|_, _| ()).unwrap();
    verdict.faults.extend(intact_fwd(&host));
    Ok(verdict)
}

fn backward(case: &Backward) -> Result<Verdict, String> {
    let mut host = HostBwd::new(case.problem.clone(), &case.lengths, case.data).unwrap();
    host.fill_forward().unwrap();
    let options = case.options(&PlanOptions::default());
    let plan = cpu().plan_bwd(&host.problem, &options).map_err(|error| error.to_string())?;
    run_bwd(&cpu(), &plan, &mut host).map_err(|error| error.to_string())?;
    let mut verdict = check_bwd(&host, &Selection::default(), &|_, _| ()).unwrap();
    verdict.faults.extend(intact_bwd(&host));
    Ok(verdict)
}

#[test]
fn drawn_calls_of_plans_are_right_and_write_no_row_that_lengths_leave_out() {
    let results = cases(80).into_iter().filter_map(|(name, body)| match &body {
        Body::Forward(case) => Some((name, forward(case))),
        Body::Backward(case) => Some((name, backward(case))),
        _ => None,
    });
    held(&results.collect::<Vec<_>>(), 70, "plans");
}
