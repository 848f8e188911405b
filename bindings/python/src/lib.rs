//! `fmha` for Python: one shared library for every Python and every torch.
//!
//! There is no C++ here, no link to torch and none to Python. [`torch`] finds PyTorch's stable C interface in the
//! process and registers operators; [`xla`] has handlers that JAX registers; NumPy's and DLPack's tensors come through
//! `ctypes` ([`fmha_py_run`]). Each makes a [`request::Request`], which [`call`] converts to the C library's structs;
//! [`plans`] keeps plans by the numbers of their calls.

mod cache;
pub mod call;
pub mod choose;
mod code;
pub mod combine;
pub mod index_loss;
mod lasting;
pub mod lists;
mod masks;
mod objects;
mod operands;
pub mod plans;
pub mod quantize;
#[cfg(test)]
mod reach;
pub mod request;
mod scales;
mod shapes;
pub mod tensor;
pub mod torch;
pub mod xla;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use fmha_core::expr::{Capture, CaptureKind, Function, Number, Type};
use request::{NUMBERS, OPTIONS, Request, SLOT_NAMES};

thread_local! {
    static TEXT: RefCell<CString> = RefCell::default();
}

fn keep(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    TEXT.with(|kept| *kept.borrow_mut() = text);
}

/// Calls `body` with the text that is stored for this thread.
fn with_text<R>(body: impl FnOnce(&CStr) -> R) -> R {
    TEXT.with(|text| body(&text.borrow()))
}

/// Returns 0, or 1 after storing the error's text for this thread.
fn guard(body: impl FnOnce() -> Result<(), String>) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return 0,
        Ok(Err(text)) => keep(&text),
        Err(_) => keep("internal error: a panic was caught at Python's boundary"),
    }
    1
}

/// Text that the last call on this thread stored: an error, or the text that the call asked for.
#[unsafe(no_mangle)]
pub extern "C" fn fmha_py_text() -> *const c_char {
    TEXT.with(|text| text.borrow().as_ptr())
}

/// Describes a request, so that Python's `ctypes` need not repeat it: the text of [`fmha_py_text`] has the
/// names of its tensors, those of its numbers with their types, and those of its options' bits, one a line.
/// Returns the text's bytes.
#[unsafe(no_mangle)]
pub extern "C" fn fmha_py_describe() -> usize {
    let numbers: Vec<String> = NUMBERS.iter().map(|(name, spelt)| format!("{name}:{spelt}")).collect();
    keep(&[SLOT_NAMES.join(" "), numbers.join(" "), OPTIONS.join(" ")].join("\n"));
    size_of::<Request>()
}

/// Runs a request on tensors in host memory, or with a workspace that is allocated for it.
///
/// # Safety
/// `request` is null or a request whose tensors are memory of their device as large as they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_run(request: *const Request) -> c_int {
    guard(|| {
        // SAFETY: the caller promises that `request` is null or a request whose tensors are memory of their device as
        // large as they say.
        let request = unsafe { request.as_ref() }.ok_or("request is null")?;
        let device = plans::device(request)?;
        if device.kind != 0 {
            return Err(format!(
                "the tensors are on {}, but this door takes host memory alone: torch's operators take them",
                device.name()
            ));
        }
        plans::run(request, host_scratch)
    })
}

/// Plans a request on the device of its tensors, and writes to `bytes` how many bytes of scratch its run needs.
///
/// # Safety
/// As [`fmha_py_run`]; no tensor is read. `bytes` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_workspace(request: *const Request, bytes: *mut u64) -> c_int {
    guard(|| {
        // SAFETY: the caller promises that pointers are null or valid for this call.
        let (request, bytes) = unsafe { (request.as_ref(), bytes.as_mut()) };
        *bytes.ok_or("bytes is null")? = plans::workspace_bytes(request.ok_or("request is null")?)?;
        Ok(())
    })
}

