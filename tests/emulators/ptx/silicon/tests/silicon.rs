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

/// Kernels of two 16-bit types have one text: bf16 alone, and what changes a score at one head dimension.
fn in_short(name: &str) -> bool {
    let kind = name.split('/').next().unwrap_or_default();
    let every_head_dim = ["full", "causal", "window", "simt"].contains(&kind);
    !name.contains("/f16") && (every_head_dim || name.contains("/d64/"))
}

fn attention(takes: impl Fn(&str) -> bool, least: usize) {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        println!("absent: {reason}");
        return;
    }
    let backend = forward::open(true).unwrap_or_else(|error| panic!("{error}"));
    let outcome = forward::compare_all(&recording(), &backend, takes);
    println!("{outcome}");
    assert!(outcome.count > least, "{} calls", outcome.count);
    assert!(outcome.failures.is_empty(), "{outcome}");
    // Differences come from rounding alone: most elements are the same number.
    let agreement = outcome.agreement;
    assert!(agreement.equal * 100 > agreement.compared * 80, "{outcome}");
}

#[test]
fn attention_gives_an_h200s_results_within_the_rounding_of_its_sums() {
    attention(in_short, 90);
}

#[test]
#[ignore = "compiles some hundred kernels"]
fn every_call_gives_an_h200s_results_within_the_rounding_of_its_sums() {
    attention(|_| true, 300);
}

#[test]
fn a_recording_survives_its_text() {
    let recording = recording();
    assert_eq!(Recording::from_text(&recording.to_text()), Ok(recording));
}
