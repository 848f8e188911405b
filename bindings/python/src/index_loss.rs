//! The loss of an indexer: plans of the C library's calls, kept by their numbers.

use std::ffi::c_int;
use std::sync::{Arc, Mutex};

use fmha::IndexLossPlan;
use fmha_c::FmhaIndexLoss;
use fmha_core::fork::PerProcess;

use crate::call::{Key, Wrong, word};
use crate::plans::{Kept, kept_or_made, said};
use crate::tensor::Device;

/// Plans by the numbers of their calls. Their scratch is the caller's.
static PLANS: PerProcess<Kept<IndexLossPlan>> = PerProcess::of_first(Mutex::new(None));

/// Everything of a call that a plan depends on.
fn key(call: &FmhaIndexLoss) -> Key {
    // The first word differs from those of other operations' keys, so keys cannot collide.
    let mut key = Key::from_slice(&[u64::MAX - 8]);
    let sizes = [call.batch, call.seqlen_q, call.seqlen_k, call.topk, call.num_heads, call.head_dim];
    key.extend([call.struct_bytes]);
    key.extend(sizes.map(word));
    let codes = [call.dtype_q, call.dtype_k, call.deterministic, call.allow_fallback];
    key.extend(codes.map(|code| word(code.into())));
    key.extend([u64::from(!call.dloss.is_null())]);
    let written = [call.loss, call.dq, call.dk, call.dweights];
    key.extend(written.map(|address| u64::from(!address.is_null())));
    key
}

fn planned(call: &FmhaIndexLoss, (kind, index): (c_int, c_int)) -> Result<Arc<IndexLossPlan>, Wrong> {
    let mut key = key(call);
    key.extend([kind, index].map(|number| word(number.into())));
    kept_or_made(&PLANS, key, Device { kind, index }, |device| said(fmha_c::plan_index_loss(device, call)))
}

/// Bytes of scratch that a call wants on the device of a kind and an index.
///
/// # Errors
/// A fault of the call, or why no kernel takes it.
pub fn workspace_bytes(call: &FmhaIndexLoss, device: (c_int, c_int)) -> Result<u64, Wrong> {
    Ok(planned(call, device)?.workspace().bytes)
}

/// Queues a call on its stream, or computes it on the CPU.
///
/// # Errors
/// As [`workspace_bytes`]; what the driver said.
///
/// # Safety
/// As [`fmha_c::run_index_loss`].
pub unsafe fn run(call: &FmhaIndexLoss, device: (c_int, c_int)) -> Result<(), Wrong> {
    let plan = planned(call, device)?;
    // SAFETY: the caller keeps the contract of `run`.
    said(unsafe { fmha_c::run_index_loss(&plan, call) })
}
