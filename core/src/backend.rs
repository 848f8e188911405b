//! What a backend is: two traits without generics, so that it can be chosen at run time.

use crate::args::{BwdArgs, CombineArgs, FwdArgs, MemorySpace};
use crate::bwd::ValidBwd;
use crate::cache::Precompile;
use crate::combine::ValidCombine;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::{BwdPlan, CombinePlan, FwdPlan, PlanOptions, Workspace};
use crate::problem::ValidFwd;
use crate::queues::{Queues, Stream};
use crate::roofline::Roofline;
use crate::tune::Tune;

/// A device that can run attention.
///
/// `plan_*` chooses and compiles, and may take seconds the first time; `run_*` checks the pointers
/// against the plan, queues the work on `stream` and returns. Nothing wrong is launched: an error
/// leaves every output as it was, except [`Error::Driver`] from the device itself.
///
/// A run borrows its arguments, and so its outputs, exclusively: nobody else holds them, nor can two
/// threads run one set of arguments.
///
/// ```compile_fail,E0596
/// # use fmha_core::*;
/// fn run(backend: &dyn FmhaBackend, plan: &FwdPlan, args: &FwdArgs<'_>) -> Result<()> {
///     backend.run_fwd(plan, args, Stream::DEFAULT)
/// }
/// ```
///
/// ```compile_fail,E0502
/// # use fmha_core::*;
/// fn run(backend: &dyn FmhaBackend, plan: &FwdPlan, mut args: FwdArgs<'_>) -> Option<u8> {
///     let o = args.o.as_input();
///     backend.run_fwd(plan, &mut args, Stream::DEFAULT).ok()?;
///     o.as_host()?.first().copied()
/// }
/// ```
///
/// ```
/// # use fmha_core::*;
/// fn run(backend: &dyn FmhaBackend, plan: &FwdPlan, mut args: FwdArgs<'_>) -> Option<u8> {
///     backend.run_fwd(plan, &mut args, Stream::DEFAULT).ok()?;
///     args.o.as_input().as_host()?.first().copied()
/// }
/// ```
pub trait FmhaBackend: Send + Sync {
    /// The name that selects it: `cpu`.
    fn kind(&self) -> &'static str;

    /// For people and logs: which device, how many cores, which instructions.
    fn name(&self) -> &str;

    /// What the device could reach at best with products of `dtype`, for the share that a run reports.
    fn roofline(&self, _dtype: DType) -> Roofline {
        Roofline::default()
    }

    /// Every kernel this backend has, best first.
    fn kernels(&self) -> Vec<&'static str>;

    /// Itself as a compiler of kernels, if it compiles any.
    fn precompiler(&self) -> Option<&dyn Precompile> {
        None
    }

    /// Itself as something whose tiles can be measured, if they can.
    fn tuner(&self) -> Option<&dyn Tune> {
        None
    }

    /// Its streams, if it has any.
    fn queues(&self) -> Option<&dyn Queues> {
        None
    }

    /// Where its memory is.
    fn memory(&self) -> &dyn DeviceMemory;

    /// Chooses a forward kernel.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with every refusal, or what the compiler or driver said.
    fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<FwdPlan>;

