//! The C ABI of `fmha`: attention forward and backward, combine, and attention over ranks, on the caller's pointers and
//! stream.
//!
//! `fmha.h` is generated from this crate and committed. A call is two structs: the problem, of which a plan is made,
//! and the arguments of each run. No panic crosses the boundary.

#![allow(rustdoc::broken_intra_doc_links, reason = "the text is the header's, where [batch] is a shape")]

mod choose;
mod code;
#[cfg(test)]
mod contract;
mod host;
mod index_loss;
mod masks;
mod plan;
mod quantize;
mod ranks;
mod second;
mod structs;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use fmha::{DevBuffer, Device, Error, ProblemError};

pub use host::{Choice, tile_options};
pub use index_loss::{plan_index_loss, run_index_loss};
pub use masks::FmhaMaskObject;
pub use plan::FmhaPlan;
pub use ranks::*;
pub use structs::*;

/// Result of this library's functions, with the library's error by default.
type Result<T, E = Error> = std::result::Result<T, E>;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs `body`. Returns 0, or 1 after storing the error or panic as this thread's last error.
fn guard(body: impl FnOnce() -> Result<()>) -> c_int {
    guard_text(|| body().map_err(|error| error.to_string()))
}

/// Runs `body` as [`guard`] does, for a `body` whose errors are already texts.
fn guard_text(body: impl FnOnce() -> Result<(), String>) -> c_int {
    let text = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return 0,
        Ok(Err(text)) => text,
        Err(_) => "internal error: a panic was caught at the C boundary".to_owned(),
    };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // While a thread ends, the storage of its last error may already be gone; a call then still returns.
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = text);
    1
}

fn not_null<T>(field: &'static str, ptr: *const T) -> Result<()> {
    if ptr.is_null() {
        Err(Error::from(ProblemError::new(field, format!("{field} is null"))))
    } else {
        Ok(())
    }
}

/// Makes a plan of any kind and stores it in `*plan`.
///
/// # Safety
/// As `fmha_plan`; `make` may read what `problem` points to.
unsafe fn make_plan<P>(
    device: *const c_char,
    problem: *const P,
    options: *const FmhaOptions,
    plan: *mut *mut FmhaPlan,
    make: impl FnOnce(&Device, &P, &Choice) -> Result<FmhaPlan>,
) -> c_int {
    guard(|| {
        not_null("problem", problem)?;
        not_null("plan", plan)?;
        // SAFETY: not null, and the caller keeps the rest of the contract of `make_plan`.
        let made = unsafe {
            let choice = Choice::read(options)?;
            make(&host::device(device)?, &*problem, &choice)?
        };
        // SAFETY: not null, and the caller keeps the rest of the contract of `make_plan`.
        unsafe { *plan = Box::into_raw(Box::new(made)) };
        Ok(())
    })
}

/// Runs a plan of any kind.
///
/// # Safety
/// As `fmha_run`; `run` may read and write what `args` points to.
unsafe fn run_plan<A>(
    plan: *const FmhaPlan,
    args: *const A,
    run: unsafe fn(&FmhaPlan, &A) -> Result<()>,
) -> c_int {
    guard(|| {
        not_null("plan", plan)?;
        not_null("args", args)?;
        // SAFETY: not null, and the caller keeps the rest of the contract of `run_plan`.
        unsafe { run(&*plan, &*args) }
    })
}

/// Chooses and compiles a kernel; may take seconds the first time. Nothing on the device is read.
/// Returns 0 and sets `*plan`, or not 0 (see `fmha_last_error`) with `*plan` untouched.
///
/// `device` is "cuda" (as null), "cuda:1", "rocm", "cpu" (whose addresses are host memory) or "auto". It is opened
/// once, and its kernels stay loaded from plan to plan. The plan runs on one stream at a time, unless each run brings
/// its own workspace.
///
/// # Safety
/// `device` is null or a C string; `problem` is null or a problem whose pointers are null or point to what they
/// say; `options` is null or options whose strings are null or C strings; `plan` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_plan(
    device: *const c_char,
    problem: *const FmhaProblem,
    options: *const FmhaOptions,
    plan: *mut *mut FmhaPlan,
) -> c_int {
    // SAFETY: the caller keeps the contract of `fmha_plan`.
    unsafe {
        make_plan(device, problem, options, plan, |device, problem, choice| {
            FmhaPlan::new(device, problem, host::mask(problem)?, choice)
        })
    }
}

