//! Host memory: for callers without tensors of their own, and scratch whose allocation may fail.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::{Mutex, MutexGuard};

use fmha_core::fork::PerProcess;
use fmha_core::host_memory::no_memory;
pub(crate) use fmha_core::host_memory::reserve;
use fmha_core::{DevBuffer, DevSliceMut, DeviceMemory, MemorySpace, ProblemError, Result};

/// The processor's own memory.
#[derive(Debug)]
pub(crate) struct HostMemory;

const ALIGN: usize = 256;

impl DeviceMemory for HostMemory {
    fn space(&self) -> MemorySpace {
        MemorySpace::Host
    }

    /// Allocates zeroed memory, since [`DevBuffer::slice`] and `download` give safe code access to bytes that
    /// nothing has written.
    fn alloc(&self, bytes: u64) -> Result<DevBuffer> {
        // `alloc_zeroed` with an alignment above malloc's writes every byte; with malloc's alignment, new pages of
        // the system are zero already and are not touched. So alignment is made by extra bytes before the first
        // one.
        let layout = usize::try_from(bytes)
            .ok()
            .and_then(|size| Layout::from_size_align(size.checked_add(ALIGN)?, 1).ok())
            .ok_or_else(|| no_memory(bytes))?;
        // SAFETY: the layout has at least one byte.
        let memory = unsafe { alloc_zeroed(layout) };
        if memory.is_null() {
            return Err(no_memory(bytes));
        }
        let before = memory.addr().next_multiple_of(ALIGN) - memory.addr();
        let ptr = memory.wrapping_add(before);
        // SAFETY: `ptr - before` was allocated above with this layout.
        let free = Box::new(move |ptr: *mut u8| unsafe { dealloc(ptr.sub(before), layout) });
        // SAFETY: `bytes` from `ptr` on lie inside the allocation and are ours alone until `free` has run.
        Ok(unsafe { DevBuffer::from_raw(MemorySpace::Host, ptr, bytes, free) })
    }

    fn upload_bytes(&self, bytes: &[u8], to: &mut DevBuffer) -> Result<()> {
        check_fits("to", bytes.len(), to)?;
        // SAFETY: `to` owns at least this many bytes, and nobody else writes them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn download_bytes(&self, from: &DevBuffer, bytes: &mut [u8]) -> Result<()> {
        check_fits("from", bytes.len(), from)?;
        // SAFETY: `from` owns at least this many bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Zeros, in pages of the system that are not touched before a number is added.
///
/// # Errors
/// The system has too little memory.
pub(crate) fn zeros(count: u64) -> Result<Vec<f64>> {
    let too_many = || no_memory(count.saturating_mul(size_of::<f64>() as u64));
    let len = usize::try_from(count).map_err(|_| too_many())?;
    let layout = Layout::array::<f64>(len).map_err(|_| too_many())?;
    if len == 0 {
        return Ok(vec![]);
    }
    // SAFETY: the layout has at least one number.
    let memory = unsafe { alloc_zeroed(layout) }.cast::<f64>();
    if memory.is_null() {
        return Err(too_many());
    }
    // SAFETY: allocated above with the layout of so many numbers; zero bytes are the number 0.
    Ok(unsafe { Vec::from_raw_parts(memory, len, len) })
}

fn check_fits(field: &'static str, wanted: usize, buffer: &DevBuffer) -> Result<()> {
    let has = buffer.bytes();
    if buffer.space() != MemorySpace::Host {
        let text = format!("{field} of {has} bytes is a device's memory, and not the host's");
        return Err(ProblemError::new(field, text).into());
    }
    if wanted as u64 > has {
        let text = format!("{field} has {has} bytes, fewer than the {wanted} to copy");
        return Err(ProblemError::new(field, text).into());
    }
    Ok(())
}

/// Appends to a vector, or reports how much memory the system refused.
pub(crate) fn add<T>(all: &mut Vec<T>, more: impl ExactSizeIterator<Item = T>) -> Result<()> {
    let bytes = (more.len() as u64).saturating_mul(size_of::<T>() as u64);
    all.try_reserve(more.len()).map_err(|_| no_memory(bytes))?;
    all.extend(more);
    Ok(())
}

/// One cache line of f32.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Aligned f32 (64 bytes) for computing: always initialised, but meaningless until written. Dropped buffers go to a
/// store: at 16 threads and 512 keys, getting and touching new pages took longer than the attention itself.
#[derive(Default)]
pub(crate) struct Floats(Vec<Line>);

/// Memory of dropped [`Floats`], kept for later ones up to [`MAX_SPARE_BYTES`].
static SPARE: PerProcess<Mutex<Vec<Vec<Line>>>> = PerProcess::of_first(Mutex::new(Vec::new()));

fn spare() -> Option<MutexGuard<'static, Vec<Vec<Line>>>> {
    SPARE.get(Mutex::default).lock().ok()
}

/// Enough for the scratch of a hundred threads at head dimension 128.
const MAX_SPARE_BYTES: usize = 128 << 20;

impl Floats {
    /// `len` meaningless numbers, or the refusal with its size.
    pub(crate) fn scratch(len: usize) -> Result<Self> {
        let lines = len.div_ceil(16);
        #[cfg(test)]
        if tests::wants_exact_sizes() {
            return Self::new(lines);
        }
        let fits = |spare: &Vec<Line>| (lines..=lines.saturating_mul(2)).contains(&spare.len());
        if lines > 0
            && let Some(mut all) = spare()
            && let Some(found) = all.iter().position(fits)
        {
            return Ok(Self(all.swap_remove(found)));
        }
        Self::new(lines)
    }

