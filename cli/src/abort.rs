//! Last resort for a process that runs out of memory.
//!
//! Allocations of the size of a problem are checked before they are made, and refused with a number. A small
//! allocation that fails inside a library ends in `std`'s `memory allocation of N bytes failed` and an abort, which
//! no stable hook can replace. This module turns the abort into the exit status of an error.

/// Makes an abort end with exit status 2.
#[cfg(unix)]
pub(super) fn exits_with_an_error() {
    extern "C" fn leave(_signal: libc::c_int) {
        // SAFETY: `_exit` is async-signal-safe and does not return.
        unsafe { libc::_exit(2) }
    }
    let handler = leave as extern "C" fn(libc::c_int) as libc::sighandler_t;
    // SAFETY: the handler calls nothing but `_exit`. A failure leaves the abort as it was.
    unsafe { libc::signal(libc::SIGABRT, handler) };
}

/// Elsewhere than on Unix an abort is not turned into an error.
#[cfg(not(unix))]
pub(super) fn exits_with_an_error() {}
