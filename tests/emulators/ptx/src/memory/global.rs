//! Device memory. Addresses are never valid on the host; a guard lies between any two allocations.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use super::{out_of_bounds, uninitialised};
use crate::fault::Fault;

type Exec<T> = Result<T, Box<Fault>>;

/// First device address: bit 48 is set, so that no host process can have a page there.
const FIRST: u64 = 0x0001_0000_0000_0000;
/// Least gap between allocations.
const GUARD: u64 = 4096;

/// One allocation. Words are atomic because blocks run on several threads.
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    words: Box<[AtomicU32]>,
    /// One bit a byte; empty when every byte counts as written.
    init: Box<[AtomicU32]>,
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Allocation {:#x} + {}", self.base, self.bytes)
    }
}

/// Zeros that take the host's memory only where they are touched: tensors may span gigabytes and have few rows.
fn zeros(n: u64) -> Box<[AtomicU32]> {
    let Ok(layout) = Layout::array::<AtomicU32>(n as usize) else { return Box::default() };
    if layout.size() == 0 {
        return Box::default();
    }
    // SAFETY: the layout's size is not zero.
    let first = unsafe { alloc_zeroed(layout) };
    if first.is_null() {
        handle_alloc_error(layout);
    }
    // SAFETY: `n` words of the global allocator, aligned as the layout says; an atomic of zero bytes is 0.
    unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(first.cast(), n as usize)) }
}

impl Allocation {
    fn new(base: u64, bytes: u64) -> Self {
        Self { base, bytes, words: zeros(bytes.div_ceil(4)), init: zeros(bytes.div_ceil(32)) }
    }

    /// The aligned word that holds byte `at`.
    #[inline(always)]
    pub(crate) fn word(&self, at: u64) -> &AtomicU32 {
        &self.words[(at >> 2) as usize]
    }

    /// Copies out; the caller has checked the bounds.
    pub(crate) fn read(&self, at: u64, out: &mut [u8]) {
        if at & 3 == 0 && out.len() & 3 == 0 {
            for (word, to) in self.words[(at >> 2) as usize..].iter().zip(out.chunks_exact_mut(4)) {
                to.copy_from_slice(&word.load(Relaxed).to_le_bytes());
            }
            return;
        }
        let mut at = at;
        let mut rest = out;
        while !rest.is_empty() {
            let (skip, word) = ((at & 3) as usize, self.word(at).load(Relaxed).to_le_bytes());
            let n = (4 - skip).min(rest.len());
            rest[..n].copy_from_slice(&word[skip..skip + n]);
            rest = &mut rest[n..];
            at += n as u64;
        }
    }

    /// Copies in and marks written; the caller has checked the bounds.
    pub(crate) fn write(&self, at: u64, data: &[u8]) {
        self.mark(at, data.len() as u64);
        if at & 3 == 0 && data.len() & 3 == 0 {
            for (word, from) in self.words[(at >> 2) as usize..].iter().zip(data.chunks_exact(4)) {
                word.store(u32::from_le_bytes([from[0], from[1], from[2], from[3]]), Relaxed);
            }
            return;
        }
        let mut at = at;
        let mut rest = data;
        while !rest.is_empty() {
            let skip = (at & 3) as usize;
            let n = (4 - skip).min(rest.len());
            let cell = self.word(at);
            if n == 4 {
                cell.store(u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]), Relaxed);
            } else {
                let (mut value, mut keep) = ([0u8; 4], [0xffu8; 4]);
                value[skip..skip + n].copy_from_slice(&rest[..n]);
                keep[skip..skip + n].fill(0);
                let (value, keep) = (u32::from_le_bytes(value), u32::from_le_bytes(keep));
                // Neighbouring bytes may belong to another thread.
                let _ = cell.fetch_update(Relaxed, Relaxed, |old| Some(old & keep | value));
            }
            rest = &rest[n..];
            at += n as u64;
        }
    }

    pub(crate) fn mark(&self, at: u64, bytes: u64) {
        let mut at = at;
        let end = at + bytes;
        while at < end {
            let (word, bit) = ((at >> 5) as usize, at & 31);
            let n = (32 - bit).min(end - at);
            let mask = (((1u64 << n) - 1) << bit) as u32;
            if self.init[word].load(Relaxed) & mask != mask {
                self.init[word].fetch_or(mask, Relaxed);
            }
            at += n;
        }
    }

    /// The first byte of the range that nothing has written.
    pub(crate) fn first_unwritten(&self, at: u64, bytes: u64) -> Option<u64> {
        let mut at = at;
        let end = at + bytes;
        while at < end {
            let (word, bit) = ((at >> 5) as usize, at & 31);
            let n = (32 - bit).min(end - at);
            let mask = (((1u64 << n) - 1) << bit) as u32;
            let missing = mask & !self.init[word].load(Relaxed);
            if missing != 0 {
                return Some((at & !31) + u64::from(missing.trailing_zeros()));
            }
            at += n;
        }
        None
    }
}

/// All allocations of a device.
#[derive(Debug, Default)]
pub(crate) struct GlobalMemory {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    live: BTreeMap<u64, Arc<Allocation>>,
    next: u64,
}

