//! Emulated devices and their properties.

use std::ffi::{c_char, c_int, c_uint, c_void};

use fmha_emu_cdna::{Arch, Device};

use crate::runtime::{current_index, devices, put, set_current};
use crate::status::{Call, Status, report};

/// Bytes of memory that a device reports: MI300X's 192 GiB.
pub(crate) const TOTAL_MEMORY: usize = 192 << 30;
/// `sizeof(hipDeviceProp_tR0600)`.
const PROPERTIES_BYTES: usize = 1472;
const RUNTIME_VERSION: c_int = 60_443_483;

/// Offsets in `hipDeviceProp_tR0600`, held against another project's bindings by a test.
mod offset {
    pub(super) const NAME: usize = 0;
    pub(super) const TOTAL_GLOBAL_MEM: usize = 288;
    pub(super) const SHARED_MEM_PER_BLOCK: usize = 296;
    pub(super) const REGS_PER_BLOCK: usize = 304;
    pub(super) const WARP_SIZE: usize = 308;
    pub(super) const MAX_THREADS_PER_BLOCK: usize = 320;
    pub(super) const MAX_THREADS_DIM: usize = 324;
    pub(super) const MAX_GRID_SIZE: usize = 336;
    pub(super) const CLOCK_RATE: usize = 348;
    pub(super) const MAJOR: usize = 360;
    pub(super) const MINOR: usize = 364;
    pub(super) const MULTI_PROCESSOR_COUNT: usize = 388;
    pub(super) const MEMORY_BUS_WIDTH: usize = 612;
    pub(super) const L2_CACHE_SIZE: usize = 616;
    pub(super) const MAX_THREADS_PER_MULTI_PROCESSOR: usize = 624;
    pub(super) const SHARED_MEM_PER_MULTIPROCESSOR: usize = 640;
    pub(super) const GCN_ARCH_NAME: usize = 1160;
}

/// Compute units, clock in kHz, memory bus in bits, L2 in bytes: of MI250X (one die), MI300X, MI355X, RX 7900
/// XTX and RX 9070 XT.
fn numbers(arch: Arch) -> (c_int, c_int, c_int, c_int) {
    match arch {
        Arch::Gfx90a => (110, 1_700_000, 4096, 8 << 20),
        Arch::Gfx942 => (304, 2_100_000, 8192, 4 << 20),
        Arch::Gfx950 => (256, 2_400_000, 8192, 4 << 20),
        // HIP counts pairs of compute units here.
        Arch::Gfx1100 => (48, 2_500_000, 384, 6 << 20),
        Arch::Gfx1201 => (32, 2_970_000, 256, 8 << 20),
    }
}

/// Compute units, as HIP counts them.
pub(crate) fn units(arch: Arch) -> u64 {
    u64::from(numbers(arch).0.unsigned_abs())
}

fn name(arch: Arch) -> String {
    format!("fmha emulator ({arch})")
}

/// Architecture as a driver spells it, features included.
fn gcn_arch_name(arch: Arch) -> String {
    if arch.is_rdna() { arch.to_string() } else { format!("{arch}:sramecc+:xnack-") }
}

fn version(arch: Arch) -> (c_int, c_int) {
    match arch {
        Arch::Gfx90a => (9, 0),
        Arch::Gfx942 => (9, 4),
        Arch::Gfx950 => (9, 5),
        Arch::Gfx1100 => (11, 0),
        Arch::Gfx1201 => (12, 0),
    }
}

fn device(index: c_int) -> Call<&'static Device> {
    if devices().is_empty() {
        return Err(Status::NO_DEVICE);
    }
    usize::try_from(index).ok().and_then(|i| devices().get(i)).map(|d| &**d).ok_or(Status::INVALID_DEVICE)
}

