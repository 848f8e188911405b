//! Host memory: for callers who have no tensors of their own, and scratch that may be refused.

use std::alloc::{Layout, alloc, dealloc};

use fmha_core::{DevBuffer, DeviceMemory, Error, MemorySpace, ProblemError, Result, Stream};

/// The processor's own memory.
#[derive(Debug)]
pub(crate) struct HostMemory;

const ALIGN: usize = 256;

impl DeviceMemory for HostMemory {
    fn space(&self) -> MemorySpace {
        MemorySpace::Host
    }

    fn alloc(&self, bytes: u64) -> Result<DevBuffer> {
        let layout = usize::try_from(bytes)
            .ok()
            .and_then(|size| Layout::from_size_align(size.max(1), ALIGN).ok())
            .ok_or_else(|| no_memory(bytes))?;
        // SAFETY: the layout has at least one byte.
        let ptr = unsafe { alloc(layout) };
        if ptr.is_null() {
            return Err(no_memory(bytes));
        }
        // SAFETY: allocated above with this layout.
        let free = Box::new(move |ptr| unsafe { dealloc(ptr, layout) });
        // SAFETY: `ptr` is ours alone until `free` has run.
        Ok(unsafe { DevBuffer::from_raw(MemorySpace::Host, ptr, bytes, free) })
    }

    fn upload(&self, bytes: &[u8], to: &mut DevBuffer) -> Result<()> {
        check_fits("to", bytes.len(), to.bytes())?;
        // SAFETY: `to` owns at least this many bytes, and nobody else writes them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn download(&self, from: &DevBuffer, bytes: &mut [u8]) -> Result<()> {
        check_fits("from", bytes.len(), from.bytes())?;
        // SAFETY: `from` owns at least this many bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn synchronize(&self, _stream: Stream) -> Result<()> {
        Ok(())
    }
}

fn check_fits(field: &'static str, wanted: usize, has: u64) -> Result<()> {
    if wanted as u64 > has {
        let text = format!("{field} has {has} bytes, fewer than the {wanted} to copy");
        return Err(ProblemError::new(field, text).into());
    }
    Ok(())
}

/// The error for memory that the system refused.
pub(crate) fn no_memory(bytes: u64) -> Error {
    Error::System { what: format!("{bytes} bytes of host memory"), text: "the system has not so much".into() }
}

/// An empty vector with room for `count`, or the refusal with its size.
pub(crate) fn reserve<T>(count: usize) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    let bytes = (count as u64).saturating_mul(size_of::<T>() as u64);
    vec.try_reserve_exact(count).map_err(|_| no_memory(bytes))?;
    Ok(vec)
}

/// One cache line of f32.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Zeroed f32, aligned to 64 bytes.
pub(crate) struct Floats(Vec<Line>);

impl Floats {
    /// `len` zeros, or the refusal with its size.
    pub(crate) fn zeroed(len: usize) -> Result<Self> {
        let lines = len.div_ceil(16);
        let mut all = reserve(lines)?;
        all.resize(lines, Line([0.0; 16]));
        Ok(Self(all))
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }

    pub(crate) fn as_ptr(&self) -> *const f32 {
        self.0.as_ptr().cast()
    }

    pub(crate) fn fill(&mut self, value: f32) {
        self.0.fill(Line([value; 16]));
    }
}