/// Queues a run on its stream and returns: on a device it neither allocates nor waits. Returns 0, or not 0 (see
/// `fmha_last_error`) with nothing launched, unless the driver itself failed. An argument that the problem needs and
/// that is missing is refused by its name, and so is one that the problem does not have.
///
/// # Safety
/// `plan` is null or from `fmha_plan`; `args` is null or arguments whose pointers are null or memory of the
/// plan's device as large as the problem says, untouched by others until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_run(plan: *const FmhaPlan, args: *const FmhaArgs) -> c_int {
    // SAFETY: the caller keeps the contract of `fmha_run`.
    unsafe { run_plan(plan, args, FmhaPlan::run) }
}

/// Plans a merge of partial results; `fmha_plan` plans attention.
///
/// # Safety
/// As `fmha_plan`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_plan_combine(
    device: *const c_char,
    problem: *const FmhaCombineProblem,
    options: *const FmhaOptions,
    plan: *mut *mut FmhaPlan,
) -> c_int {
    // SAFETY: the caller keeps the contract of `fmha_plan_combine`.
    unsafe { make_plan(device, problem, options, plan, FmhaPlan::combine) }
}

/// Runs a merge of partial results; `fmha_run` runs attention.
///
/// # Safety
/// As `fmha_run`; `parts` is null or as many as the problem's `num_parts` in host memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_run_combine(plan: *const FmhaPlan, args: *const FmhaCombineArgs) -> c_int {
    // SAFETY: the caller keeps the contract of `fmha_run_combine`.
    unsafe { run_plan(plan, args, FmhaPlan::run_combine) }
}

/// Plans a choice of keys or blocks, whose lists FmhaArgs.indices takes; `fmha_plan` plans attention.
///
/// # Safety
/// As `fmha_plan`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_plan_choose(
    device: *const c_char,
    problem: *const FmhaChooseProblem,
    options: *const FmhaOptions,
    plan: *mut *mut FmhaPlan,
) -> c_int {
    // SAFETY: the caller keeps the contract of `fmha_plan_choose`.
    unsafe { make_plan(device, problem, options, plan, FmhaPlan::choose) }
}

/// Runs a choice of keys or blocks; `fmha_run` runs attention.
///
/// # Safety
/// As `fmha_run`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_run_choose(plan: *const FmhaPlan, args: *const FmhaChooseArgs) -> c_int {
    // SAFETY: the caller keeps the contract of `fmha_run_choose`.
    unsafe { run_plan(plan, args, FmhaPlan::run_choose) }
}

/// Computes an indexer's loss and its gradients, or queues that on a GPU. `device` is named as in `fmha_plan`; null:
/// "cpu". Each call plans anew, which compiles only what was never compiled. Returns 0, or not 0 (see
/// `fmha_last_error`) with nothing written.
///
/// # Safety
/// `device` is null or a C string; `call` is null, or its pointers are null or memory of the device as large as it
/// says, of which nobody else uses what is written until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_index_loss(device: *const c_char, call: *const FmhaIndexLoss) -> c_int {
    guard(|| {
        not_null("call", call)?;
        // SAFETY: the caller keeps the contract of `fmha_index_loss`; `call` is not null.
        unsafe { index_loss::on(device, &*call) }
    })
}

/// Bytes of scratch that `fmha_index_loss` wants in `call.workspace`, which is 0 on the CPU. Of the call's addresses
/// only those matter that are null.
///
/// # Safety
/// `device` is null or a C string; `call` is null or a call; `bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_index_loss_workspace(
    device: *const c_char,
    call: *const FmhaIndexLoss,
    bytes: *mut u64,
) -> c_int {
    guard(|| {
        not_null("call", call)?;
        not_null("bytes", bytes)?;
        // SAFETY: the caller keeps the contract of `fmha_index_loss_workspace`; neither is null.
        unsafe { *bytes = index_loss::workspace_on(device, &*call)? };
        Ok(())
    })
}