/// Runs a request on tensors of any device, with scratch there: at least the bytes that [`fmha_py_workspace`] says.
///
/// # Safety
/// As [`fmha_py_run`]; `workspace` is so many bytes of the tensors' device, aligned to 256, which nobody else
/// uses until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_run_with(request: *const Request, workspace: *mut u8, bytes: u64) -> c_int {
    guard(|| {
        // SAFETY: the caller promises that pointers are null or valid for this call.
        let request = unsafe { request.as_ref() }.ok_or("request is null")?;
        plans::run(request, |wanted| match wanted <= bytes {
            true => Ok(((), workspace)),
            false => Err(format!("workspace has {bytes} bytes, but {wanted} are wanted")),
        })
    })
}

/// Scratch for a run in host memory, and the address of its first aligned byte.
fn host_scratch(bytes: u64) -> Result<(Vec<u8>, *mut u8), String> {
    let wanted = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_add(plans::ALIGNMENT));
    let wanted =
        wanted.ok_or_else(|| format!("workspace of {bytes} bytes: more than there are addresses"))?;
    let mut scratch = Vec::<u8>::new();
    scratch.try_reserve_exact(wanted).map_err(|error| format!("workspace of {bytes} bytes: {error}"))?;
    let start = scratch.as_mut_ptr();
    let start = start.wrapping_add(start.align_offset(plans::ALIGNMENT));
    Ok((scratch, start))
}

/// Checks a request without planning it, and reports the errors that every device reports: for a compiler, which knows
/// shapes before it has memory. Where `operator` is not null the request has the arguments of torch's operator of that
/// name, whose results are described here.
///
/// # Safety
/// As [`fmha_py_run`]; no tensor is read. `operator` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_check(request: *const Request, operator: *const c_char) -> c_int {
    guard(|| {
        // SAFETY: the caller keeps the contract of `fmha_py_check`.
        let request = unsafe { request.as_ref() }.ok_or("request is null")?;
        if operator.is_null() {
            return plans::check(request);
        }
        // SAFETY: the caller keeps the contract of `fmha_py_check`.
        torch::check(&unsafe { CStr::from_ptr(operator) }.to_string_lossy(), *request)
    })
}

/// Keeps a request's numbers for the process and returns the number that stands for them, which some operators take
/// instead; -1 where there is no room.
///
/// # Safety
/// `request` is null or a request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_keep(request: *const Request) -> i64 {
    // SAFETY: the caller promises that `request` is null or a request.
    unsafe { request.as_ref() }.and_then(|request| request::keep(request.numbers)).unwrap_or(-1)
}

/// Plans a request: [`fmha_py_text`] then returns the plan's description.
///
/// # Safety
/// As [`fmha_py_run`]; nothing of a device is read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_explain(request: *const Request) -> c_int {
    guard(|| {
        // SAFETY: the caller keeps the contract of `fmha_py_explain`.
        let request = unsafe { request.as_ref() }.ok_or("request is null")?;
        keep(&plans::explain(request)?);
        Ok(())
    })
}

/// Reads the text of a score or a mask: [`fmha_py_text`] then returns the function's own text, which declares only
/// captures that it reads. If 1 is returned, it is the error instead: the argument's `name`, and the wrong word with
/// its column. A mask is a bool, a score is none.
///
/// # Safety
/// Both texts are null or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_function(
    name: *const c_char,
    text: *const c_char,
    wants_mask: c_int,
) -> c_int {
    guard(|| {
        if name.is_null() || text.is_null() {
            return Err("text is null".to_owned());
        }
        // SAFETY: the pointers are not null, and the caller promises that they are C strings.
        let (name, text) = unsafe { (CStr::from_ptr(name).to_string_lossy(), CStr::from_ptr(text)) };
        let text = text.to_str().map_err(|_| format!("{name}: the text is not UTF-8"))?;
        let function: Function = text.parse().map_err(|error| format!("{name}: {error}"))?;
        if function.is_mask() != (wants_mask != 0) {
            let is = if function.is_mask() { "a bool: it is a mask" } else { "a number, not a bool" };
            return Err(format!("{name}: `{function}` is {is}"));
        }
        keep(&function.to_string());
        Ok(())
    })
}

