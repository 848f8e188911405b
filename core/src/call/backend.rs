//! The trait of a backend, without generics so that a backend can be chosen at run time, and the trait of device
//! memory.

use bytemuck::AnyBitPattern;

use crate::args::{DevSlice, DevSliceMut, Elem, ElemType, MemorySpace, Told};
use crate::bwd::ValidBwd;
use crate::cache::Precompile;
use crate::call::{Planned, Problem};
use crate::combine::ValidCombine;
use crate::dtype::DType;
use crate::error::{Error, ProblemError, Refusal, Result};
use crate::peers::Peers;
use crate::plan::{PlanOptions, Workspace};
use crate::problem::ValidFwd;
use crate::quantize::ValidQuantize;
use crate::queues::Queues;
use crate::roofline::Roofline;
use crate::sparse::{ValidChoose, ValidIndexLoss};
use crate::tune::Tune;

/// The interface that a vendor implements so that its devices run attention; a user has a
/// [`Device`](crate::Device).
///
/// A backend plans: it chooses a kernel and returns its launcher, or refuses and names the value that it does not
/// support. Core does the rest. [`Plan::run`](crate::Plan::run) checks the operands and the lengths, returns at
/// once from calls that write nothing, clears the part of the workspace that must be zero, and only then calls
/// [`Launch::launch`](crate::Launch::launch).
///
/// # Safety
/// What [`plan_fwd`](Self::plan_fwd), [`plan_bwd`](Self::plan_bwd) and [`plan_combine`](Self::plan_combine) return
/// was made for the problem that they were given. Launched as [`Launch::launch`](crate::Launch::launch) says, it reads
/// nothing but the operands, whatever numbers are in them, and writes nothing but the outputs and the workspace: each
/// of these within its extent. [`memory`](Self::memory) and [`queues`](Self::queues) are those of one device.
///
/// An implementation is therefore a promise, and a safe one does not compile:
///
/// ```compile_fail,E0200
/// # use fmha_core::*;
/// struct Careless;
/// impl FmhaBackend for Careless {
///     fn kind(&self) -> &'static str { "careless" }
///     fn name(&self) -> &str { "careless" }
///     fn kernels(&self) -> Vec<&'static str> { Vec::new() }
///     fn memory(&self) -> &dyn DeviceMemory { unimplemented!() }
///     fn plan_fwd(&self, _: &ValidFwd, _: &PlanOptions) -> Result<Planned<ValidFwd>> { unimplemented!() }
///     fn plan_bwd(&self, _: &ValidBwd, _: &PlanOptions) -> Result<Planned<ValidBwd>> { unimplemented!() }
///     fn plan_combine(&self, _: &ValidCombine, _: &PlanOptions) -> Result<Planned<ValidCombine>> { unimplemented!() }
/// }
/// ```
///
/// Nor can safe code launch what it has not checked:
///
/// ```compile_fail,E0133
/// # use fmha_core::*;
/// fn launch(planned: &Planned<ValidFwd>, call: &Call<'_, ValidFwd>) -> Result<()> {
///     planned.launch.launch(call)
/// }
/// ```
pub unsafe trait FmhaBackend: Send + Sync {
    /// The word that selects the backend, such as `cpu`.
    fn kind(&self) -> &'static str;

    /// Description of the device for people and logs: its name, cores and instructions.
    fn name(&self) -> &str;

    /// Peak rates of the device for products of `dtype`. A run reports which share of them it reaches.
    fn roofline(&self, _dtype: DType) -> Roofline {
        Roofline::default()
    }

    /// Every kernel this backend has, best first.
    fn kernels(&self) -> Vec<&'static str>;

    /// The backend as a compiler of kernels, if it compiles any.
    fn precompiler(&self) -> Option<&dyn Precompile> {
        None
    }

    /// The backend's interface to measure tiles, if it has tiles to measure.
    fn tuner(&self) -> Option<&dyn Tune> {
        None
    }

    /// The driver's queues. `None` if the backend computes in host memory before it returns, or if it only plans.
    fn queues(&self) -> Option<&dyn Queues> {
        None
    }

