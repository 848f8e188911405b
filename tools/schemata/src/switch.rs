//! The switch of a build that holds all mutants: which one is on, or which sites a run passes.
//!
//! `SCHEMATA_MUTANT=N` switches mutant N on. `SCHEMATA_REACH=FILE`, with no mutant on, sets byte N of FILE
//! where the site of mutant N is evaluated; FILE is mapped, so what aborts, forks or opens a shared library
//! is recorded too.

#![feature(core_intrinsics, const_eval_select)]
#![allow(internal_features, clippy::missing_docs_in_private_items)]

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Value for no mutant and no recording.
const NONE: u32 = 0;
/// Value for no mutant, with sites recorded.
const RECORD: u32 = u32::MAX;

// Active mutant, written once before `main`. It is atomic, since for a plain variable the optimiser would copy every
// loop for each outcome.
static ACTIVE: AtomicU32 = AtomicU32::new(NONE);
static mut SEEN: *mut u8 = std::ptr::null_mut();
static mut LEN: usize = 0;

/// Whether mutant `n` is active. During constant evaluation none is.
#[inline(always)]
#[must_use]
pub const fn on(n: u32) -> bool {
    core::intrinsics::const_eval_select((n,), never, is_active)
}

const fn never(_: u32) -> bool {
    false
}

#[inline(always)]
fn is_active(n: u32) -> bool {
    let active = ACTIVE.load(Relaxed);
    active == n || (active == RECORD && record(n))
}

#[cold]
#[inline(never)]
fn record(n: u32) -> bool {
    // SAFETY: the mapping is LEN bytes long and never removed; racing threads write equal bytes.
    unsafe {
        if (n as usize) < LEN {
            SEEN.add(n as usize).write_volatile(1);
        }
    }
    false
}

unsafe extern "C" {
    fn mmap(at: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void;
}

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = {
    extern "C" fn start() {
        if let Some(n) = std::env::var("SCHEMATA_MUTANT").ok().and_then(|text| text.parse().ok()) {
            ACTIVE.store(n, Relaxed);
        } else if let Ok(path) = std::env::var("SCHEMATA_REACH") {
            let file = std::fs::OpenOptions::new().read(true).write(true).open(path);
            let Some((file, len)) = file.ok().and_then(|file| Some((file.metadata().ok()?.len(), file)))
                .map(|(len, file)| (file, len as usize)) else { return };
            // SAFETY: a fresh shared mapping (PROT_READ | PROT_WRITE, MAP_SHARED) of a file as long; no
            // thread runs yet.
            unsafe {
                let at = mmap(std::ptr::null_mut(), len, 3, 1, file.as_raw_fd(), 0);
                if at as isize != -1 {
                    (SEEN, LEN) = (at.cast(), len);
                    ACTIVE.store(RECORD, Relaxed);
                }
            }
        }
    }
    start
};
