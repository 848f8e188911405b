//! Operations of a vendor's libraries.

use std::ffi::c_void;
use std::sync::Arc;

use fmha_core::cache::Compiler;
use fmha_core::{DevBuffer, Peers, Queues, Result};

use crate::launches::Grid;

/// A vendor's driver on one device, with only the calls that attention needs.
///
/// # Safety
/// Memory from [`alloc`](Self::alloc) belongs to the caller alone until it is freed, and lies on the device of the
/// [`Queues`].
pub unsafe trait Driver: Queues + 'static {
    /// A loaded kernel, which is unloaded when it is dropped.
    type Kernel: Send + Sync;

    /// State that a recipe keeps for a step between calls: tensor maps, or nothing.
    type Kept: Default + Send + Sync;

    /// While this value lives the device is current in the calling thread; dropping it makes the caller's device
    /// current again.
    type Entered<'a>
    where
        Self: 'a;

    /// Whether the driver is a test double, whose times and limits are not those of a real device.
    fn is_emulated(&self) -> bool;

    /// Operations on memory that processes of one host share; `None` if the driver has none.
    fn peers(&self) -> Option<&dyn Peers> {
        None
    }

    /// Makes the device current in the calling thread until the result is dropped.
    ///
    /// # Errors
    /// An error of the driver.
    fn enter(&self) -> Result<Self::Entered<'_>>;

    /// Allocates memory of at least one byte, aligned to 256 bytes at least.
    ///
    /// # Errors
    /// An error of the driver, with the size.
    fn alloc(&self, bytes: u64) -> Result<u64>;

    /// Frees memory. Errors are dropped: no caller is left to report them to.
    ///
    /// # Safety
    /// [`alloc`](Self::alloc) gave the memory, and nothing uses it any more.
    unsafe fn free(&self, address: u64);

    /// Copies to the device, and waits until every stream sees the bytes.
    ///
    /// # Safety
    /// `to .. to + bytes.len()` is device memory that no queued work uses.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn upload(&self, bytes: &[u8], to: u64) -> Result<()>;

    /// Allocates memory that ends or begins next to unmapped addresses, as
    /// [`DeviceMemory::alloc_at_edge`](fmha_core::DeviceMemory::alloc_at_edge); `None` if the driver cannot
    /// map any.
    ///
    /// # Errors
    /// An error of the driver.
    fn alloc_at_edge(self: &Arc<Self>, _bytes: u64, _at_end: bool) -> Result<Option<DevBuffer>> {
        Ok(None)
    }

    /// Loads the kernel named `entry` to the device. It will be launched with `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// An error of the driver about the image.
    fn load(self: &Arc<Self>, image: &[u8], entry: &str, shared_bytes: u32) -> Result<Self::Kernel>;

    /// Queues a kernel; the calling thread has [entered](Self::enter) its device.
    ///
    /// # Safety
    /// `arguments` point to the kernel's parameters, in order and of the right types. The device memory that
    /// they name has the size that the kernel's contract asks for. The stream is live.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn launch(
        kernel: &Self::Kernel,
        grid: Grid,
        arguments: &mut [*mut c_void],
        stream: u64,
    ) -> Result<()>;
}

/// Search for a vendor's compiler.
pub trait Toolchain: Send + Sync + 'static {
    /// The compiler, which is searched for when the first kernel is compiled.
    ///
    /// # Errors
    /// [`Error::NoDevice`](fmha_core::Error::NoDevice) with every place searched.
    fn compiler(&self) -> Result<&dyn Compiler>;
}
