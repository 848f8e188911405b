//! Test of the battery: it passes on a correct kernel, and finds every fault planted in a copy of the kernel.

mod plain;

use fmha_conformance::case::{Case, all};
use fmha_conformance::report::run_cases;
use fmha_conformance::run::{Options, Outcome};
use fmha_core::MemorySpace;
use plain::{Fault, Plain};

/// Most multiply-adds of a case: the plain kernel, which reads one number at a time, needs a second at most.
const PLAIN_WORK: u64 = 4_000_000;

/// Small cases that the plain kernel supports. It has no pages, appends, functions, masks as data, or lists.
fn small() -> Vec<Case> {
    let work = |case: &Case| {
        case.problem().map_or(0, |problem| {
            let dims = problem.dims;
            let factors = [dims.batch, dims.num_heads_q, dims.seqlen_q, dims.seqlen_k];
            let pairs: u64 = factors.into_iter().map(u64::from).product();
            pairs * u64::from(dims.head_dim_qk + dims.head_dim_v)
        })
    };
    all().into_iter().filter(|case| takes(case) && work(case) <= PLAIN_WORK).collect()
}

fn takes(case: &Case) -> bool {
    !["code", "decode", "lists", "masks", "scales", "small"].contains(&case.family())
        && case.problem().is_none_or(|problem| !problem.layout.kv.is_paged())
}

/// One small case in `step`, and all cases that reserve gigabytes.
fn thinned(step: usize) -> Vec<Case> {
    let thin = small().into_iter().filter(|case| !case.is_huge()).step_by(step);
    thin.chain(all().into_iter().filter(|case| case.is_huge() && takes(case))).collect()
}

#[test]
fn a_sound_kernel_passes_in_host_memory_and_in_a_devices() {
    for (space, step) in [(MemorySpace::Host, 3), (MemorySpace::Device, 31)] {
        let backend = Plain::open(None, space);
        let report = run_cases(&backend, &thinned(step), &Options::default(), &|_, _, _| ());
        for case in report.failures() {
            println!("FAILED {}\n  {}", case.name, case.text);
        }
        println!("plain kernel, {space:?} memory: {}", report.summary);
        assert_eq!((report.summary.failed, report.summary.refused), (0, 0));
        assert!(report.summary.passed > 100);
    }
}

/// First case that finds `fault`. The order of cases is scattered, since neighbouring cases find the same faults.
fn found_by(fault: Fault, cases: &[Case]) -> Option<(usize, &Case, String)> {
    let backend = Plain::open(Some(fault), MemorySpace::Host);
    let mut order: Vec<&Case> = cases.iter().collect();
    order.sort_by_key(|case| case.data().seed);
    order.into_iter().enumerate().find_map(|(tried, case)| match case.run(&backend, &Options::default()) {
        (Outcome::Failed, text) => Some((tried + 1, case, text)),
        _ => None,
    })
}

#[test]
fn every_planted_fault_is_found() {
    let cases = small();
    println!("{:<24} {:>6}  {:<60} how", "fault", "cases", "found by");
    let mut missed = Vec::new();
    for fault in Fault::ALL {
        match found_by(fault, &cases) {
            Some((tried, case, text)) => {
                let how: String = text.split("; worst").next().unwrap_or(&text).chars().take(150).collect();
                println!("{:<24} {tried:>6}  {:<60} {how}", format!("{fault:?}"), case.name);
            }
            None => missed.push(fault),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
    println!("{} planted faults, all found", Fault::ALL.len());
}
