use fmha_conformance::case::all;
use fmha_conformance::report::run_cases;
use fmha_conformance::run::Options;
use fmha_core::Device;

use crate::{Config, CpuBackend};

/// Lists of keys pass the battery's cases with the baseline's vectors; `tests/lists.rs` tests the other sets.
#[test]
fn lists_of_keys_keep_the_contract() {
    let device = Device::new(CpuBackend::with(Config { threads: Some(2), isa: None }).unwrap());
    let mut cases = all();
    cases.retain(|case| case.name.starts_with("lists/"));
    let report = run_cases(&device, &cases, &Options::default(), &|_, _, _| ());
    for case in report.failures() {
        println!("FAILED {}\n  {}", case.name, case.text);
    }
    assert_eq!(report.summary.passed, cases.len() as u64, "{}", report.summary);
}
