//! Device memory: allocations with fake addresses, wide guards between them, and a record of what was ever written.
//!
//! Device addresses have bit 47 set, so that no user-space pointer of the host equals one: code that follows a device
//! address on the host crashes at once, as it would with a GPU.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};

/// First device address.
const BASE: u64 = 0x8000_0000_0000;
/// Unmapped bytes after every allocation.
const GUARD: u64 = 64 << 20;
/// Up to this size new memory is filled with NaN in every format; above, the host's lazily zeroed pages stand.
const POISON_LIMIT: usize = 64 << 20;
/// NaN as f16, bf16, f32 and f64, and as the 8-bit formats that have one at 0xff (FNUZ e4m3 reads −240).
const POISON: u32 = u32::MAX;

/// A fault of the host's side: an address that is no allocation's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// No allocation begins at that address.
    #[error("0x{0:x} is not the start of an allocation")]
    NotAllocated(u64),
    /// The range leaves its allocation, or lies in none.
    #[error("{bytes} bytes at 0x{address:x} are not inside one allocation")]
    OutOfRange {
        /// First byte.
        address: u64,
        /// Length.
        bytes: usize,
    },
}

/// One allocation.
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) bytes: usize,
    data: *mut u8,
    /// A byte for each byte of data: 1 once written.
    written: *mut u8,
    layout: Layout,
    /// Every byte has been written: the record need not be consulted.
    all_written: AtomicBool,
    /// Refuses writes: a code object's image.
    read_only: bool,
}

// SAFETY: both pointers own their memory, which lives until `drop`; every access goes through atomics.
unsafe impl Send for Allocation {}
// SAFETY: both pointers own their memory, which lives until `drop`; every access goes through atomics.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: `new` allocated both with this layout.
        unsafe {
            dealloc(self.data, self.layout);
            dealloc(self.written, self.layout);
        }
    }
}

impl Allocation {
    fn new(base: u64, bytes: usize, read_only: bool) -> Self {
        // No more than the allocator's own alignment: beyond it, zeros are written, and tensors of gigabytes whose rows
        // are few would take gigabytes.
        let layout = Layout::from_size_align(bytes.next_multiple_of(16).max(16), 16)
            .unwrap_or_else(|_| Layout::new::<[u128; 4]>());
        // SAFETY: the layout's size is not zero.
        let (data, written) = unsafe { (alloc_zeroed(layout), alloc_zeroed(layout)) };
        if data.is_null() || written.is_null() {
            handle_alloc_error(layout);
        }
        let this =
            Self { base, bytes, data, written, layout, all_written: AtomicBool::new(false), read_only };
        if bytes <= POISON_LIMIT {
            for at in (0..layout.size()).step_by(4) {
                this.word(at).store(POISON, Relaxed);
            }
        }
        this
    }

    #[inline(always)]
    fn word(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at.is_multiple_of(4) && at < self.layout.size());
        // SAFETY: callers checked `at` against the size; the allocation is aligned to 16 and `at` to 4.
        unsafe { AtomicU32::from_ptr(self.data.add(at).cast()) }
    }

    #[inline(always)]
    fn byte(&self, at: usize) -> &AtomicU8 {
        debug_assert!(at < self.layout.size());
        // SAFETY: callers checked `at` against the size.
        unsafe { AtomicU8::from_ptr(self.data.add(at)) }
    }

    /// The dword at `at`, a multiple of 4 inside the allocation, for atomic operations.
    pub(crate) fn atomic(&self, at: usize) -> Option<&AtomicU32> {
        (at.is_multiple_of(4) && at + 4 <= self.bytes).then(|| self.word(at))
    }

    pub(crate) fn atomic64(&self, at: usize) -> Option<&AtomicU64> {
        // SAFETY: inside the allocation and aligned, checked here.
        (at.is_multiple_of(8) && at + 8 <= self.bytes)
            .then(|| unsafe { AtomicU64::from_ptr(self.data.add(at).cast()) })
    }

    /// Reads `bytes` (at most 16) at `at` into dwords. The caller checked the range.
    #[inline(always)]
    pub(crate) fn read(&self, at: usize, bytes: usize, out: &mut [u32; 4]) {
        if at.is_multiple_of(4) && bytes.is_multiple_of(4) {
            for (i, word) in out.iter_mut().enumerate().take(bytes / 4) {
                *word = self.word(at + 4 * i).load(Relaxed);
            }
            return;
        }
        for i in 0..bytes {
            let value = u32::from(self.byte(at + i).load(Relaxed));
            if i % 4 == 0 {
                out[i / 4] = value;
            } else {
                out[i / 4] |= value << (8 * (i % 4));
            }
        }
    }

    /// Writes `bytes` (at most 16) at `at`. The caller checked the range and [`Self::read_only`].
    #[inline(always)]
    pub(crate) fn write(&self, at: usize, bytes: usize, from: &[u32; 4]) {
        if at.is_multiple_of(4) && bytes.is_multiple_of(4) {
            for (i, word) in from.iter().enumerate().take(bytes / 4) {
                self.word(at + 4 * i).store(*word, Relaxed);
            }
        } else {
            for i in 0..bytes {
                self.byte(at + i).store((from[i / 4] >> (8 * (i % 4))) as u8, Relaxed);
            }
        }
        self.mark_written(at, bytes);
    }

    #[inline(always)]
    pub(crate) fn mark_written(&self, at: usize, bytes: usize) {
        if self.all_written.load(Relaxed) {
            return;
        }
        for i in at..at + bytes {
            // SAFETY: inside the allocation: the caller checked.
            unsafe { AtomicU8::from_ptr(self.written.add(i)) }.store(1, Relaxed);
        }
    }

    /// Whether every byte of the range was written since the allocation.
    #[inline(always)]
    pub(crate) fn is_written(&self, at: usize, bytes: usize) -> bool {
        self.all_written.load(Relaxed)
            || (at..at + bytes).all(|i| {
                // SAFETY: inside the allocation: the caller checked.
                unsafe { AtomicU8::from_ptr(self.written.add(i)) }.load(Relaxed) == 1
            })
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn fill_from(&self, at: usize, from: &[u8]) {
        for (i, byte) in from.iter().enumerate() {
            self.byte(at + i).store(*byte, Relaxed);
        }
        if from.len() == self.bytes {
            self.all_written.store(true, Relaxed);
        } else {
            self.mark_written(at, from.len());
        }
    }
}

