//! Scores and masks as code on the test double of the driver, with what they capture and gradients, against float64. Needs
//! NVRTC; where there is none, a test says `absent` and checks nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::sync::OnceLock;

use fmha_conformance::captured::{Gradients, checks};
use fmha_core::{DType, Device, Dims, FwdProblem, PlanOptions};
use half::{bf16, f16};

const DIMS: Dims = Dims {
    batch: 2,
    seqlen_q: 37,
    seqlen_k: 53,
    num_heads_q: 4,
    num_heads_kv: 2,
    head_dim_qk: 24,
    head_dim_v: 16,
};

/// The emulated device, or why there is none.
fn device() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let open = || match fmha_cuda::nvrtc::nvrtc() {
        Ok(_) => Some(fmha_cuda::open(0, Some("sm_80")).unwrap()),
        Err(reason) => {
            println!("absent: {reason}");
            None
        }
    };
    DEVICE.get_or_init(open).as_ref()
}

#[test]
fn simt_computes_functions_and_gradients_of_what_they_capture() {
    let Some(device) = device() else { return };
    for check in checks(&FwdProblem::batch(DType::F32, DIMS), Gradients::Captured) {
        check.run::<f32>(device, &PlanOptions::default().kernel("simt").deterministic(true)).unwrap();
    }
}

#[test]
fn sm80_computes_functions_and_gradients_of_what_they_capture() {
    let Some(device) = device() else { return };
    let options = PlanOptions::default().kernel("sm80");
    for check in checks(&FwdProblem::batch(DType::F16, DIMS), Gradients::Captured) {
        check.run::<f16>(device, &options).unwrap();
    }
    let long = Dims { seqlen_q: 70, seqlen_k: 150, head_dim_qk: 64, head_dim_v: 64, ..DIMS };
    for check in checks(&FwdProblem::batch(DType::Bf16, long), Gradients::Captured) {
        check.run::<bf16>(device, &options).unwrap();
    }
}
