//! A test double of AMD's run-time compiler: `libhiprtc.so`, by calling an installed clang.
//!
//! The compiler is `$FMHA_CLANG`, else `clang-22`, `clang-21`, …, `clang`, `/opt/rocm/llvm/bin/clang`. Sources must be
//! freestanding: unlike AMD's hipRTC this one includes no HIP headers.
#![allow(non_snake_case, reason = "the names are hipRTC's")]
#![allow(
    clippy::missing_safety_doc,
    reason = "every function here has hipRTC's own contract: pointers are valid for what its documentation says"
)]
#![allow(missing_docs, unreachable_pub, reason = "exported to C, documented by hipRTC")]

mod compile;

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use compile::Program;

const SUCCESS: c_int = 0;
const INVALID_INPUT: c_int = 3;
const INVALID_PROGRAM: c_int = 4;
const COMPILATION: c_int = 6;
const NAME_EXPRESSION_NOT_VALID: c_int = 10;

#[derive(Default)]
struct Programs {
    next: usize,
    by_handle: HashMap<usize, Program>,
}

fn programs() -> MutexGuard<'static, Programs> {
    static PROGRAMS: LazyLock<Mutex<Programs>> = LazyLock::new(Mutex::default);
    PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// `text` is null or a string that a zero ends.
unsafe fn string(text: *const c_char) -> Option<String> {
    // SAFETY: promised by the caller: `text` is null or a string that a zero ends.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// # Safety
/// `texts` has `count` strings, or `count` is 0.
unsafe fn strings(texts: *const *const c_char, count: c_int) -> Vec<String> {
    // SAFETY: promised by the caller: `texts` has `count` strings, or `count` is 0.
    (0..count.max(0) as usize).filter_map(|i| unsafe { string(*texts.add(i)) }).collect()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    if major.is_null() || minor.is_null() {
        return INVALID_INPUT;
    }
    // SAFETY: both are valid for a write.
    unsafe {
        major.write(7);
        minor.write(0);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn hiprtcGetErrorString(result: c_int) -> *const c_char {
    match result {
        SUCCESS => c"HIPRTC_SUCCESS",
        INVALID_INPUT => c"HIPRTC_ERROR_INVALID_INPUT",
        INVALID_PROGRAM => c"HIPRTC_ERROR_INVALID_PROGRAM",
        COMPILATION => c"HIPRTC_ERROR_COMPILATION",
        NAME_EXPRESSION_NOT_VALID => c"HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
        _ => c"HIPRTC_ERROR_INTERNAL_ERROR",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcCreateProgram(
    program: *mut usize,
    source: *const c_char,
    name: *const c_char,
    header_count: c_int,
    headers: *const *const c_char,
    include_names: *const *const c_char,
) -> c_int {
    // SAFETY: hipRTC's contract on all of them.
    let (source, name, headers, include_names) = unsafe {
        (string(source), string(name), strings(headers, header_count), strings(include_names, header_count))
    };
    let Some(source) = source else { return INVALID_INPUT };
    if program.is_null() || headers.len() != include_names.len() {
        return INVALID_INPUT;
    }
    let new = Program::new(source, name, include_names.into_iter().zip(headers).collect());
    let mut programs = programs();
    programs.next += 16;
    let handle = programs.next;
    programs.by_handle.insert(handle, new);
    // SAFETY: not null, and valid by hipRTC's contract.
    unsafe { program.write(handle) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcDestroyProgram(program: *mut usize) -> c_int {
    if program.is_null() {
        return INVALID_INPUT;
    }
    // SAFETY: not null, and valid by hipRTC's contract.
    let handle = unsafe { program.read() };
    match programs().by_handle.remove(&handle) {
        Some(_) => {
            // SAFETY: not null, and valid by hipRTC's contract.
            unsafe { program.write(0) };
            SUCCESS
        }
        None => INVALID_PROGRAM,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcCompileProgram(
    program: usize,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
    // SAFETY: hipRTC's contract.
    let options = unsafe { strings(options, count) };
    match programs().by_handle.get_mut(&program) {
        Some(program) => {
            if program.compile(&options) {
                SUCCESS
            } else {
                COMPILATION
            }
        }
        None => INVALID_PROGRAM,
    }
}

/// Copies bytes of a program to the caller.
///
/// # Safety
/// `to` has room for what the matching size function said.
unsafe fn give(program: usize, to: *mut c_char, bytes: impl Fn(&Program) -> &[u8]) -> c_int {
    let programs = programs();
    let Some(program) = programs.by_handle.get(&program) else { return INVALID_PROGRAM };
    if to.is_null() {
        return INVALID_INPUT;
    }
    let bytes = bytes(program);
    // SAFETY: the caller promised the room.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()) };
    SUCCESS
}

/// # Safety
/// `to` is null or valid for a write.
unsafe fn size(program: usize, to: *mut usize, bytes: impl Fn(&Program) -> &[u8]) -> c_int {
    let programs = programs();
    let Some(program) = programs.by_handle.get(&program) else { return INVALID_PROGRAM };
    if to.is_null() {
        return INVALID_INPUT;
    }
    // SAFETY: not null, and valid by the caller's promise.
    unsafe { to.write(bytes(program).len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetCodeSize(program: usize, bytes: *mut usize) -> c_int {
    // SAFETY: hipRTC's contract.
    unsafe { size(program, bytes, Program::code) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetCode(program: usize, code: *mut c_char) -> c_int {
    // SAFETY: hipRTC's contract.
    unsafe { give(program, code, Program::code) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetProgramLogSize(program: usize, bytes: *mut usize) -> c_int {
    // SAFETY: hipRTC's contract.
    unsafe { size(program, bytes, Program::log) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetProgramLog(program: usize, log: *mut c_char) -> c_int {
    // SAFETY: hipRTC's contract.
    unsafe { give(program, log, Program::log) }
}

/// Kernels are `extern "C"`: a name is its own lowered name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcAddNameExpression(program: usize, expression: *const c_char) -> c_int {
    // SAFETY: hipRTC's contract.
    let Some(expression) = (unsafe { string(expression) }) else { return INVALID_INPUT };
    match (programs().by_handle.get_mut(&program), CString::new(expression)) {
        (Some(program), Ok(expression)) => {
            program.names.push(expression);
            SUCCESS
        }
        (None, _) => INVALID_PROGRAM,
        (_, Err(_)) => INVALID_INPUT,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetLoweredName(
    program: usize,
    expression: *const c_char,
    lowered: *mut *const c_char,
) -> c_int {
    // SAFETY: hipRTC's contract.
    let Some(expression) = (unsafe { string(expression) }) else { return INVALID_INPUT };
    let programs = programs();
    let Some(program) = programs.by_handle.get(&program) else { return INVALID_PROGRAM };
    let found = program.names.iter().find(|name| name.to_str() == Ok(&expression));
    match (found, lowered.is_null()) {
        (Some(name), false) => {
            // SAFETY: not null, and valid by hipRTC's contract; the name lives as long as the program.
            unsafe { lowered.write(name.as_ptr()) };
            SUCCESS
        }
        _ => NAME_EXPRESSION_NOT_VALID,
    }
}
