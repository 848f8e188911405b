//! Battery on every backend of this machine. Absent backends are reported.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha::Device;
use fmha_conformance::case::{Case, all};
use fmha_conformance::law::BIT_FOR_BIT;
use fmha_conformance::report::{Report, run_cases};
use fmha_conformance::run::Options;

/// Laws of bits over more tiles than a GPU has units, and gradients to which many units add in order. A CPU's threads
/// have several tiles each in `bits/few` already, and no two of them add to one gradient.
const FOR_A_WHOLE_DEVICE: [&str; 2] = ["bits/many/", "backward/in_turns/"];

fn is_for_a_whole_device(case: &Case) -> bool {
    FOR_A_WHOLE_DEVICE.iter().any(|family| case.name.starts_with(family))
}

fn battery(backend: &Device, cases: &[Case]) -> Report {
    let report = run_cases(backend, cases, &Options::default(), &|_, _, _| ());
    for case in report.failures() {
        println!("FAILED {}\n  {}\n  {}", case.name, case.text, case.repro);
    }
    println!("{} ({})", report.backend, report.device);
    for (family, summary) in report.families() {
        println!("  {family}: {summary}");
    }
    println!("battery {}: {}", report.backend, report.summary);
    report
}

#[test]
fn every_backend_that_is_present_keeps_the_contract() {
    let mut failed = 0;
    for device in fmha::devices() {
        match device.device {
            Ok(backend) => {
                let mut cases = all();
                let is_cpu = backend.kind() == "cpu";
                if is_cpu {
                    cases.retain(|case| !is_for_a_whole_device(case));
                }
                let report = battery(&backend, &cases);
                failed += report.summary.failed;
                if is_cpu {
                    whole_contract(&report);
                }
            }
            Err(reason) => println!("absent: {}: {reason}", device.backend),
        }
    }
    assert_eq!(failed, 0);
}

#[test]
#[ignore = "minutes of what is made for a GPU's many units: cargo xtask test --all"]
fn what_is_for_a_whole_device_keeps_the_contract_on_the_cpu() {
    let mut cases = all();
    cases.retain(is_for_a_whole_device);
    let cpu =
        fmha::devices().into_iter().filter_map(|found| found.device.ok()).find(|one| one.kind() == "cpu");
    let summary = battery(&cpu.unwrap(), &cases).summary;
    assert!(summary.passed > 100 && summary.passed == cases.len() as u64, "{summary}");
}

/// The CPU backend refuses nothing and runs every case, and in each law one kernel serves both calls.
fn whole_contract(report: &Report) {
    let summary = report.summary;
    assert_eq!(summary.refused, 0);
    assert_eq!(summary.absent == 0, cfg!(target_os = "linux"));
    assert!(summary.passed > 2000, "{summary}");
    let laws = report.cases.iter().filter(|case| case.name.starts_with("laws/"));
    let exact = laws.filter(|case| case.text.contains(BIT_FOR_BIT)).count();
    println!("  laws that held bit for bit: {exact}");
    assert!(exact > 200, "{exact} laws were compared bit for bit");
}
