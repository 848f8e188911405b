//! Shared memory of one block.

use super::{misaligned, out_of_bounds, uninitialised};
use crate::decode::RESERVED_SHARED;
use crate::exec::Swizzle;
use crate::fault::{Fault, FaultKind};

type Exec<T> = Result<T, Box<Fault>>;

/// The bytes of one block's shared memory, and which of them have been written.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    bytes: Vec<u8>,
    /// Bit for each byte: whether it was written.
    init: Vec<u64>,
    /// Number of the last write to each KiB, and of the last write at all.
    stamps: Vec<u64>,
    clock: u64,
    /// Swizzle of the tensor copy that wrote each KiB last; `None` after any other write.
    swizzles: Vec<Option<Swizzle>>,
}

impl Shared {
    /// `end` counts from address 0, the reserved bytes included.
    pub(crate) fn new(end: u32) -> Self {
        let n = end as usize;
        Self {
            bytes: vec![0xa5; n],
            init: vec![0; n.div_ceil(64)],
            stamps: vec![0; n.div_ceil(1024)],
            clock: 0,
            swizzles: vec![None; n.div_ceil(1024)],
        }
    }

    /// Checks bounds and alignment of an access.
    #[inline(always)]
    pub(crate) fn check(&self, at: u32, bytes: u32, align: u32, what: &str) -> Exec<()> {
        if at & (align - 1) != 0 {
            return Err(misaligned(what, u64::from(at), u64::from(align)));
        }
        if at < RESERVED_SHARED || u64::from(at) + u64::from(bytes) > self.bytes.len() as u64 {
            return Err(self.outside(at, bytes, what));
        }
        Ok(())
    }

    #[cold]
    fn outside(&self, at: u32, bytes: u32, what: &str) -> Box<Fault> {
        let of = format!("shared memory of this block is [{RESERVED_SHARED:#x}, {:#x})", self.bytes.len());
        out_of_bounds(what, u64::from(at), u64::from(bytes), &of)
    }

    /// Bytes that [`check`](Self::check) has accepted.
    #[inline(always)]
    pub(crate) fn get(&self, at: u32, bytes: u32) -> &[u8] {
        &self.bytes[at as usize..(at + bytes) as usize]
    }

    /// Bytes to write, which are marked as written.
    #[inline(always)]
    pub(crate) fn get_mut(&mut self, at: u32, bytes: u32) -> &mut [u8] {
        self.mark(at, bytes);
        self.clock += 1;
        let pages = at as usize >> 10..=(at + bytes - 1) as usize >> 10;
        self.stamps[pages.clone()].fill(self.clock);
        self.swizzles[pages].fill(None);
        &mut self.bytes[at as usize..(at + bytes) as usize]
    }

    /// Notes that a tensor copy wrote whole KiB of the range with `swizzle`.
    pub(crate) fn note_swizzle(&mut self, at: u32, bytes: u32, swizzle: Swizzle) {
        let whole = at.div_ceil(1024) as usize..((at + bytes) / 1024) as usize;
        if !whole.is_empty() {
            self.swizzles[whole].fill(Some(swizzle));
        }
    }

    /// Fails when a tensor copy wrote the bytes at `at` with another swizzle.
    pub(crate) fn check_swizzle(&self, at: u32, reads: Swizzle, what: &str) -> Exec<()> {
        match self.swizzles[at as usize >> 10] {
            Some(wrote) if wrote != reads => {
                let text = format!(
                    "{what} at {at:#x} with swizzle {reads:?}, a tensor copy wrote it with {wrote:?}"
                );
                Err(Box::new(Fault::new(FaultKind::Swizzle, text)))
            }
            _ => Ok(()),
        }
    }

    /// Whether all of `[from, to)` lies in the block's shared memory, no tensor copy wrote any KiB of it with another
    /// swizzle, and (`written`) each byte has been written. What lies inside needs no checks of its own then.
    pub(crate) fn is_whole(&self, from: u32, to: u32, swizzle: Swizzle, written: bool) -> bool {
        from >= RESERVED_SHARED
            && to as usize <= self.bytes.len()
            && from < to
            && self.swizzles[from as usize >> 10..=(to - 1) as usize >> 10]
                .iter()
                .all(|wrote| wrote.is_none_or(|wrote| wrote == swizzle))
            && (!written || self.check_written(from, to - from, "").is_ok())
    }

    /// The number of the last write, for [`unchanged`](Self::unchanged).
    pub(crate) fn clock(&self) -> u64 {
        self.clock
    }

    /// Whether nothing was written to `[from, to)` after write number `since`.
    pub(crate) fn unchanged(&self, from: u32, to: u32, since: u64) -> bool {
        self.clock == since
            || self.stamps[from as usize >> 10..=(to - 1) as usize >> 10].iter().all(|&s| s <= since)
    }

    #[inline(always)]
    fn mark(&mut self, at: u32, bytes: u32) {
        let (mut at, end) = (at as usize, (at + bytes) as usize);
        while at < end {
            let (word, bit) = (at >> 6, at & 63);
            let n = (64 - bit).min(end - at);
            self.init[word] |= (u64::MAX >> (64 - n)) << bit;
            at += n;
        }
    }

    /// Fails when a byte of the range has never been written.
    #[inline(always)]
    pub(crate) fn check_written(&self, at: u32, bytes: u32, what: &str) -> Exec<()> {
        let (mut from, end) = (at as usize, (at + bytes) as usize);
        while from < end {
            let (word, bit) = (from >> 6, from & 63);
            let n = (64 - bit).min(end - from);
            let missing = ((u64::MAX >> (64 - n)) << bit) & !self.init[word];
            if missing != 0 {
                return Err(uninitialised(what, (word * 64) as u64 + u64::from(missing.trailing_zeros())));
            }
            from += n;
        }
        Ok(())
    }
}