impl GlobalMemory {
    /// Memory whose addresses begin `bytes` behind another device's, so that neither takes the other's pointers.
    pub(crate) fn behind(bytes: u64) -> Self {
        Self { inner: Mutex::new(Inner { next: bytes, ..Inner::default() }) }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates; addresses are multiples of 512 (hardware gives 256 or better) and never reused.
    pub(crate) fn allocate(&self, bytes: u64) -> u64 {
        let mut inner = self.lock();
        let base = FIRST + inner.next;
        inner.next = (inner.next + bytes + GUARD).next_multiple_of(512);
        inner.live.insert(base, Arc::new(Allocation::new(base, bytes)));
        base
    }

    /// An allocation as a recording has it: base, contents, bytes written. False unless it lies above all others.
    pub(crate) fn restore(&self, base: u64, data: &[u8], init: &[u32]) -> bool {
        let mut inner = self.lock();
        if base < FIRST + inner.next || !base.is_multiple_of(512) {
            return false;
        }
        let bytes = data.len() as u64;
        let allocation = Allocation::new(base, bytes);
        allocation.write(0, data);
        for (word, bits) in allocation.init.iter().zip(init) {
            word.store(*bits, Relaxed);
        }
        inner.next = (base - FIRST + bytes + GUARD).next_multiple_of(512);
        inner.live.insert(base, Arc::new(allocation));
        true
    }

    /// Frees; false when `base` is no live allocation.
    pub(crate) fn free(&self, base: u64) -> bool {
        self.lock().live.remove(&base).is_some()
    }

    /// A view for one launch or copy: the allocations alive now.
    pub(crate) fn view(&self) -> View {
        View { sorted: self.lock().live.values().cloned().collect() }
    }

    pub(crate) fn live_bytes(&self) -> u64 {
        self.lock().live.values().map(|a| a.bytes).sum()
    }
}

/// The allocations alive at one moment, by address.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    sorted: Vec<Arc<Allocation>>,
}

impl View {
    /// Base, contents and bytes written of every allocation.
    pub(crate) fn contents(&self) -> Vec<(u64, Vec<u8>, Vec<u32>)> {
        let one = |a: &Arc<Allocation>| {
            let mut data = vec![0; a.bytes as usize];
            a.read(0, &mut data);
            (a.base, data, a.init.iter().map(|w| w.load(Relaxed)).collect())
        };
        self.sorted.iter().map(one).collect()
    }

    /// The allocation that holds `[address, address + bytes)`; `hint` remembers the last hit.
    #[inline(always)]
    pub(crate) fn find(&self, address: u64, bytes: u64, hint: &mut usize, what: &str) -> Exec<&Allocation> {
        if let Some(a) = self.sorted.get(*hint)
            && address >= a.base
            && address - a.base + bytes <= a.bytes
        {
            return Ok(a);
        }
        self.search(address, bytes, hint, what)
    }

    fn search(&self, address: u64, bytes: u64, hint: &mut usize, what: &str) -> Exec<&Allocation> {
        let after = self.sorted.partition_point(|a| a.base <= address);
        let Some(at) = after.checked_sub(1) else {
            return Err(out_of_bounds(what, address, bytes, "no allocation lies below it"));
        };
        let a = &self.sorted[at];
        if bytes > a.bytes || address - a.base > a.bytes - bytes {
            let past = address - a.base + bytes - a.bytes;
            let of = format!("{past} bytes past the end of the {} bytes at {:#x}", a.bytes, a.base);
            return Err(out_of_bounds(what, address, bytes, &of));
        }
        *hint = at;
        Ok(a)
    }

    /// Copies out of device memory, with bounds checked.
    pub(crate) fn read(&self, address: u64, out: &mut [u8], check: bool) -> Exec<()> {
        self.read_near(address, out, check, &mut 0)
    }

    /// Reads `out.len()` bytes from `address` on; `hint` remembers the allocation.
    pub(crate) fn read_near(&self, address: u64, out: &mut [u8], check: bool, hint: &mut usize) -> Exec<()> {
        let a = self.find(address, out.len() as u64, hint, "read")?;
        let at = address - a.base;
        if check && let Some(first) = a.first_unwritten(at, out.len() as u64) {
            return Err(uninitialised("read of global memory", a.base + first));
        }
        a.read(at, out);
        Ok(())
    }

    /// Copies out of device memory, with bounds checked; bytes never written are 0xff.
    pub(crate) fn read_poisoned(&self, address: u64, out: &mut [u8]) -> Exec<()> {
        let a = self.find(address, out.len() as u64, &mut 0, "read")?;
        let (first, end) = (address - a.base, address - a.base + out.len() as u64);
        a.read(first, out);
        let mut at = first;
        while let Some(unwritten) = a.first_unwritten(at, end - at) {
            out[(unwritten - first) as usize] = 0xff;
            at = unwritten + 1;
        }
        Ok(())
    }

    /// Copies into device memory, with bounds checked.
    pub(crate) fn write(&self, address: u64, data: &[u8]) -> Exec<()> {
        let a = self.find(address, data.len() as u64, &mut 0, "write")?;
        a.write(address - a.base, data);
        Ok(())
    }
}
