//! Scores and masks as code on the emulated driver library, with what they capture and gradients, against float64.
//! Needs clang; where there is none, a test says `absent` and checks nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::sync::OnceLock;

use fmha_conformance::captured::{Gradients, checks};
use fmha_core::{DType, Device, Dims, FwdProblem, PlanOptions};

mod support;

const DIMS: Dims = Dims {
    batch: 2,
    seqlen_q: 37,
    seqlen_k: 53,
    num_heads_q: 4,
    num_heads_kv: 2,
    head_dim_qk: 24,
    head_dim_v: 16,
};

/// The emulated device, or a word that it is absent.
fn device() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let open = || support::clang_is_there().then(|| fmha_rocm::open(0, Some("gfx942")).unwrap());
    DEVICE.get_or_init(open).as_ref()
}

#[test]
fn simt_computes_functions_and_gradients_of_what_they_capture() {
    let Some(device) = device() else { return };
    for check in checks(&FwdProblem::batch(DType::F32, DIMS), Gradients::Captured) {
        check.run::<f32>(device, &PlanOptions::default().kernel("simt").deterministic(true)).unwrap();
    }
}
