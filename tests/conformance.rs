//! The battery on every backend of this machine.

use fmha_conformance::report::{Report, run};
use fmha_conformance::run::Options;
use fmha_core::FmhaBackend;

fn battery(backend: &dyn FmhaBackend) -> Report {
    let filter = std::env::var("CASES").ok().and_then(|text| fmha_conformance::Regex::new(&text).ok());
    let report = run(backend, filter.as_ref(), &Options::default(), &|_, _, _| ());
    for case in report.failures() {
        println!("FAILED {}\n  {}\n  {}", case.name, case.text, case.repro);
    }
    for (family, summary) in report.families() {
        println!("  {family}: {summary}");
    }
    println!("battery {}: {}", backend.kind(), report.summary);
    report
}

#[test]
fn the_cpu_backend_keeps_the_contract() {
    let backend = fmha_cpu::CpuBackend::new().expect("the CPU backend");
    let report = battery(&backend);
    assert_eq!(report.summary.failed, 0);
    assert_eq!(report.summary.refused, 0, "the CPU backend takes the whole contract");
    assert!(report.summary.passed > 2000);
}