    fn new(lines: usize) -> Result<Self> {
        let mut new = reserve(lines)?;
        new.resize(lines, Line([0.0; 16]));
        Ok(Self(new))
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }

    pub(crate) fn as_ptr(&self) -> *const f32 {
        self.0.as_ptr().cast()
    }

    /// Every number, in whole lines.
    #[cfg(test)]
    pub(crate) fn numbers(&self) -> &[f32] {
        // SAFETY: lines are arrays of sixteen f32 without gaps.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), 16 * self.0.len()) }
    }

    /// Sets all numbers; if a larger buffer was reused, also some beyond the end.
    pub(crate) fn fill(&mut self, value: f32) {
        self.0.fill(Line([value; 16]));
    }
}

impl Drop for Floats {
    fn drop(&mut self) {
        let Some(mut all) = spare() else { return };
        let kept: usize = all.iter().map(|spare| size_of_val(spare.as_slice())).sum();
        if !self.0.is_empty()
            && kept + size_of_val(self.0.as_slice()) <= MAX_SPARE_BYTES
            && all.try_reserve(1).is_ok()
        {
            all.push(std::mem::take(&mut self.0));
        }
    }
}

/// An output array of numbers, each written by one thread.
#[derive(Clone, Copy)]
pub(crate) struct Bytes(*mut u8);

// SAFETY: tasks write disjoint elements.
unsafe impl Send for Bytes {}
// SAFETY: tasks write disjoint elements.
unsafe impl Sync for Bytes {}

impl Bytes {
    pub(crate) fn new(slice: &DevSliceMut<'_>) -> Self {
        Self(slice.as_mut_ptr())
    }

    /// Address of scratch memory that several threads use.
    pub(crate) fn of(floats: &mut Floats) -> Self {
        Self(floats.as_mut_ptr().cast())
    }

    /// Address of f32 numbers of the caller.
    pub(crate) fn of_f32(numbers: &mut [f32]) -> Self {
        Self(numbers.as_mut_ptr().cast())
    }

    /// Address of i32 numbers of the caller.
    pub(crate) fn of_i32(numbers: &mut [i32]) -> Self {
        Self(numbers.as_mut_ptr().cast())
    }

    /// Address of f32 `index`.
    pub(crate) fn f32_from(self, index: usize) -> *mut f32 {
        self.0.cast::<f32>().wrapping_add(index)
    }

    /// # Safety
    /// f32 `index` is inside, and no other thread writes it.
    pub(crate) unsafe fn write_f32(self, index: usize, value: f32) {
        // SAFETY: promised by the caller: f32 `index` is inside, and no other thread writes it.
        unsafe { self.0.cast::<f32>().add(index).write_unaligned(value) }
    }

    /// # Safety
    /// i32 `index` is inside, and no other thread writes it.
    pub(crate) unsafe fn write_i32(self, index: usize, value: i32) {
        // SAFETY: promised by the caller: i32 `index` is inside, and no other thread writes it.
        unsafe { self.0.cast::<i32>().add(index).write_unaligned(value) }
    }