/// The text of a score or a mask with those captured numbers as constants that a part of it needs which kernels have
/// built in, a band, a scale or a soft-cap: what [`fmha_py_text`] has, and the text as it was where there is none.
/// `names` of numbers are separated by commas, and `values` are as many.
///
/// # Safety
/// Both texts are null or C strings, and there are as many values as names.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_built_in(
    text: *const c_char,
    names: *const c_char,
    values: *const f64,
) -> c_int {
    guard(|| {
        if text.is_null() || names.is_null() || values.is_null() {
            return Err("text is null".to_owned());
        }
        // SAFETY: the pointers are not null, and the caller promises that they are C strings.
        let (text, names) = unsafe { (CStr::from_ptr(text), CStr::from_ptr(names)) };
        let (text, names) = (text.to_string_lossy(), names.to_string_lossy());
        let function: Function = text.parse().map_err(|error| format!("{error}"))?;
        let number = |capture: &Capture| {
            let at = names.split(',').position(|name| name == capture.name)?;
            // SAFETY: the caller promised as many values as names.
            let value = unsafe { *values.add(at) };
            match capture.kind {
                CaptureKind::Number(Type::Float) => Some(Number::Float(value as f32)),
                CaptureKind::Number(_) => Some(Number::Int(value as i64)),
                CaptureKind::Tensor { .. } => None,
            }
        };
        let numbers: Vec<_> = function.captures().iter().map(number).collect();
        let found = function.with_built_in(&numbers).map_err(|error| error.to_string())?;
        keep(&found.map_or(text.into_owned(), |found| found.to_string()));
        Ok(())
    })
}

/// Makes a mask object for the masks of a forward call, and of a backward one unless `backward` is null: `number` is
/// its own. Calls whose masks are the very tensors use it once it is built.
///
/// # Safety
/// Both are null or requests, as for [`fmha_py_explain`]; `number` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_mask_object(
    forward: *const Request,
    backward: *const Request,
    number: *mut i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller promises that pointers are null or valid for this call.
        let (forward, backward, number) = unsafe { (forward.as_ref(), backward.as_ref(), number.as_mut()) };
        let made = objects::make(forward.ok_or("request is null")?, backward)?;
        *number.ok_or("number is null")? = made;
        Ok(())
    })
}

/// Queues the building of a mask object on the request's stream, from the tensors of the forward call.
///
/// # Safety
/// `request` is null or a request whose lengths and masks are memory of their device as large as they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_build_mask(number: i64, request: *const Request) -> c_int {
    guard(|| {
        // SAFETY: the caller promises that pointers are null or valid for this call.
        let request = unsafe { request.as_ref() }.ok_or("request is null")?;
        objects::build(number, request)
    })
}

/// Forgets a mask object.
#[unsafe(no_mangle)]
pub extern "C" fn fmha_py_drop_mask_object(number: i64) {
    guard(|| {
        objects::forget(number);
        Ok(())
    });
}

/// Describes a choice of keys, so that Python's `ctypes` need not repeat it: the text of [`fmha_py_text`] has the names
/// of its numbers, and those of its addresses, one a line. A kernel's name and a stream come after them. Returns the
/// choice's bytes.
#[unsafe(no_mangle)]
pub extern "C" fn fmha_py_describe_choose() -> usize {
    keep(&choose::NAMES.join("\n"));
    size_of::<choose::Choose>()
}

/// Plans an indexer's loss on the device of a kind and an index, and says how many bytes of scratch its run wants.
///
/// # Safety
/// `call` is null or a call, no tensor of which is read; `bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_workspace_index_loss(
    call: *const fmha_c::FmhaIndexLoss,
    kind: c_int,
    index: c_int,
    bytes: *mut u64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise.
        let (call, bytes) = unsafe { (call.as_ref(), bytes.as_mut()) };
        let call = call.ok_or("call is null")?;
        *bytes.ok_or("bytes is null")? = index_loss::workspace_bytes(call, (kind, index))?;
        Ok(())
    })
}

