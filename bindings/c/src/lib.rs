//! The C ABI of `fmha`: attention forward on the caller's device pointers and stream.
//!
//! `fmha.h` is generated from this crate and committed. Device 0 through NVIDIA's driver; kernels
//! that are correct but slow are not chosen. No panic crosses the boundary.

mod call;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use fmha_core::error::{Error, ProblemError, Result};
use fmha_core::{DevBuffer, FmhaBackend, FwdPlan, PlanOptions, Totals};
use fmha_cuda::CudaBackend;
use once_cell::sync::OnceCell;

pub use call::{FmhaCall, FmhaTensor};

/// A chosen and loaded kernel with its scratch memory.
pub struct FmhaPlan {
    plan: FwdPlan,
    totals: Totals,
    workspace: Option<DevBuffer>,
}

impl FmhaPlan {
    /// # Safety
    /// As [`FmhaCall::problem`].
    unsafe fn new(backend: &dyn FmhaBackend, call: &FmhaCall) -> Result<Self> {
        // SAFETY: passed on.
        let (problem, totals) = unsafe { call.problem(backend)? };
        let plan = backend.plan_fwd(&problem, &PlanOptions::default())?;
        let workspace = backend.memory().workspace(plan.workspace())?;
        Ok(Self { plan, totals, workspace })
    }

    /// # Safety
    /// As [`FmhaCall::args`].
    unsafe fn run(&self, backend: &dyn FmhaBackend, call: &FmhaCall) -> Result<()> {
        let space = backend.memory().space();
        // SAFETY: passed on.
        let mut args = unsafe { call.args(&self.plan, self.totals, space, self.workspace.as_ref())? };
        backend.run_fwd(&self.plan, &mut args, call.queue())
    }
}

static BACKEND: OnceCell<CudaBackend> = OnceCell::new();

fn backend() -> Result<&'static CudaBackend> {
    BACKEND.get_or_try_init(|| CudaBackend::open(0, None))
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs `body`; 0, or 1 with the error or panic kept for this thread.
fn guard(body: impl FnOnce() -> Result<()>) -> c_int {
    let text = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "internal error: a panic was caught at the C boundary".to_owned(),
    };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST_ERROR.with(|last| *last.borrow_mut() = text);
    1
}

fn not_null<T>(field: &'static str, ptr: *const T) -> Result<()> {
    if ptr.is_null() {
        Err(Error::from(ProblemError::new(field, format!("{field} is null (0)"))))
    } else {
        Ok(())
    }
}

/// Chooses and compiles a kernel; may take seconds, and waits for the stream of a packed call.
/// Returns 0 and sets `*plan`, or not 0 (see `fmha_last_error`). A plan holds for the sizes, strides,
/// types and present pointers of its call; packed, for its totals too. It runs on one stream at a time.
///
/// # Safety
/// `call` is null or a call whose `mask` is a C string and whose `cu_seqlens_*` are device memory;
/// `plan` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_plan(call: *const FmhaCall, plan: *mut *mut FmhaPlan) -> c_int {
    guard(|| {
        not_null("call", call)?;
        not_null("plan", plan)?;
        // SAFETY: not null, and the caller promised the rest.
        let made = unsafe { FmhaPlan::new(backend()?, &*call)? };
        // SAFETY: as above.
        unsafe { *plan = Box::into_raw(Box::new(made)) };
        Ok(())
    })
}

/// Queues the call on its stream and returns: it neither allocates on the device nor waits.
/// Returns 0, or not 0 (see `fmha_last_error`) with nothing launched, unless the driver itself failed.
///
/// # Safety
/// `plan` is null or from `fmha_plan`; `call` is null or a call whose pointers are device memory as
/// large as the plan's problem says, untouched by others until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_run(plan: *const FmhaPlan, call: *const FmhaCall) -> c_int {
    guard(|| {
        not_null("plan", plan)?;
        not_null("call", call)?;
        // SAFETY: not null, and the caller promised the rest.
        unsafe { (*plan).run(backend()?, &*call) }
    })
}

/// Drops a plan whose work is done. Null is taken.
///
/// # Safety
/// `plan` is null or from `fmha_plan`, and not dropped before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_drop(plan: *mut FmhaPlan) {
    guard(|| {
        if !plan.is_null() {
            // SAFETY: the caller promised that it is ours, once.
            drop(unsafe { Box::from_raw(plan) });
        }
        Ok(())
    });
}

/// What the last call on this thread that did not return 0 had to say; valid until the next such.
#[unsafe(no_mangle)]
pub extern "C" fn fmha_last_error() -> *const c_char {
    LAST_ERROR.with(|last| last.borrow().as_ptr())
}