    /// The device's memory.
    fn memory(&self) -> &dyn DeviceMemory;

    /// The backend's interface to memory that processes of one host share, if it has one.
    fn peers(&self) -> Option<&dyn Peers> {
        None
    }

    /// Chooses a forward kernel, and loads it if there is a device. The first time this may take seconds.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with every refusal, or what the compiler or driver said.
    fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<Planned<ValidFwd>>;

    /// Whether the backend handles scores and masks as code ([`Code`](crate::Code)), and refuses by kernel name
    /// those that it cannot compute. If false, core gives it no such problem.
    fn takes_code(&self) -> bool {
        false
    }

    /// Whether the backend handles lists of keys ([`KeyLists`](crate::KeyLists)), and refuses by kernel name those
    /// that it cannot compute. If false, core gives it no such problem.
    fn takes_lists(&self) -> bool {
        false
    }

    /// Whether the backend handles a second cache ([`SecondCache`](crate::SecondCache)), and refuses by kernel name
    /// those that it cannot compute. If false, core gives it no such problem.
    fn takes_second(&self) -> bool {
        false
    }

    /// Whether the backend handles a cache whose rows are bytes that include their own scales
    /// ([`CacheRows`](crate::CacheRows)), and refuses by kernel name those that it cannot read. If false, core
    /// gives it no such problem.
    fn takes_cache_rows(&self) -> bool {
        false
    }

    /// Whether the backend handles masks as data ([`Masks`](crate::Masks)), and refuses by kernel name those that
    /// it cannot read. If false, core gives it no such problem.
    fn takes_masks(&self) -> bool {
        false
    }

    /// Whether the backend handles small outputs ([`SmallOutputs`](crate::SmallOutputs)), and refuses by kernel
    /// name those that it cannot write. If false, core gives it no such problem.
    fn takes_outputs(&self) -> bool {
        false
    }

    /// Whether the backend handles scales by blocks ([`BlockScales`](crate::BlockScales)), and refuses by kernel
    /// name those that it cannot compute. If false, core gives it no such problem.
    fn takes_block_scales(&self) -> bool {
        false
    }

    /// Chooses a backward kernel.
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    fn plan_bwd(&self, problem: &ValidBwd, options: &PlanOptions) -> Result<Planned<ValidBwd>>;

    /// Chooses a combine kernel.
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    fn plan_combine(&self, problem: &ValidCombine, options: &PlanOptions) -> Result<Planned<ValidCombine>>;

    /// Plans a choice: a kernel that selects keys or blocks for each query. A backend without such a kernel
    /// refuses, with its name in the error.
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    fn plan_choose(&self, problem: &ValidChoose, _: &PlanOptions) -> Result<Planned<ValidChoose>> {
        let reason = format!("topk {}: it chooses no keys", problem.topk);
        Err(unsupported(self.name(), vec![Refusal::new(self.kind(), reason)]))
    }

    /// Chooses a kernel that converts a tensor to a format with scales by blocks. A backend without such a kernel
    /// refuses, with its name in the error.
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    fn plan_quantize(&self, problem: &ValidQuantize, _: &PlanOptions) -> Result<Planned<ValidQuantize>> {
        let reason = format!("format {}: it converts no tensors", problem.format);
        Err(unsupported(self.name(), vec![Refusal::new(self.kind(), reason)]))
    }

    /// Chooses a kernel that computes the loss that trains an indexer, and its gradients. A backend that has none
    /// refuses by its name.
    ///
    /// # Errors
    /// As [`plan_fwd`](Self::plan_fwd).
    fn plan_index_loss(&self, problem: &ValidIndexLoss, _: &PlanOptions) -> Result<Planned<ValidIndexLoss>> {
        let reason = format!("topk {}: it computes no loss of an indexer", problem.topk);
        Err(unsupported(self.name(), vec![Refusal::new(self.kind(), reason)]))
    }
}

