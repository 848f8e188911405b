//! Scores and masks as code on the emulated driver library of gfx942, with captured tensors and gradients, against
//! float64. Needs clang; without it a test prints `absent` and checks nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::sync::OnceLock;

use fmha_conformance::captured::{Gradients, run_16_bits, run_beside_intervals, run_f32};
use fmha_core::{Device, PlanOptions};

mod support;

/// The emulated device; `None`, with a message, if there is no clang.
fn device() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let open = || support::clang_is_there().then(|| fmha_rocm::open(0, Some("gfx942")).unwrap());
    DEVICE.get_or_init(open).as_ref()
}

/// Runs every `step`-th check with f32 operands.
fn simt(step: usize) {
    let Some(device) = device() else { return };
    let options = PlanOptions::default().kernel("simt").deterministic(true);
    run_f32(device, &options, Gradients::Captured, step).unwrap();
}

/// Runs every `step`-th check with 16-bit operands, on tiled kernels without a fallback.
fn tiles(step: usize) {
    let Some(device) = device() else { return };
    run_16_bits(device, &PlanOptions::default().allow_fallback(false), Gradients::Captured, step).unwrap();
}

#[test]
fn simt_computes_functions_and_gradients_of_what_they_capture() {
    simt(13);
}

#[test]
fn tiles_compute_functions_and_gradients_of_what_they_capture() {
    tiles(13);
    let Some(device) = device() else { return };
    run_beside_intervals(device, &PlanOptions::default().allow_fallback(false)).unwrap();
}

#[test]
#[ignore = "compiles a hundred kernels"]
fn every_form_on_every_kernel() {
    tiles(1);
    simt(1);
}