/// The memory of one emulated device.
#[derive(Default)]
pub struct DeviceMemory {
    inner: RwLock<Inner>,
}

#[derive(Default)]
struct Inner {
    /// Sorted by address.
    allocations: Arc<Vec<Arc<Allocation>>>,
    next: u64,
}

impl DeviceMemory {
    /// No allocations.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// No allocations; addresses of devices with different indices (0..16) never meet.
    #[must_use]
    pub fn with_index(index: u8) -> Self {
        let inner = Inner { next: BASE + (u64::from(index & 15) << 43), ..Inner::default() };
        Self { inner: RwLock::new(inner) }
    }

    /// Allocates `bytes`; the address is a multiple of 256 and never used before by this device. The content counts as
    /// unwritten, and is NaN in every format.
    pub fn alloc(&self, bytes: usize) -> u64 {
        self.insert(bytes, false)
    }

    /// Allocates and writes `from`.
    pub fn alloc_from(&self, from: &[u8]) -> u64 {
        let address = self.alloc(from.len());
        // The allocation was made for exactly these bytes.
        let _ = self.write(address, from);
        address
    }

    pub(crate) fn insert(&self, bytes: usize, read_only: bool) -> u64 {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        let base = inner.next.max(BASE);
        inner.next = (base + bytes as u64 + GUARD).next_multiple_of(1 << 16);
        let allocation = Arc::new(Allocation::new(base, bytes, read_only));
        // Addresses only grow, so pushing keeps the order.
        Arc::make_mut(&mut inner.allocations).push(allocation);
        base
    }

    /// Base, bytes and which of them were ever written (0 or 1 a byte) of all allocations but that at `image`.
    pub(crate) fn contents_but(&self, image: u64) -> Vec<(u64, Vec<u8>, Vec<u8>)> {
        let view = self.view();
        let of = |a: &Arc<Allocation>| {
            let bytes = (0..a.bytes).map(|at| a.byte(at).load(Relaxed)).collect();
            let written = (0..a.bytes).map(|at| u8::from(a.is_written(at, 1))).collect();
            (a.base, bytes, written)
        };
        view.allocations.iter().filter(|a| a.base != image).map(of).collect()
    }

    /// Restores an allocation of an earlier [`Self::contents`], at its address. False where that is not above
    /// all others.
    pub(crate) fn restore(&self, base: u64, bytes: &[u8], written: &[u8]) -> bool {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        if base < inner.next.max(BASE) || bytes.len() != written.len() {
            return false;
        }
        inner.next = base;
        drop(inner);
        if self.insert(bytes.len(), false) != base {
            return false;
        }
        let Ok((allocation, _)) = self.range(base, bytes.len()) else { return false };
        for (at, byte) in bytes.iter().enumerate() {
            allocation.byte(at).store(*byte, Relaxed);
            if written[at] == 1 {
                allocation.mark_written(at, 1);
            }
        }
        true
    }

