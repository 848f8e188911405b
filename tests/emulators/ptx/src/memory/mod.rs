//! Memories of the device: global allocations with guards, and the shared memory of one block.

mod global;
mod shared;

pub(crate) use global::{GlobalMemory, View};
pub(crate) use shared::Shared;

use crate::fault::{Fault, FaultKind};

/// Start of generic addresses of shared memory; block rank `r` of the cluster sits at `r` times 2^24, as an
/// H200 has it: a block's addresses of its own variables have its rank in them, and one without names block
/// 0.
pub(crate) const SHARED_WINDOW: u64 = 0x0002_0000_0000_0000;
/// Start of generic addresses of local memory.
pub(crate) const LOCAL_WINDOW: u64 = 0x0002_1000_0000_0000;
/// Start of generic addresses of kernel parameters.
pub(crate) const PARAM_WINDOW: u64 = 0x0002_2000_0000_0000;
/// Size of each window.
pub(crate) const WINDOW_BYTES: u64 = 1 << 40;
/// Bits of an address inside one block's shared memory.
pub(crate) const SHARED_BITS: u32 = 24;

pub(crate) fn out_of_bounds(what: &str, address: u64, bytes: u64, of: &str) -> Box<Fault> {
    Box::new(Fault::new(FaultKind::OutOfBounds, format!("{what} of {bytes} bytes at {address:#x}: {of}")))
}

pub(crate) fn misaligned(what: &str, address: u64, bytes: u64) -> Box<Fault> {
    Box::new(Fault::new(
        FaultKind::Misaligned,
        format!("{what} at {address:#x} is no multiple of {bytes} bytes"),
    ))
}

pub(crate) fn uninitialised(what: &str, address: u64) -> Box<Fault> {
    Box::new(Fault::new(
        FaultKind::Uninitialised,
        format!("{what} of bytes never written, first {address:#x}"),
    ))
}