/// Memory of a device, for callers who have no tensors of their own.
pub trait DeviceMemory: Send + Sync {
    /// Memory space in which arguments of this backend lie.
    fn space(&self) -> MemorySpace;

    /// Allocates zeroed bytes without an element type, aligned to 256 bytes at least. Safe code may read them.
    ///
    /// # Errors
    /// [`Error::System`] or [`Error::Driver`] with the size that was asked for.
    fn alloc(&self, bytes: u64) -> Result<DevBuffer>;

    /// Allocates like [`alloc`](Self::alloc), but may skip the clearing.
    ///
    /// # Safety
    /// The memory may hold another process's data: safe code must not read a byte before it is written.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    unsafe fn alloc_uncleared(&self, bytes: u64) -> Result<DevBuffer> {
        self.alloc(bytes)
    }

    /// New memory for a plan's [`workspace`](crate::Plan::workspace); none for 0 bytes. Device memory may hold data
    /// of other processes, so its type is [`ElemType::Scratch`]: neither a call nor a download reads it.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    fn workspace(&self, workspace: Workspace) -> Result<Option<DevBuffer>> {
        if workspace.bytes == 0 {
            return Ok(None);
        }
        // SAFETY: memory of type Scratch is neither downloaded nor an input of a call.
        Ok(Some(unsafe { self.alloc_uncleared(workspace.bytes) }?.typed(ElemType::Scratch)))
    }

    /// Copies `bytes` to the front of `to`. Callers use [`upload`](#method.upload), which sets the type.
    ///
    /// # Errors
    /// [`Error::Problem`] when `to` is too small, or what the driver said.
    fn upload_bytes(&self, bytes: &[u8], to: &mut DevBuffer) -> Result<()>;

    /// Sets all bytes of `buffer` to 0, and waits until that is done. The default implementation uploads zeros.
    ///
    /// # Errors
    /// As [`upload_bytes`](Self::upload_bytes), and [`Error::System`] where the host has no room for the zeros.
    fn zero(&self, buffer: &mut DevBuffer) -> Result<()> {
        let zeros = zeros("a buffer's zeros", buffer.bytes())?;
        self.upload_bytes(&zeros, buffer)
    }

    /// Copies the front of `from` to `bytes`. Callers use [`download`](#method.download), which checks the type.
    ///
    /// # Errors
    /// [`Error::Problem`] when `from` is too small, or what the driver said.
    fn download_bytes(&self, from: &DevBuffer, bytes: &mut [u8]) -> Result<()>;

    /// Whether this memory refuses every access outside an allocation, to the byte, as emulated memory does. Tests
    /// then give each tensor an allocation of exactly its extent, so that a read past its end is found.
    fn checks_bounds(&self) -> bool {
        false
    }

    /// Allocates memory next to unmapped addresses, which follow its end (`at_end`) or precede its begin, so that
    /// an access outside faults. For tests, since it may take megabytes. Aligned to 16 bytes, so up to 15 unused
    /// bytes may lie before the end. `None` if the device cannot do this, or checks bounds anyway.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    fn alloc_at_edge(&self, _bytes: u64, _at_end: bool) -> Result<Option<DevBuffer>> {
        Ok(None)
    }
}

