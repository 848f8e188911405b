//! The emulator against what an H200 gave.

use fmha_emu_silicon::record::Recording;
use fmha_emu_silicon::{compare, forward};

/// Made by `silicon record` on an NVIDIA H200, driver 580.159.
const H200: &str = include_str!("../recordings/h200.txt");

fn recording() -> Recording {
    Recording::from_text(H200).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn one_instruction_gives_an_h200s_bits_or_lies_within_its_documented_error() {
    let outcome = compare::programs(&recording());
    println!("{outcome}");
    assert!(outcome.count > 500, "{} programs", outcome.count);
    assert!(outcome.failures.is_empty(), "{outcome}");
}

#[test]
fn attention_gives_an_h200s_results_within_the_rounding_of_its_sums() {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        println!("absent: {reason}");
        return;
    }
    let backend = forward::open(true).unwrap_or_else(|error| panic!("{error}"));
    let outcome = forward::compare_all(&recording(), &*backend);
    println!("{outcome}");
    assert!(outcome.count > 300, "{} calls", outcome.count);
    assert!(outcome.failures.is_empty(), "{outcome}");
    // What differs does so by rounding alone: most elements are the same number.
    let agreement = outcome.agreement;
    assert!(agreement.equal * 100 > agreement.compared * 80, "{outcome}");
}

#[test]
fn a_recording_survives_its_text() {
    let recording = recording();
    assert_eq!(Recording::from_text(&recording.to_text()), Ok(recording));
}