/// Computes an indexer's loss and its gradients, or queues that on a GPU's stream.
///
/// # Safety
/// As [`fmha_py_workspace_index_loss`]; addresses are null or memory of the device as large as the numbers say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_index_loss(
    call: *const fmha_c::FmhaIndexLoss,
    kind: c_int,
    index: c_int,
) -> c_int {
    guard(|| {
        // SAFETY: the caller promises that pointers are null or valid for this call.
        let call = unsafe { call.as_ref() }.ok_or("call is null")?;
        // SAFETY: the caller's promise.
        unsafe { index_loss::run(call, (kind, index)) }
    })
}

/// Plans a choice of keys, and writes to `bytes` how many bytes of scratch its run needs.
///
/// # Safety
/// `call` is null or a choice, whose kernel is null or a C string; no tensor is read. `bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_workspace_choose(call: *const choose::Choose, bytes: *mut u64) -> c_int {
    guard(|| {
        // SAFETY: the caller promises that pointers are null or valid for this call.
        let (call, bytes) = unsafe { (call.as_ref(), bytes.as_mut()) };
        // SAFETY: the caller promises that pointers are null or valid for this call.
        *bytes.ok_or("bytes is null")? = unsafe { choose::workspace_bytes(call.ok_or("call is null")?)? };
        Ok(())
    })
}

/// Runs a choice of keys with scratch of its device: at least the bytes that [`fmha_py_workspace_choose`] says.
///
/// # Safety
/// As [`fmha_py_workspace_choose`]; addresses are null or memory of the device as large as the numbers say;
/// `workspace` is so many bytes there, aligned to 256, which nobody else uses until the work is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_run_choose(
    call: *const choose::Choose,
    workspace: *mut u8,
    bytes: u64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller promises that pointers are null or valid for this call.
        let call = unsafe { call.as_ref() }.ok_or("call is null")?;
        // SAFETY: the caller promises that pointers are null or valid for this call.
        unsafe { choose::run(call, workspace, bytes) }
    })
}

/// Describes a conversion to a format with scales by blocks, as [`fmha_py_describe_choose`] does a choice. A stream
/// comes after the addresses. Returns the conversion's bytes.
#[unsafe(no_mangle)]
pub extern "C" fn fmha_py_describe_quantize() -> usize {
    keep(&quantize::NAMES.join("\n"));
    size_of::<quantize::Quantize>()
}

/// Plans a conversion, and writes to `bytes` how many bytes of scratch its run needs.
///
/// # Safety
/// `call` is null or a conversion; no tensor is read. `bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_workspace_quantize(
    call: *const quantize::Quantize,
    bytes: *mut u64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller promises that pointers are null or valid for this call.
        let (call, bytes) = unsafe { (call.as_ref(), bytes.as_mut()) };
        *bytes.ok_or("bytes is null")? = quantize::workspace_bytes(call.ok_or("call is null")?)?;
        Ok(())
    })
}

/// Runs a conversion with scratch of its device: at least the bytes that [`fmha_py_workspace_quantize`] says.
///
/// # Safety
/// As [`fmha_py_run_choose`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_py_run_quantize(
    call: *const quantize::Quantize,
    workspace: *mut u8,
    bytes: u64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller promises that pointers are null or valid for this call.
        let call = unsafe { call.as_ref() }.ok_or("call is null")?;
        // SAFETY: the caller promises that pointers are null or valid for this call.
        unsafe { quantize::run(call, workspace, bytes) }
    })
}

/// Registers the operators with the torch that the process has imported.
#[unsafe(no_mangle)]
pub extern "C" fn fmha_py_register_torch() -> c_int {
    guard(torch::register)
}

/// Lists the devices, and for each absent one the reason, one a line: the text of [`fmha_py_text`].
#[unsafe(no_mangle)]
pub extern "C" fn fmha_py_devices() -> c_int {
    guard(|| {
        let lines: Vec<String> = fmha::devices().iter().map(line).collect();
        keep(&lines.join("\n"));
        Ok(())
    })
}

/// Description of a device, one line.
fn line(found: &fmha::Found) -> String {
    match &found.device {
        Ok(device) => format!("{}: {}", found.backend, device.name()),
        Err(reason) => format!("{}: absent: {reason}", found.backend),
    }
}