impl dyn DeviceMemory + '_ {
    /// New memory for `count` elements of a type, all 0.
    ///
    /// ```
    /// # fn new(device: &fmha_core::Device) -> fmha_core::Result<()> {
    /// let o = device.memory().alloc_of(fmha_core::DType::Bf16, 1024)?;
    /// assert_eq!(o.bytes(), 2048);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`alloc`](DeviceMemory::alloc).
    pub fn alloc_of(&self, elem: impl Into<ElemType>, count: u64) -> Result<DevBuffer> {
        let elem = elem.into();
        Ok(self.alloc(count.saturating_mul(elem.size_bytes()))?.typed(elem))
    }

    /// Allocates memory, copies these elements into it and sets its type to theirs.
    ///
    /// # Errors
    /// As [`alloc`](DeviceMemory::alloc) and [`upload`](#method.upload).
    pub fn place<T: Elem>(&self, elems: &[T]) -> Result<DevBuffer> {
        let mut buffer = self.alloc(size_of_val(elems) as u64)?;
        self.upload(elems, &mut buffer)?;
        Ok(buffer)
    }

    /// Copies `elems` to the front of `to`, which then has their type: a call whose problem has another type
    /// refuses the buffer. Elements of type `u8` leave the type of `to` as it is, unless a call had set it.
    ///
    /// # Errors
    /// [`Error::Problem`] when `to` is too small, or what the driver said.
    pub fn upload<T: Elem>(&self, elems: &[T], to: &mut DevBuffer) -> Result<()> {
        self.upload_bytes(bytemuck::cast_slice(elems), to)?;
        if T::TYPE != ElemType::Bytes || to.elem.is_by_a_call() {
            to.set_elem(T::TYPE);
        }
        Ok(())
    }

    /// Copies the front of `from` to `elems`. Bytes (`u8`) may be read from elements of every type.
    ///
    /// # Errors
    /// [`Error::Problem`] when `from` is too small, has elements of another type or is a workspace; or what the driver
    /// said.
    pub fn download<T: Elem + AnyBitPattern>(&self, from: &DevBuffer, elems: &mut [T]) -> Result<()> {
        let elem = from.elem();
        if !elem.serves(T::TYPE) || elem == ElemType::Scratch {
            let text = format!("from has elements of {}, but is read as {}", elem, T::TYPE);
            return Err(ProblemError::new("from", text).into());
        }
        self.download_bytes(from, bytemuck::cast_slice_mut(elems))
    }
}

/// Zeroed memory of the host, for `purpose`, which an error names.
pub(crate) fn zeros(purpose: &str, bytes: u64) -> Result<Vec<u8>> {
    let refused = || Error::System {
        what: format!("{bytes} bytes for {purpose}"),
        text: "the system has no such memory".to_owned(),
    };
    let size = usize::try_from(bytes).map_err(|_| refused())?;
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(size).map_err(|_| refused())?;
    buffer.resize(size, 0);
    Ok(buffer)
}

/// Memory that a [`DeviceMemory`] allocated, freed when dropped. The buffer and its slices have an element type:
/// that of the upload, of [`typed`](DevBuffer::typed), or of the last call that wrote the buffer.
pub struct DevBuffer {
    space: MemorySpace,
    ptr: *mut u8,
    bytes: u64,
    elem: Told,
    free: Option<Box<dyn FnOnce(*mut u8) + Send>>,
}

// SAFETY: the buffer is the only owner of its memory; the pointer is only used for launches and copies.
unsafe impl Send for DevBuffer {}
// SAFETY: the buffer is the only owner of its memory; the pointer is only used for launches and copies.
unsafe impl Sync for DevBuffer {}

impl DevBuffer {
    /// Takes ownership of `bytes` at `ptr`; `free` frees them. The element type is unknown until
    /// [`typed`](Self::typed) sets it.
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
        Self { space, ptr, bytes, elem: Told::new(ElemType::Bytes), free: Some(free) }
    }

    /// Returns this memory, whose elements now have this type if their type was unknown; i32 and u32 may replace each
    /// other.
    #[must_use]
    pub fn typed(mut self, elem: impl Into<ElemType>) -> Self {
        self.elem = Told::new(self.elem().retyped(elem.into()));
        self
    }

    /// Sets the type of uploaded elements; a workspace stays a workspace.
    fn set_elem(&mut self, elem: ElemType) {
        if self.elem() != ElemType::Scratch {
            self.elem = Told::new(elem);
        }
    }

    /// The type of the buffer's elements.
    #[must_use]
    pub fn elem(&self) -> ElemType {
        self.elem.read()
    }

    /// The memory's space.
    #[must_use]
    pub fn space(&self) -> MemorySpace {
        self.space
    }

    /// The buffer's size, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The buffer's first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Borrows the buffer as an input.
    #[must_use]
    pub fn slice(&self) -> DevSlice<'_> {
        // SAFETY: `from_raw` promised the memory; the borrow keeps it alive.
        unsafe { DevSlice::from_raw(self.space, self.ptr, self.bytes, self.elem()) }
    }

    /// Borrows the buffer as an output.
    #[must_use]
    pub fn slice_mut(&mut self) -> DevSliceMut<'_> {
        // SAFETY: `from_raw` promised the memory; the borrow is exclusive.
        unsafe { DevSliceMut::of_buffer(self.space, self.ptr, self.bytes, &self.elem) }
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
        write!(f, "DevBuffer({} bytes of {}, {:?})", self.bytes, self.elem(), self.space)
    }
}

