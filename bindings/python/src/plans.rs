//! Cache of plans by the numbers of their calls: a call with the numbers of an earlier one runs that call's plan.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use fmha::Backend;
use fmha_c::FmhaPlan;
use fmha_core::fork::PerProcess;
use lru::LruCache;

use crate::call::{Call, Key, Wrong, options};
use crate::combine::Combine;
use crate::lasting;
use crate::objects;
use crate::request::{KEEPS_LISTS, Request, Slot};
use crate::shapes::one_device;
use crate::tensor::Device;

/// Most plans that are kept; the least recently used is dropped. A plan takes some kilobytes, since its scratch belongs
/// to the caller.
const MOST: NonZeroUsize = NonZeroUsize::MIN.saturating_add(1023);

/// Alignment of the scratch's address, in bytes.
pub const ALIGNMENT: usize = 256;

/// Plans by the numbers of their calls. The scratch belongs to the caller, so threads may run one plan at once.
pub(crate) type Kept<P> = Mutex<Option<LruCache<Key, Arc<P>>>>;

/// A forked child has a new cache: another thread of the parent may have held the lock at the fork.
static PLANS: PerProcess<Kept<FmhaPlan>> = PerProcess::of_first(Mutex::new(None));

/// Converts a result of the library: its error becomes the text that the user reads.
pub(crate) fn said<T>(result: Result<T, impl ToString>) -> Result<T, Wrong> {
    result.map_err(|error| error.to_string())
}

/// Plan for a key. `make` makes it where the cache does not have it.
pub(crate) fn kept_or_made<P>(
    plans: &PerProcess<Kept<P>>,
    key: Key,
    device: Device,
    make: impl FnOnce(&fmha::Device) -> Result<P, Wrong>,
) -> Result<Arc<P>, Wrong> {
    let kept = plans.get(|| Mutex::new(None));
    let plans = || kept.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(plan) = plans().as_mut().and_then(|plans| plans.get(&key).cloned()) {
        return Ok(plan);
    }
    // A plan is made without the lock held, since a compiler may run for seconds. Two threads may plan the same
    // call; one plan is kept.
    let device = said(said(device.name().parse::<Backend>())?.open())?;
    let plan = Arc::new(make(&device)?);
    // The plan that `push` evicts is dropped after the lock is released.
    let old = plans().get_or_insert_with(|| LruCache::new(MOST)).push(key, Arc::clone(&plan));
    drop(old);
    Ok(plan)
}

pub(crate) fn planned(call: &Call) -> Result<Arc<FmhaPlan>, Wrong> {
    kept_or_made(&PLANS, call.key(), call.device, |device| {
        call.check_types()?;
        // SAFETY: the problem's pointers are good within `with`; nothing of a device is read.
        said(call.with(|problem| unsafe { FmhaPlan::new(device, problem, call.mask, &call.options()) }))
    })
}

fn planned_combine(call: &Combine) -> Result<Arc<FmhaPlan>, Wrong> {
    kept_or_made(&PLANS, call.key(), call.device, |device| {
        said(FmhaPlan::combine(device, &call.problem, &options(call.options())))
    })
}

fn is_combine(request: &Request) -> bool {
    request.get(Slot::OParts).is_some()
}

/// Device of a request's tensors.
///
/// # Errors
/// The first tensor that is on another device.
pub fn device(request: &Request) -> Result<Device, Wrong> {
    one_device(request, if is_combine(request) { Slot::OParts } else { Slot::Q })
}

/// Checks a request's tensors against each other and its numbers against their ranges: the errors that planning
/// returns on every device.
///
/// # Errors
/// What is wrong with the request.
pub fn check(request: &Request) -> Result<(), Wrong> {
    if is_combine(request) {
        return said(FmhaPlan::check_combine(&Combine::new(request)?.problem));
    }
    let call = Call::new(request)?;
    call.check_types()?;
    // SAFETY: the problem's pointers are good within `with`; nothing of a device is read.
    said(call.with(|problem| unsafe { FmhaPlan::check(problem, call.mask) }))
}

/// Describes the plan of a request as text, one fact a line.
///
/// # Errors
/// What is wrong with the request, or why no kernel takes it.
pub fn explain(request: &Request) -> Result<String, Wrong> {
    let plan = match is_combine(request) {
        true => planned_combine(&Combine::new(request)?)?,
        false => planned(&Call::new(request)?)?,
    };
    Ok(plan.text().to_string_lossy().into_owned())
}

/// Bytes of scratch that a run of a request needs.
///
/// # Errors
/// What is wrong with the request, or why no kernel takes it.
pub fn workspace_bytes(request: &Request) -> Result<u64, Wrong> {
    Ok(planned(&Call::new(request)?)?.workspace_bytes())
}

/// Runs a request with scratch from `workspace`. That function is called with the number of bytes, unless it is 0;
/// memory must be aligned to [`ALIGNMENT`] and is kept until the returned value is dropped.
///
/// # Errors
/// What is wrong with the request, why no kernel takes it, or an error of the driver.
pub fn run<W>(
    request: &Request,
    workspace: impl FnOnce(u64) -> Result<(W, *mut u8), Wrong>,
) -> Result<(), Wrong> {
    if is_combine(request) {
        let call = Combine::new(request)?;
        let (plan, args) = (planned_combine(&call)?, call.args());
        // SAFETY: who made the request promised its pointers.
        return said(unsafe { plan.run_combine(&args) });
    }
    let call = Call::new(request)?;
    let (plan, mut args) = (planned(&call)?, call.args());
    let bytes = plan.workspace_bytes();
    let scratch = if bytes > 0 { Some(workspace(bytes)?) } else { None };
    if let Some((_, address)) = &scratch {
        (args.workspace, args.workspace_bytes) = (address.cast(), bytes);
    }
    let object = objects::of(request);
    if let Some(object) = &object {
        args.built = object.pointer();
    }
    let lasting = if request.numbers.options & KEEPS_LISTS == 0 || object.is_some() {
        None
    } else {
        lasting::of(&call, &plan, &args)
    };
    if let Some(lists) = &lasting {
        args.built = Arc::as_ptr(lists);
    }
    // SAFETY: who made the request promised its pointers; scratch is as large as the plan wants.
    said(unsafe { plan.run(&args) })
}
