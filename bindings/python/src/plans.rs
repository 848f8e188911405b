//! Plans, kept by the numbers of their calls: a call that was planned once is looked up and run.

use std::ffi::{CStr, CString};
use std::num::NonZeroUsize;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use fmha_c::FmhaPlan;
use fmha_core::fork::PerProcess;
use lru::LruCache;

use crate::call::{Call, Key, Wrong, options};
use crate::combine::Combine;
use crate::request::{Request, Slot};
use crate::shapes::one_device;
use crate::tensor::Device;

/// Plans that are kept; the one unused for longest goes. A plan has no scratch of its own here, some kilobytes.
const MOST: NonZeroUsize = NonZeroUsize::MIN.saturating_add(1023);

/// Alignment of the scratch's address, in bytes.
pub const ALIGNMENT: usize = 256;

/// A C plan, freed with its last user.
struct Plan(*mut FmhaPlan);

// SAFETY: a plan whose scratch is the caller's may run on several threads at once, says `fmha.h`.
unsafe impl Send for Plan {}
// SAFETY: a plan whose scratch is the caller's may run on several threads at once, says `fmha.h`.
unsafe impl Sync for Plan {}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: from `fmha_plan`, and dropped once. Work that is queued holds what it needs: kernels stay loaded
        // with their device, and scratch is the caller's.
        unsafe { fmha_c::fmha_drop(self.0) }
    }
}

type Kept = Mutex<Option<LruCache<Key, Arc<Plan>>>>;

/// A forked child has its own: another thread may have held the lock when it was made.
static PLANS: PerProcess<Kept> = PerProcess::of_first(Mutex::new(None));

/// The C library's last error on this thread.
fn said() -> Wrong {
    // SAFETY: a C string that lives until the next error of this thread.
    unsafe { CStr::from_ptr(fmha_c::fmha_last_error()) }.to_string_lossy().into_owned()
}

/// The plan of a key, made by `make` the first time.
fn plan(key: Key, make: impl FnOnce(*mut *mut FmhaPlan) -> Result<i32, Wrong>) -> Result<Arc<Plan>, Wrong> {
    let kept = PLANS.get(|| Mutex::new(None));
    let plans = || kept.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(plan) = plans().as_mut().and_then(|plans| plans.get(&key).cloned()) {
        return Ok(plan);
    }
    // Planning happens without the lock, since a compiler may run for seconds. Two threads may plan the same
    // call, and one plan stays.
    let mut made = ptr::null_mut();
    if make(&raw mut made)? != 0 {
        return Err(said());
    }
    let plan = Arc::new(Plan(made));
    // The plan that `push` evicts is dropped after the lock is released.
    let old = plans().get_or_insert_with(|| LruCache::new(MOST)).push(key, Arc::clone(&plan));
    drop(old);
    Ok(plan)
}

fn planned(call: &Call) -> Result<Arc<Plan>, Wrong> {
    plan(call.key(), |made| {
        call.check_types()?;
        let (device, options) = (CString::new(call.device.name()).unwrap_or_default(), call.options());
        // SAFETY: the problem's pointers are good within `with`; nothing of a device is read.
        Ok(call
            .with(|problem| unsafe { fmha_c::fmha_plan(device.as_ptr(), problem, &raw const options, made) }))
    })
}

fn planned_combine(call: &Combine) -> Result<Arc<Plan>, Wrong> {
    plan(call.key(), |made| {
        let device = CString::new(call.device.name()).unwrap_or_default();
        let options = options(call.options());
        // SAFETY: structs of this function.
        Ok(unsafe {
            fmha_c::fmha_plan_combine(device.as_ptr(), &raw const call.problem, &raw const options, made)
        })
    })
}

fn is_combine(request: &Request) -> bool {
    request.get(Slot::OParts).is_some()
}

/// The device of a request's tensors.
///
/// # Errors
/// The first tensor that is elsewhere.
pub fn device(request: &Request) -> Result<Device, Wrong> {
    one_device(request, if is_combine(request) { Slot::OParts } else { Slot::Q })
}

/// Holds a request's tensors to each other and its numbers to what they may be: what planning refuses on every device.
///
/// # Errors
/// What is wrong with the request.
pub fn check(request: &Request) -> Result<(), Wrong> {
    if is_combine(request) {
        return fmha_c::check_combine(&Combine::new(request)?.problem);
    }
    let call = Call::new(request)?;
    call.check_types()?;
    // SAFETY: the problem's pointers are good within `with`; nothing of a device is read.
    call.with(|problem| unsafe { fmha_c::check(problem) })
}

/// The plan's description, one fact a line.
///
/// # Errors
/// What is wrong with the request, or why no kernel takes it.
pub fn explain(request: &Request) -> Result<String, Wrong> {
    let plan = match is_combine(request) {
        true => planned_combine(&Combine::new(request)?)?,
        false => planned(&Call::new(request)?)?,
    };
    // SAFETY: the text lives as long as the plan.
    let text = unsafe { CStr::from_ptr(fmha_c::fmha_plan_text(plan.0)) };
    Ok(text.to_string_lossy().into_owned())
}

/// Bytes of scratch that a run of a request wants.
///
/// # Errors
/// What is wrong with the request, or why no kernel takes it.
pub fn workspace_bytes(request: &Request) -> Result<u64, Wrong> {
    let plan = planned(&Call::new(request)?)?;
    // SAFETY: the plan is alive.
    Ok(unsafe { fmha_c::fmha_plan_workspace_bytes(plan.0) })
}

/// Runs a request with scratch from `workspace`, which is asked for that many bytes, aligned to
/// [`ALIGNMENT`], where there are any, and keeps them until what it returned is dropped.
///
/// # Errors
/// What is wrong with the request, why no kernel takes it, or what the driver said.
pub fn run<W>(
    request: &Request,
    workspace: impl FnOnce(u64) -> Result<(W, *mut u8), Wrong>,
) -> Result<(), Wrong> {
    if is_combine(request) {
        let call = Combine::new(request)?;
        let (plan, args) = (planned_combine(&call)?, call.args());
        // SAFETY: who made the request promised its pointers.
        return ended(unsafe { fmha_c::fmha_run_combine(plan.0, &raw const args) });
    }
    let call = Call::new(request)?;
    let (plan, mut args) = (planned(&call)?, call.args());
    // SAFETY: the plan is alive.
    let bytes = unsafe { fmha_c::fmha_plan_workspace_bytes(plan.0) };
    let scratch = if bytes > 0 { Some(workspace(bytes)?) } else { None };
    if let Some((_, address)) = &scratch {
        (args.workspace, args.workspace_bytes) = (address.cast(), bytes);
    }
    // SAFETY: who made the request promised its pointers; scratch is as large as the plan wants.
    ended(unsafe { fmha_c::fmha_run(plan.0, &raw const args) })
}

fn ended(code: i32) -> Result<(), Wrong> {
    if code == 0 { Ok(()) } else { Err(said()) }
}
