//! Modules, libraries and functions.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use sha2::{Digest, Sha256};

use crate::error::{
    FILE_NOT_FOUND, INVALID_HANDLE, INVALID_PTX, INVALID_VALUE, NO_BINARY_FOR_GPU, NOT_FOUND, Result,
    SUCCESS, put,
};
use crate::state::{Function, Handle, State, state};

/// Bytes of an ELF image, from its headers.
unsafe fn elf_bytes(image: *const u8) -> usize {
    let u64_at = |at: usize| {
        // SAFETY: `at` lies in the 64-byte ELF header, which the magic number has announced.
        u64::from_le_bytes(unsafe { image.add(at).cast::<[u8; 8]>().read_unaligned() }) as usize
    };
    let u16_at = |at: usize| {
        // SAFETY: `at` lies in the 64-byte ELF header, which the magic number has announced.
        usize::from(u16::from_le_bytes(unsafe { image.add(at).cast::<[u8; 2]>().read_unaligned() }))
    };
    // Section headers come last in a cubin, program headers after them where there are any.
    let sections = u64_at(40) + u16_at(58) * u16_at(60);
    let programs = u64_at(32) + u16_at(54) * u16_at(56);
    sections.max(programs)
}

/// The PTX text behind an image: itself, or the file named by the cubin's hash.
unsafe fn ptx_of(image: *const u8) -> std::result::Result<String, Result> {
    // SAFETY: the caller passes a module image, which has at least four bytes.
    let magic = unsafe { image.cast::<[u8; 4]>().read_unaligned() };
    if magic != *b"\x7fELF" {
        // SAFETY: an image that is no ELF file is zero-terminated PTX text.
        let text = unsafe { CStr::from_ptr(image.cast()) };
        return Ok(text.to_string_lossy().into_owned());
    }
    // SAFETY: the image is a whole ELF file, so the bytes that its headers span are there.
    let bytes = unsafe { std::slice::from_raw_parts(image, elf_bytes(image)) };
    let hash: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    let Some(folder) = std::env::var_os("FMHA_EMULATE_PTX_DIR") else {
        eprintln!("emulated driver: a cubin ({hash}) was loaded, and FMHA_EMULATE_PTX_DIR is not set");
        return Err(NO_BINARY_FOR_GPU);
    };
    let path = std::path::Path::new(&folder).join(format!("{hash}.ptx"));
    std::fs::read_to_string(&path).map_err(|e| {
        eprintln!("emulated driver: no PTX beside the cubin: {}: {e}", path.display());
        NO_BINARY_FOR_GPU
    })
}

/// Whether a module for `target` runs on this device.
fn target_fits(state: &State, target: &str) -> bool {
    let name = target.split(',').next().unwrap_or("").trim().trim_start_matches("sm_");
    let digits = name.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: i32 = digits.parse().unwrap_or(i32::MAX);
    let device = state.arch.major * 10 + state.arch.minor;
    match &name[digits.len()..] {
        "a" => number == device,
        "f" => number / 10 == device / 10 && number <= device,
        _ => number <= device,
    }
}

