//! Counters of the launches that the double carried out.

use std::collections::VecDeque;
use std::ffi::c_char;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use fmha_emu_cdna::{Checks, Class, Counters, Launch, Options, Recording};

use crate::launches::{self, Launches};

/// Bytes of a line of the cache, which is what memory instructions are counted in.
const LINE_BYTES: u64 = 128;

/// Whether a caller has requested counters; until then nothing is counted, which takes a second run of each
/// launch.
static ASKED: AtomicBool = AtomicBool::new(false);
static LAUNCHES: Mutex<Launches> = Mutex::new(Launches(VecDeque::new()));

pub(crate) fn is_asked() -> bool {
    ASKED.load(Relaxed)
}

/// Runs a launch again in memory of its own, counting bank conflicts and lines, and keeps what was counted; the device
/// has so many compute units.
pub(crate) fn note(recording: &Recording, launch: &Launch<'_>, units: u64) {
    let options = Options { checks: Checks::NONE, profile: true, ..Options::default() };
    let counted = recording.prepare(&recording.code, options).and_then(|ready| ready.run());
    match counted {
        Ok(counters) => {
            let mut launches = LAUNCHES.lock().unwrap_or_else(PoisonError::into_inner);
            let instructions = Class::ALL.map(|class| (words(class), counters.of(class)));
            let bytes = counters.lines_of_groups.iter().map(|&(at, lines)| (at, LINE_BYTES * lines));
            let shape = (launch.grid, launch.block);
            launches.push(&recording.kernel, shape, named(&counters), instructions, (units, bytes));
        }
        Err(error) => eprintln!("emulated driver: {} is not counted: {error}", recording.kernel),
    }
}

const fn words(class: Class) -> &'static str {
    match class {
        Class::Salu => "scalar",
        Class::Control => "branch, wait, barrier",
        Class::Smem => "scalar memory",
        Class::Valu => "vector",
        Class::ValuPacked => "packed vector",
        Class::Transcendental => "transcendental",
        Class::Mfma => "matrix",
        Class::Lds => "LDS",
        Class::Vmem => "memory",
    }
}

fn named(counters: &Counters) -> [(&'static str, u64); 9] {
    [
        ("wave_instructions", counters.total()),
        ("matrix_instructions", counters.of(Class::Mfma)),
        ("matrix_passes", counters.mfma_passes),
        ("lds_accesses", counters.lds_accesses),
        ("lds_cycles", counters.lds_cycles_min + counters.lds_conflict_cycles),
        ("bank_conflicts", counters.lds_conflict_cycles),
        ("memory_accesses", counters.vmem_accesses),
        ("line_bytes", LINE_BYTES * counters.vmem_lines),
        ("line_bytes_if_packed", LINE_BYTES * counters.vmem_lines_min),
    ]
}

/// Extension of HIP's interface: returns a JSON array of what the last launches (at most 64) did, oldest
/// first, and forgets them. The first call returns none, since counting begins with it. The text is the
/// caller's until [`fmhaEmulatorForget`].
#[unsafe(no_mangle)]
pub extern "C" fn fmhaEmulatorLaunches() -> *mut c_char {
    ASKED.store(true, Relaxed);
    launches::give(LAUNCHES.lock().unwrap_or_else(PoisonError::into_inner).take())
}

/// Frees a text of [`fmhaEmulatorLaunches`], which is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmhaEmulatorForget(text: *mut c_char) {
    // SAFETY: the caller keeps the contract of `fmhaEmulatorForget`.
    unsafe { launches::forget(text) }
}
