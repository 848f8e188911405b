//! Occupancy, from shared memory, threads and registers.

use std::ffi::{c_int, c_uint, c_void};

use crate::error::{INVALID_HANDLE, Result, SUCCESS, put};
use crate::launch::Config;
use crate::state::{Handle, state};

fn blocks_per_sm(function: Handle, threads: u32, dynamic: usize) -> Option<i32> {
    let s = state();
    let f = s.functions.get(&function)?;
    if threads == 0 || threads > f.kernel.max_threads() {
        return Some(0);
    }
    let warps = threads.div_ceil(32);
    let most_threads = if s.arch.major == 12 { 1536 } else { 2048 };
    let shared = f.kernel.static_shared() as usize + dynamic + 1024;
    let by_shared = (s.arch.shared_optin as usize + 1024) / shared;
    let by_registers = 65536 / (f.kernel.registers() * warps * 32).max(1);
    let by_threads = most_threads / (warps * 32);
    Some(by_threads.min(by_registers).min(by_shared as u32).min(32) as i32)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    out: *mut c_int,
    function: Handle,
    threads: c_int,
    dynamic: usize,
) -> Result {
    match blocks_per_sm(function, threads as u32, dynamic) {
        // SAFETY: an output parameter of the driver API.
        Some(n) => unsafe { put(out, n) },
        None => INVALID_HANDLE,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    out: *mut c_int,
    function: Handle,
    threads: c_int,
    dynamic: usize,
    _flags: c_uint,
) -> Result {
    // SAFETY: handed on unchanged.
    unsafe { cuOccupancyMaxActiveBlocksPerMultiprocessor(out, function, threads, dynamic) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuOccupancyAvailableDynamicSMemPerBlock(
    out: *mut usize,
    _function: Handle,
    blocks: c_int,
    _threads: c_int,
) -> Result {
    let optin = state().arch.shared_optin as usize + 1024;
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, (optin / blocks.max(1) as usize).saturating_sub(1024)) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuOccupancyMaxActiveClusters(
    out: *mut c_int,
    function: Handle,
    config: *const Config,
) -> Result {
    if config.is_null() {
        return crate::error::INVALID_VALUE;
    }
    // SAFETY: not null, and the caller promised a CUlaunchConfig.
    let (threads, dynamic, cluster) = unsafe { (*config).shape(function) };
    let Some(n) = blocks_per_sm(function, threads, dynamic) else { return INVALID_HANDLE };
    let all = n * state().arch.num_sms;
    // SAFETY: an output parameter of the driver API.
    unsafe { put(out, all / cluster.max(1) as c_int) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuOccupancyMaxPotentialBlockSize(
    min_grid: *mut c_int,
    block: *mut c_int,
    function: Handle,
    _dynamic_of: *const c_void,
    dynamic: usize,
    limit: c_int,
) -> Result {
    let most = match state().functions.get(&function) {
        Some(f) => f.kernel.max_threads(),
        None => return INVALID_HANDLE,
    };
    let threads = if limit > 0 { most.min(limit as u32) } else { most };
    let n = blocks_per_sm(function, threads, dynamic).unwrap_or(0);
    let sms = state().arch.num_sms;
    // SAFETY: output parameters of the driver API.
    unsafe {
        put(min_grid, n * sms);
        put(block, threads as c_int);
    }
    SUCCESS
}