unsafe fn load(out: *mut Handle, image: *const c_void) -> Result {
    if image.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, and the caller promised a module image.
    let text = match unsafe { ptx_of(image.cast()) } {
        Ok(text) => text,
        Err(code) => return code,
    };
    let mut s = state();
    let module = match s.device.load(&text) {
        Ok(module) => module,
        Err(fault) => {
            s.report("module", &fault);
            return INVALID_PTX;
        }
    };
    if !target_fits(&s, module.target()) {
        eprintln!("emulated driver: a module for {} on a device of sm_{}", module.target(), s.arch_name);
        return NO_BINARY_FOR_GPU;
    }
    let handle = s.handle();
    s.modules.insert(handle, module);
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, handle) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleLoadData(out: *mut Handle, image: *const c_void) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { load(out, image) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleLoadDataEx(
    out: *mut Handle,
    image: *const c_void,
    _count: c_uint,
    _options: *mut c_uint,
    _values: *mut *mut c_void,
) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { load(out, image) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleLoad(out: *mut Handle, path: *const c_char) -> Result {
    if path.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, and the caller promised a zero-terminated path.
    let path = unsafe { CStr::from_ptr(path) }.to_string_lossy().into_owned();
    let Ok(mut bytes) = std::fs::read(path) else { return FILE_NOT_FOUND };
    bytes.push(0);
    // SAFETY: the bytes are a whole file, zero-terminated.
    unsafe { load(out, bytes.as_ptr().cast()) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleUnload(module: Handle) -> Result {
    let mut s = state();
    s.function_names.retain(|(m, _), _| *m != module);
    if s.modules.remove(&module).is_some() { SUCCESS } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleGetFunction(
    out: *mut Handle,
    module: Handle,
    name: *const c_char,
) -> Result {
    if name.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, and the caller promised a zero-terminated name.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let mut s = state();
    let Some(found) = s.modules.get(&module) else { return INVALID_HANDLE };
    let Some(kernel) = found.kernel(&name).cloned() else { return NOT_FOUND };
    let key = (module, name);
    let handle = if let Some(&handle) = s.function_names.get(&key) {
        handle
    } else {
        let handle = s.handle();
        let max_dynamic_shared = 49152 - kernel.static_shared() as i32;
        s.functions.insert(handle, Function { kernel, max_dynamic_shared, non_portable_cluster: false });
        s.function_names.insert(key, handle);
        handle
    };
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, handle) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleGetGlobal_v2(
    out: *mut u64,
    bytes: *mut usize,
    module: Handle,
    name: *const c_char,
) -> Result {
    if name.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null, and the caller promised a zero-terminated name.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let s = state();
    let Some(found) = s.modules.get(&module) else { return INVALID_HANDLE };
    let Some((address, size)) = found.global(&name) else { return NOT_FOUND };
    // SAFETY: output parameters of the driver API; either may be null.
    unsafe {
        put(out, address);
        put(bytes, size as usize);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub(crate) unsafe extern "C" fn cuLibraryLoadData(
    out: *mut Handle,
    image: *const c_void,
    _jit: *mut c_uint,
    _jit_values: *mut *mut c_void,
    _jit_count: c_uint,
    _options: *mut c_uint,
    _values: *mut *mut c_void,
    _count: c_uint,
) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { load(out, image) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuLibraryUnload(library: Handle) -> Result {
    cuModuleUnload(library)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLibraryGetKernel(
    out: *mut Handle,
    library: Handle,
    name: *const c_char,
) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { cuModuleGetFunction(out, library, name) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLibraryGetModule(out: *mut Handle, library: Handle) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, library) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuKernelGetFunction(out: *mut Handle, kernel: Handle) -> Result {
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, kernel) }
}

/// `CUfunction_attribute` by number.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFuncGetAttribute(
    out: *mut c_int,
    attribute: c_uint,
    function: Handle,
) -> Result {
    let s = state();
    let Some(f) = s.functions.get(&function) else { return INVALID_HANDLE };
    let value = match attribute {
        0 => f.kernel.max_threads() as c_int,
        1 => f.kernel.static_shared() as c_int,
        3 => f.kernel.local_bytes() as c_int,
        4 => f.kernel.registers() as c_int,
        5 | 6 => s.arch.major * 10 + s.arch.minor,
        8 => f.max_dynamic_shared,
        9 => -1,
        10 => c_int::from(f.kernel.required_cluster().is_some()),
        11..=13 => f.kernel.required_cluster().map_or(0, |c| c[attribute as usize - 11] as c_int),
        14 => c_int::from(f.non_portable_cluster),
        _ => 0,
    };
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, value) }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFuncSetAttribute(function: Handle, attribute: c_uint, value: c_int) -> Result {
    let mut s = state();
    let optin = s.arch.shared_optin;
    let Some(f) = s.functions.get_mut(&function) else { return INVALID_HANDLE };
    match attribute {
        8 if value < 0 || value + f.kernel.static_shared() as c_int > optin => {
            eprintln!(
                "emulated driver: {value} dynamic and {} static bytes of shared memory for `{}`, at most {optin}",
                f.kernel.static_shared(),
                f.kernel.name()
            );
            INVALID_VALUE
        }
        8 => {
            f.max_dynamic_shared = value;
            SUCCESS
        }
        9 => SUCCESS,
        14 => {
            f.non_portable_cluster = value != 0;
            SUCCESS
        }
        _ => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFuncSetCacheConfig(_function: Handle, _config: c_uint) -> Result {
    SUCCESS
}