    /// Queues a forward kernel.
    ///
    /// # Errors
    /// [`Error::Problem`] for arguments that do not fit the plan, before anything is launched.
    fn run_fwd(&self, plan: &FwdPlan, args: &mut FwdArgs<'_>, stream: Stream) -> Result<()>;

    /// Chooses a backward kernel.
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    fn plan_bwd(&self, problem: &ValidBwd, options: &PlanOptions) -> Result<BwdPlan>;

    /// Queues a backward kernel.
    ///
    /// # Errors
    /// As [`run_fwd`](Self::run_fwd).
    fn run_bwd(&self, plan: &BwdPlan, args: &mut BwdArgs<'_>, stream: Stream) -> Result<()>;

    /// Chooses a combine kernel.
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    fn plan_combine(&self, problem: &ValidCombine, options: &PlanOptions) -> Result<CombinePlan>;

    /// Queues a combine kernel.
    ///
    /// # Errors
    /// As [`run_fwd`](Self::run_fwd).
    fn run_combine(&self, plan: &CombinePlan, args: &mut CombineArgs<'_>, stream: Stream) -> Result<()>;
}

/// Memory of a device, for callers who have no tensors of their own.
pub trait DeviceMemory: Send + Sync {
    /// Where a backend's arguments must lie.
    fn space(&self) -> MemorySpace;

    /// New memory, aligned to 256 bytes at least. Of the host: zeros, since safe code may read them; of a device:
    /// whatever the device's memory held.
    ///
    /// # Errors
    /// [`Error::System`] or [`Error::Driver`] with the size that was asked for.
    fn alloc(&self, bytes: u64) -> Result<DevBuffer>;

    /// New memory for a plan's [`workspace`](crate::Plan::workspace), contents undefined; none for 0
    /// bytes.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    fn workspace(&self, workspace: Workspace) -> Result<Option<DevBuffer>> {
        if workspace.bytes == 0 { Ok(None) } else { self.alloc(workspace.bytes).map(Some) }
    }

    /// Copies `bytes` to the front of `to`.
    ///
    /// # Errors
    /// [`Error::Problem`] when `to` is too small, or what the driver said.
    fn upload(&self, bytes: &[u8], to: &mut DevBuffer) -> Result<()>;

    /// Copies the front of `from` to `bytes`.
    ///
    /// # Errors
    /// [`Error::Problem`] when `from` is too small, or what the driver said.
    fn download(&self, from: &DevBuffer, bytes: &mut [u8]) -> Result<()>;

    /// Whether it refuses every access outside an allocation, to the byte: emulated memory does. Tests then give
    /// each tensor an allocation of its own extent, so that a read past its end is found.
    fn checks_bounds(&self) -> bool {
        false
    }

    /// New memory that ends (`at_end`) or begins beside addresses where every access stops the work: for tests, since it
    /// may take megabytes. Aligned to 16 bytes, so up to 15 bytes may lie before that end. `None` where the memory
    /// has no such places, or checks bounds anyway.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    fn alloc_at_edge(&self, _bytes: u64, _at_end: bool) -> Result<Option<DevBuffer>> {
        Ok(None)
    }

    /// Waits until all work queued on `stream` is done.
    ///
    /// # Errors
    /// What the driver said, of that work too.
    fn synchronize(&self, stream: Stream) -> Result<()>;
}

/// Memory that a [`DeviceMemory`] gave out; goes back when dropped.
pub struct DevBuffer {
    space: MemorySpace,
    ptr: *mut u8,
    bytes: u64,
    free: Option<Box<dyn FnOnce(*mut u8) + Send>>,
}

// SAFETY: it owns its memory alone; the pointer is only handed out for launches and copies.
unsafe impl Send for DevBuffer {}
// SAFETY: as above.
unsafe impl Sync for DevBuffer {}

impl DevBuffer {
    /// Takes charge of `bytes` at `ptr`; `free` gives them back.
    ///
    /// # Safety
    /// `ptr .. ptr + bytes` is memory of `space` that nobody else uses and that lives until `free`
    /// has run.
    #[must_use]
    pub unsafe fn from_raw(
        space: MemorySpace,
        ptr: *mut u8,
        bytes: u64,
        free: Box<dyn FnOnce(*mut u8) + Send>,
    ) -> Self {
        Self { space, ptr, bytes, free: Some(free) }
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// As an input.
    #[must_use]
    pub fn slice(&self) -> crate::args::DevSlice<'_> {
        // SAFETY: `from_raw` promised the memory; the borrow keeps it alive.
        unsafe { crate::args::DevSlice::from_raw(self.space, self.ptr, self.bytes) }
    }

    /// As an output.
    #[must_use]
    pub fn slice_mut(&mut self) -> crate::args::DevSliceMut<'_> {
        // SAFETY: `from_raw` promised the memory; the borrow is exclusive.
        unsafe { crate::args::DevSliceMut::from_raw(self.space, self.ptr, self.bytes) }
    }
}

impl Drop for DevBuffer {
    fn drop(&mut self) {
        if let Some(free) = self.free.take() {
            free(self.ptr);
        }
    }
}

impl std::fmt::Debug for DevBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DevBuffer({} bytes, {:?})", self.bytes, self.space)
    }
}

/// [`Error::Unsupported`] for one reason that holds for every kernel of a backend.
#[must_use]
pub fn unsupported(backend: &str, refusals: Vec<crate::error::Refusal>) -> Error {
    Error::Unsupported { backend: backend.to_owned(), refusals }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    thread_local! {
        static FREED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    }

    #[test]
    fn a_buffer_is_given_back_once_when_it_is_dropped() {
        let buffer = |address: usize| {
            let free = Box::new(|ptr: *mut u8| FREED.with_borrow_mut(|freed| freed.push(ptr as usize)));
            // SAFETY: nobody reads or writes it.
            unsafe { DevBuffer::from_raw(MemorySpace::Host, address as *mut u8, 64, free) }
        };
        let (first, second) = (buffer(0x1000), buffer(0x2000));
        assert!(FREED.take().is_empty());
        drop(second);
        assert_eq!(FREED.take(), [0x2000]);
        drop(first);
        assert_eq!(FREED.take(), [0x1000]);
    }
}