    /// Frees the allocation that begins at `address`.
    ///
    /// # Errors
    /// [`MemoryError::NotAllocated`].
    pub fn free(&self, address: u64) -> Result<(), MemoryError> {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        let at = inner
            .allocations
            .binary_search_by_key(&address, |a| a.base)
            .map_err(|_| MemoryError::NotAllocated(address))?;
        Arc::make_mut(&mut inner.allocations).remove(at);
        Ok(())
    }

    /// Bytes and start of the allocation that holds `address`.
    #[must_use]
    pub fn allocation_of(&self, address: u64) -> Option<(u64, usize)> {
        let view = self.view();
        let at = view.find(address, 0)?;
        Some((view.allocations[at].base, view.allocations[at].bytes))
    }

    /// Bytes in all allocations together.
    #[must_use]
    pub fn allocated_bytes(&self) -> usize {
        self.view().allocations.iter().map(|a| a.bytes).sum()
    }

    /// Copies from the host.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] when the range is not inside one allocation.
    pub fn write(&self, address: u64, from: &[u8]) -> Result<(), MemoryError> {
        let (allocation, at) = self.range(address, from.len())?;
        allocation.fill_from(at, from);
        Ok(())
    }

    /// Copies to the host.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] when the range is not inside one allocation.
    pub fn read(&self, address: u64, to: &mut [u8]) -> Result<(), MemoryError> {
        let (allocation, at) = self.range(address, to.len())?;
        for (i, byte) in to.iter_mut().enumerate() {
            *byte = allocation.byte(at + i).load(Relaxed);
        }
        Ok(())
    }

    /// Copies from device memory, this one's or another's; what was unwritten stays unwritten.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] when a range is not inside one allocation.
    pub fn copy_from(&self, to: u64, source: &Self, from: u64, bytes: usize) -> Result<(), MemoryError> {
        let (from, from_at) = source.range(from, bytes)?;
        let (to, to_at) = self.range(to, bytes)?;
        let copy: Vec<(u8, bool)> = (from_at..from_at + bytes)
            .map(|at| (from.byte(at).load(Relaxed), from.is_written(at, 1)))
            .collect();
        for (i, (byte, written)) in copy.into_iter().enumerate() {
            to.byte(to_at + i).store(byte, Relaxed);
            if written {
                to.mark_written(to_at + i, 1);
            }
        }
        Ok(())
    }

    /// Copies to a new vector.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_vec(&self, address: u64, bytes: usize) -> Result<Vec<u8>, MemoryError> {
        let mut out = vec![0; bytes];
        self.read(address, &mut out)?;
        Ok(out)
    }

    fn range(&self, address: u64, bytes: usize) -> Result<(Arc<Allocation>, usize), MemoryError> {
        let view = self.view();
        let error = MemoryError::OutOfRange { address, bytes };
        let at = view.find(address, 0).ok_or(error)?;
        let allocation = &view.allocations[at];
        let offset = (address - allocation.base) as usize;
        if offset + bytes > allocation.bytes {
            return Err(error);
        }
        Ok((Arc::clone(allocation), offset))
    }

    /// The allocations as they are now, for a launch.
    pub(crate) fn view(&self) -> View {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        View { allocations: Arc::clone(&inner.allocations) }
    }
}

/// The allocations at one moment.
#[derive(Clone)]
pub(crate) struct View {
    pub(crate) allocations: Arc<Vec<Arc<Allocation>>>,
}

impl View {
    /// Index of the allocation that holds `address`; `hint` is tried first.
    #[inline(always)]
    pub(crate) fn find(&self, address: u64, hint: usize) -> Option<usize> {
        if let Some(a) = self.allocations.get(hint)
            && address.wrapping_sub(a.base) < a.bytes as u64
        {
            return Some(hint);
        }
        let after = self.allocations.partition_point(|a| a.base <= address);
        let at = after.checked_sub(1)?;
        let a = &self.allocations[at];
        // An empty range at the very start of an allocation is inside it.
        (address - a.base < a.bytes.max(1) as u64).then_some(at)
    }

    /// Says what lies near an address that is in no allocation.
    #[cold]
    pub(crate) fn describe(&self, address: u64, bytes: usize) -> String {
        let after = self.allocations.partition_point(|a| a.base <= address);
        match after.checked_sub(1).map(|at| &self.allocations[at]) {
            Some(a) if address - a.base < a.bytes as u64 + GUARD => format!(
                "{bytes} bytes at 0x{address:x}, {} bytes from the start of an allocation of {} bytes",
                address - a.base,
                a.bytes
            ),
            _ => match self.allocations.get(after) {
                Some(a) if a.base - address < GUARD => format!(
                    "{bytes} bytes at 0x{address:x}, {} bytes before an allocation of {} bytes",
                    a.base - address,
                    a.bytes
                ),
                _ => format!("{bytes} bytes at 0x{address:x}, near no allocation"),
            },
        }
    }
}