#[unsafe(no_mangle)]
pub extern "C" fn hipInit(_flags: c_uint) -> Status {
    // Debian's libamdhip64 on a machine without a GPU answers 101 here, and 100 below.
    report(if devices().is_empty() { Err(Status::INVALID_DEVICE) } else { Ok(()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDeviceCount(count: *mut c_int) -> Status {
    let n = devices().len();
    // SAFETY: the caller gives a place for the number or null.
    let stored = unsafe { put(count, n as c_int) };
    report(stored.and(if n == 0 { Err(Status::NO_DEVICE) } else { Ok(()) }))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipSetDevice(index: c_int) -> Status {
    report(device(index).and_then(|_| set_current(index as usize)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDevice(index: *mut c_int) -> Status {
    // SAFETY: the caller gives a place for the number or null.
    report(device(0).and_then(|_| unsafe { put(index, current_index() as c_int) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGet(handle: *mut c_int, index: c_int) -> Status {
    // SAFETY: the caller gives a place for the number or null.
    report(device(index).and_then(|_| unsafe { put(handle, index) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetName(text: *mut c_char, bytes: c_int, index: c_int) -> Status {
    report(device(index).and_then(|d| {
        if text.is_null() || bytes <= 0 {
            return Err(Status::INVALID_VALUE);
        }
        let name = name(d.arch);
        let count = name.len().min(bytes as usize - 1);
        // SAFETY: the caller gives room for `bytes` bytes; `count` and the zero fit.
        unsafe {
            text.copy_from_nonoverlapping(name.as_ptr().cast(), count);
            text.add(count).write(0);
        }
        Ok(())
    }))
}

/// The properties as they lie in memory.
fn properties(arch: Arch) -> [u8; PROPERTIES_BYTES] {
    let mut bytes = [0u8; PROPERTIES_BYTES];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    let (units, clock, bus, l2) = numbers(arch);
    let (major, minor) = version(arch);
    let lds = arch.lds_bytes() as usize;
    put(offset::NAME, name(arch).as_bytes());
    put(offset::TOTAL_GLOBAL_MEM, &TOTAL_MEMORY.to_le_bytes());
    put(offset::SHARED_MEM_PER_BLOCK, &lds.to_le_bytes());
    put(offset::REGS_PER_BLOCK, &65536i32.to_le_bytes());
    put(offset::WARP_SIZE, &arch.wave_lanes().to_le_bytes());
    put(offset::MAX_THREADS_PER_BLOCK, &1024i32.to_le_bytes());
    for axis in 0..3 {
        put(offset::MAX_THREADS_DIM + 4 * axis, &1024i32.to_le_bytes());
        let grid = if axis == 0 { i32::MAX } else { 65535 };
        put(offset::MAX_GRID_SIZE + 4 * axis, &grid.to_le_bytes());
    }
    put(offset::CLOCK_RATE, &clock.to_le_bytes());
    put(offset::MAJOR, &major.to_le_bytes());
    put(offset::MINOR, &minor.to_le_bytes());
    put(offset::MULTI_PROCESSOR_COUNT, &units.to_le_bytes());
    put(offset::MEMORY_BUS_WIDTH, &bus.to_le_bytes());
    put(offset::L2_CACHE_SIZE, &l2.to_le_bytes());
    put(offset::MAX_THREADS_PER_MULTI_PROCESSOR, &2048i32.to_le_bytes());
    put(offset::SHARED_MEM_PER_MULTIPROCESSOR, &lds.to_le_bytes());
    put(offset::GCN_ARCH_NAME, gcn_arch_name(arch).as_bytes());
    bytes
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDevicePropertiesR0600(to: *mut c_void, index: c_int) -> Status {
    // SAFETY: the caller gives room for a hipDeviceProp_tR0600, or null.
    report(device(index).and_then(|d| unsafe { put(to.cast(), properties(d.arch)) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, index: c_int) -> Status {
    report(device(index).and_then(|d| {
        let (units, clock, bus, l2) = numbers(d.arch);
        let (major, minor) = version(d.arch);
        let lds = d.arch.lds_bytes() as c_int;
        let answer = match attribute {
            5 => clock,
            19 => l2,
            23 => major,
            26..=28 | 56 => 1024,
            29 => c_int::MAX,
            30 | 31 => 65535,
            57 => 2048,
            59 => bus,
            61 => minor,
            63 => units,
            74..=76 => lds,
            87 => d.arch.wave_lanes() as c_int,
            10 | 16 | 24 | 67..=69 => 0,
            88 => 1,
            _ => return Err(Status::INVALID_VALUE),
        };
        // SAFETY: the caller gives a place for the value or null.
        unsafe { put(value, answer) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipRuntimeGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller gives a place for the number or null.
    report(unsafe { put(version, RUNTIME_VERSION) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDriverGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller gives a place for the number or null.
    report(unsafe { put(version, RUNTIME_VERSION) })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipDeviceReset() -> Status {
    report(device(0).map(|_| ()))
}