    /// # Safety
    /// Byte `index` is inside, and no other thread writes it.
    pub(crate) unsafe fn write_u8(self, index: usize, value: u8) {
        // SAFETY: promised by the caller: byte `index` is inside, and no other thread writes it.
        unsafe { self.0.add(index).write(value) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;
    use std::sync::PoisonError;

    use fmha_core::DevSlice;

    use super::*;

    /// Memory followed by a fence: any access beyond its end stops the process.
    pub(crate) struct Fenced(fmha_conformance::memory::Bytes);

    impl Fenced {
        pub(crate) fn new(bytes: &[u8]) -> Self {
            let mut fenced = fmha_conformance::memory::Bytes::beside_unmapped(bytes.len(), 0, true).unwrap();
            fenced.copy_from_slice(bytes);
            Self(fenced)
        }

        pub(crate) fn bytes(&self) -> &[u8] {
            &self.0
        }

        pub(crate) fn slice(&self) -> DevSlice<'_> {
            // SAFETY: as many bytes are there before the fence.
            unsafe {
                DevSlice::from_raw(
                    MemorySpace::Host,
                    self.0.as_ptr(),
                    self.0.len() as u64,
                    fmha_core::ElemType::Bytes,
                )
            }
        }

        pub(crate) fn slice_mut(&mut self) -> DevSliceMut<'_> {
            // SAFETY: as many bytes are there before the fence.
            unsafe {
                DevSliceMut::from_raw(
                    MemorySpace::Host,
                    self.0.as_mut_ptr(),
                    self.0.len() as u64,
                    fmha_core::ElemType::Bytes,
                )
            }
        }
    }

    /// Lock for tests that depend on the store's content.
    static STORE: Mutex<()> = Mutex::new(());

    /// Runs `work` with a store that is empty at first; tests in parallel may fill it again.
    fn with_empty_store<T>(work: impl FnOnce() -> T) -> T {
        let _alone = STORE.lock().unwrap_or_else(PoisonError::into_inner);
        spare().unwrap().clear();
        work()
    }

    thread_local! {
        static WANTS_EXACT_SIZES: Cell<bool> = const { Cell::new(false) };
    }

    pub(super) fn wants_exact_sizes() -> bool {
        WANTS_EXACT_SIZES.get()
    }

    /// Runs `work` without the store: allocations have their exact size in whole lines.
    pub(crate) fn in_exact_sizes<T>(work: impl FnOnce() -> T) -> T {
        WANTS_EXACT_SIZES.set(true);
        let done = work();
        WANTS_EXACT_SIZES.set(false);
        done
    }

    #[test]
    fn scratch_that_the_system_refuses_is_an_error_with_its_size() {
        let text = Floats::scratch(1 << 60).map(|_| ()).unwrap_err().to_string();
        assert!(text.contains(&(1u64 << 62).to_string()), "{text}");
    }

    /// Dropped scratch is kept up to a limit and reused. The sizes are far above those of other tests that run at
    /// the same time.
    #[test]
    fn dropped_scratch_is_kept_up_to_a_limit_and_given_to_who_wants_at_least_half_of_it() {
        let scratch = |lines: usize| Floats::scratch(16 * lines).unwrap();
        let kept = |lines: usize| spare().unwrap().iter().filter(|spare| spare.len() == lines).count();
        with_empty_store(|| {
            let (first, second, beyond) = (200_000, 700_000, MAX_SPARE_BYTES / size_of::<Line>() + 1);
            let [one, other] = [first, second].map(scratch);
            drop(one);
            drop(other);
            assert_eq!([first, second].map(kept), [1, 1]);
            drop(scratch(beyond));
            assert_eq!(kept(beyond), 0, "alone it is more than the store may have");
            drop(scratch(0));
            assert_eq!(kept(0), 0, "nothing is worth no place");

            let half = scratch(second / 2);
            assert_eq!((half.0.len(), kept(second)), (second, 0));
            let less = scratch(first / 2 - 1);
            assert_eq!((less.0.len(), kept(first)), (first / 2 - 1, 1));
            // Buffers of this size are of no use to other tests, so they are freed.
            drop((half, less));
            spare().unwrap().retain(|spare| spare.len() < first / 4);
        });
    }
}
