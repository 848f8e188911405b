//! Modules, functions and launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use fmha_emu_cdna::{KernelInfo, LoadError};

use crate::graph::Node;
use crate::runtime::{Loaded, current, put, state, submit};
use crate::status::{Call, Status, report};

/// Bytes of an ELF image, from its own headers: HIP takes no length.
///
/// # Safety
/// `image` points to a whole ELF file.
unsafe fn elf_bytes<'i>(image: *const u8) -> Call<&'i [u8]> {
    // SAFETY: an ELF header has 64 bytes.
    let header = unsafe { std::slice::from_raw_parts(image, 64) };
    if header[..4] != *b"\x7fELF" || header[4] != 2 {
        return Err(Status::INVALID_IMAGE);
    }
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
    let half = |at: usize| u64::from(u16::from_le_bytes([header[at], header[at + 1]]));
    // The section headers come last in what linkers write; the segments may reach beyond them.
    let (segments_at, sections_at) = (word(32), word(40));
    let mut end = sections_at + half(58) * half(60);
    for i in 0..half(56) {
        // SAFETY: the program headers are inside the file.
        let segment = unsafe { image.add((segments_at + i * half(54)) as usize) };
        // SAFETY: the program headers are inside the file; offset and file size lie at 8 and 32.
        let (offset, bytes) = unsafe {
            (segment.add(8).cast::<u64>().read_unaligned(), segment.add(32).cast::<u64>().read_unaligned())
        };
        end = end.max(offset + bytes);
    }
    // SAFETY: the caller promised a whole file, which reaches to `end`.
    Ok(unsafe { std::slice::from_raw_parts(image, end as usize) })
}

