//! Scores and masks as code on the test double of the driver, with captured tensors and gradients, against float64.
//! Needs NVRTC; without it a test prints `absent` and checks nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::sync::OnceLock;

use fmha_conformance::captured::{Gradients, run_16_bits, run_beside_intervals, run_f32};
use fmha_core::{Device, PlanOptions};

/// The emulated device; `None`, with a message, if there is no NVRTC.
fn device() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let open = || match fmha_cuda::nvrtc::nvrtc() {
        Ok(_) => Some(fmha_cuda::open(0, Some("sm_90a")).unwrap()),
        Err(reason) => {
            println!("absent: {reason}");
            None
        }
    };
    DEVICE.get_or_init(open).as_ref()
}

/// Runs every `step`-th check with f32 operands.
fn simt(step: usize) {
    let Some(device) = device() else { return };
    let options = PlanOptions::default().kernel("simt").deterministic(true);
    run_f32(device, &options, Gradients::Captured, step).unwrap();
}

/// Runs every `step`-th check with 16-bit operands.
fn tiles(kernel: &str, gradients: Gradients, step: usize) {
    let Some(device) = device() else { return };
    run_16_bits(device, &PlanOptions::default().kernel(kernel), gradients, step).unwrap();
}

#[test]
fn simt_computes_functions_and_gradients_of_what_they_capture() {
    simt(13);
}

#[test]
fn sm80_computes_functions_and_gradients_of_what_they_capture() {
    tiles("sm80", Gradients::Captured, 13);
    let Some(device) = device() else { return };
    run_beside_intervals(device, &PlanOptions::default().kernel("sm80")).unwrap();
}

/// The launches of captured tensors' gradients are those of `sm80`.
#[test]
fn sm90_computes_functions_and_gradients_of_what_they_capture() {
    tiles("sm90", Gradients::Captured, 13);
}

#[test]
#[ignore = "compiles a hundred kernels"]
fn every_form_on_every_kernel() {
    simt(1);
    tiles("sm80", Gradients::Captured, 1);
    tiles("sm90", Gradients::Captured, 1);
}
