//! Faults planted in the kernels' text: each is compiled and run on an emulated device, and found by the case that
//! `planted/device.toml` names. Verified in emulation.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "planted/mod.rs"]
mod planting;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use planting::{Fate, Fault, each, is_own_process};

/// Faults by their architecture and their header.
type Faults = BTreeMap<String, BTreeMap<String, Vec<Fault>>>;

/// Runs one fault in a process of its own; elsewhere it does nothing.
#[test]
fn the_fault_of_this_process() {
    is_own_process();
}

fn faults() -> Vec<Fault> {
    let by_place = toml::from_str::<Faults>(include_str!("planted/device.toml")).unwrap();
    let mut faults = Vec::new();
    for (arch, by_header) in by_place {
        for (header, of_header) in by_header {
            let place = |fault| Fault { arch: arch.clone(), header: header.clone(), ..fault };
            faults.extend(of_header.into_iter().map(place));
        }
    }
    faults
}

/// Checks without compiling that each fault's text still stands, so that a change of such a line of device
/// text is noticed at once.
#[test]
fn each_planted_fault_has_its_text_once_in_its_header() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for Fault { what, arch, header, text, put, .. } in faults() {
        let vendor = if arch.starts_with("gfx") { "kernels-hip" } else { "kernels-cuda" };
        let paths = [vendor, "core/device"].map(|folder| root.join(folder).join(&header));
        let found = paths.iter().find_map(|path| std::fs::read_to_string(path).ok());
        assert_eq!(found.map(|all| all.matches(&text).count()), Some(1), "{what}: {header}: `{text}`");
        assert_ne!(text, put, "{what}");
    }
}

/// Number of faults in CI, drawn from the whole list, however long it grows: most of a fault's seconds go
/// into compiling its kernel twice.
const SAMPLE: usize = 22;

/// Whether the fault at `at` of `count` is of the sample.
fn is_of_the_sample(at: usize, count: usize) -> bool {
    at.is_multiple_of(count.div_ceil(SAMPLE))
}

#[test]
fn each_planted_fault_of_a_sample_is_found_by_its_case_and_its_sound_twin_passes() {
    are_found(true);
}

#[test]
#[ignore = "minutes: the planted faults beside the sample's"]
fn each_other_planted_fault_is_found_by_its_case_and_its_sound_twin_passes() {
    are_found(false);
}

/// Checks that the faults of the sample are found, or all others.
fn are_found(sampled: bool) {
    let all = faults();
    let count = all.len();
    // `PLANTED_ONLY` is a part of a fault's description: only such faults run, in the sample or not.
    let only = std::env::var("PLANTED_ONLY").ok();
    // A fault's further cases each compile its kernel twice more, so none of them is in the sample.
    let of_each_case = |(at, fault): (usize, Fault)| {
        let also = fault.also.clone().into_iter().map(|case| Fault { case, ..fault.clone() });
        let also: Vec<_> = also.map(|fault| (at, false, fault)).collect();
        std::iter::once((at, true, fault)).chain(also)
    };
    let chosen: Vec<Fault> = all
        .into_iter()
        .enumerate()
        .flat_map(of_each_case)
        .filter(|(at, is_first, fault)| {
            let is_sampled = *is_first && is_of_the_sample(*at, count);
            only.as_ref().map_or_else(|| is_sampled == sampled, |words| fault.what.contains(words))
        })
        .map(|(_, _, fault)| fault)
        .collect();
    let missed = Mutex::new(Vec::new());
    each(&chosen, |fault| {
        let Fault { what, arch, case, .. } = fault;
        match fault.run("the_fault_of_this_process").1 {
            Fate::Found(text) => println!("found: {what} ({arch}), by {case}: {text}"),
            Fate::Absent(reason) => println!("absent: {what} ({arch}): {reason}"),
            other => missed.lock().unwrap().push(format!("{what} ({arch}), by {case}: {other:?}")),
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found, or not as expected:\n{}", missed.join("\n"));
    println!("{count} faults planted in device text, {} cases tried", chosen.len());
}