fn load(bytes: &[u8]) -> Call<usize> {
    let device = current()?;
    let module = device.load(bytes).map_err(|error| {
        eprintln!("emulator: {error}");
        match error {
            LoadError::OtherArch { .. } | LoadError::UnknownArch(_) => Status::NO_BINARY_FOR_GPU,
            _ => Status::INVALID_IMAGE,
        }
    })?;
    let mut state = state();
    let handle = state.handle();
    state.modules.insert(handle, Arc::new(Loaded { device, module }));
    Ok(handle)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleLoadData(module: *mut usize, image: *const c_void) -> Status {
    if image.is_null() {
        return report(Err(Status::INVALID_VALUE));
    }
    // SAFETY: HIP's contract: `image` is a whole code object, `module` a place for the handle.
    report(unsafe { elf_bytes(image.cast()).and_then(load).and_then(|handle| put(module, handle)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleLoadDataEx(
    module: *mut usize,
    image: *const c_void,
    _count: c_uint,
    _options: *mut c_void,
    _values: *mut *mut c_void,
) -> Status {
    // SAFETY: the caller keeps the contract of `hipModuleLoadData`, which this function has too.
    unsafe { hipModuleLoadData(module, image) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleLoad(module: *mut usize, path: *const c_char) -> Status {
    if path.is_null() {
        return report(Err(Status::INVALID_VALUE));
    }
    // SAFETY: HIP's contract: a string that a zero ends.
    let path = unsafe { CStr::from_ptr(path) }.to_string_lossy();
    let loaded = std::fs::read(&*path).map_err(|_| Status::FILE_NOT_FOUND).and_then(|bytes| load(&bytes));
    // SAFETY: the caller gives a place for the handle or null.
    report(loaded.and_then(|handle| unsafe { put(module, handle) }))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipModuleUnload(module: usize) -> Status {
    let mut state = state();
    let removed = state.modules.remove(&module);
    report(removed.ok_or(Status::INVALID_HANDLE).map(|removed| {
        state.functions.retain(|_, (loaded, _)| !Arc::ptr_eq(loaded, &removed));
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleGetFunction(
    function: *mut usize,
    module: usize,
    name: *const c_char,
) -> Status {
    if name.is_null() {
        return report(Err(Status::INVALID_VALUE));
    }
    // SAFETY: HIP's contract: a string that a zero ends.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let mut state = state();
    let Some(loaded) = state.modules.get(&module).cloned() else {
        return report(Err(Status::INVALID_HANDLE));
    };
    if loaded.module.kernel(&name).is_none() {
        return report(Err(Status::NOT_FOUND));
    }
    let handle = state.handle();
    state.functions.insert(handle, (loaded, name));
    // SAFETY: the caller gives a place for the handle or null.
    report(unsafe { put(function, handle) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleGetGlobal(
    address: *mut usize,
    bytes: *mut usize,
    module: usize,
    name: *const c_char,
) -> Status {
    if name.is_null() {
        return report(Err(Status::INVALID_VALUE));
    }
    // SAFETY: HIP's contract: a string that a zero ends.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let loaded = state().modules.get(&module).cloned();
    report(loaded.ok_or(Status::INVALID_HANDLE).and_then(|loaded| {
        let (at, size) = loaded.module.global(&name).ok_or(Status::NOT_FOUND)?;
        // SAFETY: the caller gives places for both; HIP allows null for either.
        unsafe {
            if !address.is_null() {
                address.write(at as usize);
            }
            if !bytes.is_null() {
                bytes.write(size as usize);
            }
        }
        Ok(())
    }))
}

/// The argument bytes, from an array of pointers or from one buffer.
///
/// # Safety
/// As HIP says of `kernelParams` and `extra`.
unsafe fn arguments(info: &KernelInfo, params: *mut *mut c_void, extra: *mut *mut c_void) -> Call<Vec<u8>> {
    const BUFFER_POINTER: usize = 1;
    const BUFFER_SIZE: usize = 2;
    const END: usize = 3;
    if !params.is_null() {
        let mut bytes = Vec::new();
        for (i, arg) in info.args.iter().filter(|a| !a.kind.starts_with("hidden")).enumerate() {
            bytes.resize(arg.offset as usize, 0);
            // SAFETY: the array has a pointer for each explicit argument, each to as many bytes as the argument has.
            let value =
                unsafe { std::slice::from_raw_parts((*params.add(i)).cast::<u8>(), arg.size as usize) };
            bytes.extend_from_slice(value);
        }
        return Ok(bytes);
    }
    if extra.is_null() {
        return Ok(Vec::new());
    }
    let (mut pointer, mut size) = (std::ptr::null::<u8>(), 0usize);
    let mut at = 0;
    loop {
        // SAFETY: key and value pairs up to the end mark.
        let key = unsafe { *extra.add(at) } as usize;
        match key {
            END => break,
            // SAFETY: a value follows each key.
            BUFFER_POINTER => pointer = unsafe { *extra.add(at + 1) }.cast::<u8>(),
            // SAFETY: the value is a pointer to the size.
            BUFFER_SIZE => size = unsafe { *(*extra.add(at + 1)).cast::<usize>() },
            _ => return Err(Status::INVALID_VALUE),
        }
        at += 2;
    }
    if pointer.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: the caller's buffer has that many bytes.
    let mut bytes = unsafe { std::slice::from_raw_parts(pointer, size) }.to_vec();
    // A caller may round the size up.
    bytes.truncate(info.kernarg_bytes as usize);
    Ok(bytes)
}

/// Grid in workgroups, block in work-items.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleLaunchKernel(
    function: usize,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: usize,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Status {
    let found = state().functions.get(&function).cloned();
    let Some((on, name)) = found else { return report(Err(Status::INVALID_HANDLE)) };
    let Some(info) = on.module.kernel(&name) else { return report(Err(Status::NOT_FOUND)) };
    // SAFETY: HIP's contract, passed on.
    let args = match unsafe { arguments(info, params, extra) } {
        Ok(args) => args,
        Err(status) => return report(Err(status)),
    };
    let node = Node::Kernel {
        name,
        grid: [grid_x, grid_y, grid_z],
        block: [block_x, block_y, block_z],
        dynamic_lds: shared_bytes,
        args,
        on,
    };
    report(submit(stream, node))
}

/// Dynamic LDS beyond 64 KiB needs no permission here: the launch checks the device's limit.
#[unsafe(no_mangle)]
pub extern "C" fn hipFuncSetAttribute(function: usize, _attribute: c_int, value: c_int) -> Status {
    let known = state().functions.contains_key(&function);
    report(if known && value >= 0 { Ok(()) } else { Err(Status::INVALID_VALUE) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipFuncGetAttribute(value: *mut c_int, attribute: c_int, function: usize) -> Status {
    let found = state().functions.get(&function).cloned();
    let Some((on, name)) = found else { return report(Err(Status::INVALID_HANDLE)) };
    let Some(info) = on.module.kernel(&name) else { return report(Err(Status::NOT_FOUND)) };
    let answer = match attribute {
        0 => info.max_workgroup_size,
        1 => info.lds_bytes,
        2 => 0,
        3 => info.scratch_bytes,
        4 => info.vgpr_count,
        8 => on.device.arch.lds_bytes() - info.lds_bytes,
        _ => return report(Err(Status::INVALID_VALUE)),
    };
    // SAFETY: the caller gives a place for the value or null.
    report(unsafe { put(value, answer as c_int) })
}

/// Workgroups that a compute unit holds, by registers (512 a lane and SIMD, in eighths), LDS and the limit of eight
/// waves a SIMD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    function: usize,
    block_size: c_int,
    dynamic_bytes: usize,
) -> Status {
    let found = state().functions.get(&function).cloned();
    let Some((on, name)) = found else { return report(Err(Status::INVALID_HANDLE)) };
    let Some(info) = on.module.kernel(&name) else { return report(Err(Status::NOT_FOUND)) };
    if block_size <= 0 {
        return report(Err(Status::INVALID_VALUE));
    }
    let waves_a_simd = (512 / info.vgpr_count.max(1).next_multiple_of(8)).clamp(1, 8);
    let waves = (block_size as u32).div_ceil(64);
    let by_registers = 4 * waves_a_simd / waves;
    let lds = info.lds_bytes as usize + dynamic_bytes;
    let by_lds = (on.device.arch.lds_bytes() as usize).checked_div(lds).map_or(u32::MAX, |n| n as u32);
    // SAFETY: the caller gives a place for the number or null.
    report(unsafe { put(blocks, by_registers.min(by_lds) as c_int) })
}