/// Plans a conversion of a tensor to a format with scales by blocks, which FmhaProblem.block_scales takes.
///
/// # Safety
/// As `fmha_plan`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_plan_quantize(
    device: *const c_char,
    problem: *const FmhaQuantizeProblem,
    options: *const FmhaOptions,
    plan: *mut *mut FmhaPlan,
) -> c_int {
    // SAFETY: the caller keeps the contract of `fmha_plan_quantize`.
    unsafe { make_plan(device, problem, options, plan, FmhaPlan::quantize) }
}

/// Runs a conversion to a format with scales by blocks; `fmha_run` runs attention.
///
/// # Safety
/// As `fmha_run`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_run_quantize(plan: *const FmhaPlan, args: *const FmhaQuantizeArgs) -> c_int {
    // SAFETY: the caller keeps the contract of `fmha_run_quantize`.
    unsafe { run_plan(plan, args, FmhaPlan::run_quantize) }
}

/// Returns the plan's description for people to read, one fact a line: kernel, tile, promises, refusals. The text lives
/// as long as the plan.
///
/// # Safety
/// `plan` is null (then so is the text) or from `fmha_plan`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_plan_text(plan: *const FmhaPlan) -> *const c_char {
    // SAFETY: the caller promises that `plan` is null (then so is the text) or from `fmha_plan`.
    unsafe { plan.as_ref() }.map_or(std::ptr::null(), |plan| plan.text().as_ptr())
}

/// Bytes of the workspace (FmhaArgs.workspace and its like) that each run of the plan needs: 0 where the
/// plan was not made with caller_workspace, or needs none, or is null. A plan of combine needs none.
///
/// # Safety
/// `plan` is null or from `fmha_plan`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_plan_workspace_bytes(plan: *const FmhaPlan) -> u64 {
    // SAFETY: the caller promises that `plan` is null or from `fmha_plan`.
    unsafe { plan.as_ref() }.map_or(0, FmhaPlan::workspace_bytes)
}

/// Destroys a plan whose work is done. A null pointer is ignored.
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

/// Makes an object for the masks, as data or as code, of calls of the plans `forward`, `backward` or both; either may
/// be null. The object has memory for copies of the masks' tensors, and for the lists of tiles that kernels read.
/// `args` are the arguments of one of the calls, of which only total_q and total_k are read. Returns 0 and sets
/// `*object`, or not 0 (see `fmha_last_error`) with `*object` untouched. A mask as code that captures a tensor is
/// refused.
///
/// # Safety
/// `forward` and `backward` are null or from `fmha_plan`; `args` is null or arguments; `object` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_mask_object(
    forward: *const FmhaPlan,
    backward: *const FmhaPlan,
    args: *const FmhaArgs,
    object: *mut *mut FmhaMaskObject,
) -> c_int {
    guard(|| {
        not_null("args", args)?;
        not_null("object", object)?;
        // SAFETY: not null, or taken for absent; the caller keeps the rest of the contract of `fmha_mask_object`.
        let made = unsafe { FmhaPlan::mask_object(forward.as_ref(), backward.as_ref(), &*args)? };
        // SAFETY: not null, and the caller keeps the rest of the contract of `fmha_mask_object`.
        unsafe { *object = Box::into_raw(Box::new(made)) };
        Ok(())
    })
}

/// Queues copies of the arguments' mask tensors and the making of the lists on the arguments' stream, and returns. Runs
/// whose FmhaArgs.built is the object then use these masks, until it is built again. The call may be captured into a
/// graph: each replay builds. `plan` is one of the object's plans; of the arguments only lengths, masks and captured
/// numbers are read. The caller first waits for runs on other streams that use the object.
///
/// # Safety
/// `object` is null or from `fmha_mask_object`; the rest as `fmha_run`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_build_mask(
    object: *mut FmhaMaskObject,
    plan: *const FmhaPlan,
    args: *const FmhaArgs,
) -> c_int {
    guard(|| {
        not_null("object", object)?;
        not_null("plan", plan)?;
        not_null("args", args)?;
        // SAFETY: not null, and the caller keeps the rest of the contract of `fmha_build_mask`.
        unsafe { (*plan).build_mask(&*object, &*args) }
    })
}

/// Destroys a mask object that no work uses any more. A null pointer is ignored.
///
/// # Safety
/// `object` is null or from `fmha_mask_object`, and not dropped before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_drop_mask_object(object: *mut FmhaMaskObject) {
    guard(|| {
        if !object.is_null() {
            // SAFETY: the caller promised that it is ours, once.
            drop(unsafe { Box::from_raw(object) });
        }
        Ok(())
    });
}

