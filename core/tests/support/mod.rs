//! Arguments whose memory no test reads or writes: only their addresses and sizes matter.

use fmha_core::{BwdArgs, DevSlice, DevSliceMut, ElemType, MemorySpace};

/// Input in host memory, as many bytes as `elems` f32.
pub(crate) fn input(address: usize, elems: u64) -> DevSlice<'static> {
    // SAFETY: the checks, and `bind`, never read through a slice.
    unsafe { DevSlice::from_raw(MemorySpace::Host, address as *const u8, elems * 4, ElemType::Bytes) }
}

/// Output in host memory, as many bytes as `elems` f32.
pub(crate) fn output(address: usize, elems: u64) -> DevSliceMut<'static> {
    // SAFETY: the checks, and `bind`, never read or write through a slice.
    unsafe { DevSliceMut::from_raw(MemorySpace::Host, address as *mut u8, elems * 4, ElemType::Bytes) }
}

/// Arguments of a backward call: each tensor is larger than needed for two sequences of a few rows.
pub(crate) fn bwd_args() -> BwdArgs<'static> {
    BwdArgs::new(
        [input(0x10000, 300), input(0x20000, 300), input(0x30000, 300)],
        [input(0x40000, 300), input(0x50000, 40), input(0x60000, 300)],
        [output(0x70000, 300), output(0x72000, 300), output(0x74000, 300)],
    )
}
