//! The battery on every backend of this machine; those that are not here are reported absent.

use fmha::Device;
use fmha_conformance::law::BIT_FOR_BIT;
use fmha_conformance::report::{Report, run};
use fmha_conformance::run::Options;

fn battery(backend: &Device) -> Report {
    let report = run(backend, None, &Options::default(), &|_, _, _| ());
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
                let report = battery(&backend);
                failed += report.summary.failed;
                if backend.kind() == "cpu" {
                    whole_contract(&report);
                }
            }
            Err(reason) => println!("absent: {}: {reason}", device.backend),
        }
    }
    assert_eq!(failed, 0);
}

/// The CPU backend refuses nothing and runs everything, and one kernel serves both sides of a law.
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