/// Memory of a device, for callers who have none of their own.
pub struct FmhaBuffer {
    device: Device,
    memory: DevBuffer,
}

/// Allocates memory of a device, which is named as for `fmha_plan`. It is aligned to 256 bytes and not initialised.
/// Returns 0 and sets `*buffer`, or not 0 (see `fmha_last_error`) with `*buffer` untouched.
///
/// # Safety
/// `device` is null or a C string; `buffer` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_buffer(
    device: *const c_char,
    bytes: u64,
    buffer: *mut *mut FmhaBuffer,
) -> c_int {
    guard(|| {
        not_null("buffer", buffer)?;
        // SAFETY: the caller keeps the contract of `fmha_buffer`.
        let device = unsafe { host::device(device)? };
        let memory = device.memory().alloc(bytes)?;
        // SAFETY: not null, and the caller keeps the rest of the contract of `fmha_buffer`.
        unsafe { *buffer = Box::into_raw(Box::new(FmhaBuffer { device, memory })) };
        Ok(())
    })
}

/// Returns the address of the buffer's first byte, in the memory of its device. Host code can read and write a CPU
/// buffer through it.
///
/// # Safety
/// `buffer` is null (then so is the address) or from `fmha_buffer`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_buffer_data(buffer: *const FmhaBuffer) -> *mut c_void {
    // SAFETY: the caller promises that `buffer` is null (then so is the address) or from `fmha_buffer`.
    unsafe { buffer.as_ref() }.map_or(std::ptr::null_mut(), |buffer| buffer.memory.as_ptr().cast())
}

/// Copies `bytes` of host memory to the front of the buffer.
///
/// # Safety
/// `buffer` is null or from `fmha_buffer`, and no work queued uses it; `from` is null or so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_upload(buffer: *mut FmhaBuffer, from: *const c_void, bytes: u64) -> c_int {
    guard(|| {
        not_null("buffer", buffer)?;
        not_null("from", from)?;
        // SAFETY: not null, and the caller keeps the rest of the contract of `fmha_upload`.
        let buffer = unsafe { &mut *buffer };
        let bytes = fitting(bytes, &buffer.memory)?;
        // SAFETY: not null, and the caller keeps the rest of the contract of `fmha_upload`.
        let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
        buffer.device.memory().upload(from, &mut buffer.memory)
    })
}

/// Waits for the work queued on the default stream, then copies the front of the buffer to host memory. A caller that
/// uses another stream must wait for that stream first.
///
/// # Safety
/// `buffer` is null or from `fmha_buffer`; `to` is null or so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_download(buffer: *const FmhaBuffer, to: *mut c_void, bytes: u64) -> c_int {
    guard(|| {
        not_null("buffer", buffer)?;
        not_null("to", to)?;
        // SAFETY: not null, and the caller keeps the rest of the contract of `fmha_download`.
        let buffer = unsafe { &*buffer };
        let bytes = fitting(bytes, &buffer.memory)?;
        buffer.device.default_stream().synchronize()?;
        // SAFETY: not null, and the caller keeps the rest of the contract of `fmha_download`.
        let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
        buffer.device.memory().download(&buffer.memory, to)
    })
}

/// The size of a copy of `bytes` bytes, if the buffer is at least that large.
fn fitting(bytes: u64, memory: &DevBuffer) -> Result<usize> {
    let has = memory.bytes();
    let refused = || ProblemError::new("bytes", format!("bytes {bytes} is more than the buffer's {has}"));
    usize::try_from(bytes).ok().filter(|_| bytes <= has).ok_or_else(|| refused().into())
}

/// Frees a buffer that no work uses any more. A null pointer is ignored.
///
/// # Safety
/// `buffer` is null or from `fmha_buffer`, and not dropped before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_drop_buffer(buffer: *mut FmhaBuffer) {
    guard(|| {
        if !buffer.is_null() {
            // SAFETY: the caller promised that it is ours, once.
            drop(unsafe { Box::from_raw(buffer) });
        }
        Ok(())
    });
}

/// Text of the last error on this thread; valid until the next call that fails.
#[unsafe(no_mangle)]
pub extern "C" fn fmha_last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