/// [`Error::Unsupported`] for one reason that holds for every kernel of a backend.
#[must_use]
pub fn unsupported(backend: &str, refusals: Vec<crate::error::Refusal>) -> Error {
    Error::Unsupported { backend: backend.to_owned(), refusals }
}

/// Refuses a problem with lists of keys, a second cache or rows of bytes for each kernel of a backend that does not
/// handle them.
///
/// # Errors
/// [`Error::Unsupported`] with one refusal for each kernel.
pub fn refuse_lists<P: Problem>(backend: &dyn FmhaBackend, problem: &P) -> Result<()> {
    let Some(fwd) = problem.forward() else { return Ok(()) };
    let refused = |kernel| {
        let by_lists = if backend.takes_lists() { None } else { fwd.refuse_lists(kernel).err() };
        let by_second = || if backend.takes_second() { None } else { fwd.refuse_second(kernel).err() };
        let by_rows = || if backend.takes_cache_rows() { None } else { fwd.refuse_cache_rows(kernel).err() };
        by_lists.or_else(by_second).or_else(by_rows)
    };
    let refusals: Vec<_> = backend.kernels().into_iter().filter_map(refused).collect();
    if refusals.is_empty() { Ok(()) } else { Err(unsupported(backend.name(), refusals)) }
}

/// Refuses a problem with scales by blocks for each kernel of a backend that does not handle them.
///
/// # Errors
/// [`Error::Unsupported`] with one refusal for each kernel.
pub fn refuse_block_scales<P: Problem>(backend: &dyn FmhaBackend, problem: &P) -> Result<()> {
    let Some(fwd) = problem.forward().filter(|_| !backend.takes_block_scales()) else { return Ok(()) };
    let refused = |kernel| fwd.refuse_block_scales(kernel).err();
    let refusals: Vec<_> = backend.kernels().into_iter().filter_map(refused).collect();
    if refusals.is_empty() { Ok(()) } else { Err(unsupported(backend.name(), refusals)) }
}

/// Refuses a problem with small outputs for each kernel of a backend that does not handle them.
///
/// # Errors
/// [`Error::Unsupported`] with one refusal for each kernel.
pub fn refuse_outputs<P: Problem>(backend: &dyn FmhaBackend, problem: &P) -> Result<()> {
    if backend.takes_outputs() {
        return Ok(());
    }
    let refused = |kernel| problem.outputs().refuse(kernel).err();
    let refusals: Vec<_> = backend.kernels().into_iter().filter_map(refused).collect();
    if refusals.is_empty() { Ok(()) } else { Err(unsupported(backend.name(), refusals)) }
}

/// Refuses a problem with a score or a mask as code, or with masks as data, for each kernel of a backend that does
/// not handle them.
///
/// # Errors
/// [`Error::Unsupported`] with one refusal for each kernel.
pub fn refuse_code<P: Problem>(backend: &dyn FmhaBackend, problem: &P) -> Result<()> {
    let code = problem.code().filter(|_| !backend.takes_code());
    let masks = problem.masks().filter(|_| !backend.takes_masks());
    let refused = |kernel| {
        let by_code = code.and_then(|code| code.refuse(kernel).err());
        by_code.or_else(|| masks.and_then(|masks| masks.refuse(kernel).err()))
    };
    let refusals: Vec<_> = backend.kernels().into_iter().filter_map(refused).collect();
    if refusals.is_empty() { Ok(()) } else { Err(unsupported(backend.name(), refusals)) }
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
