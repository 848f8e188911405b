//! Services of a backend with queues: its driver's streams, events, graphs and copies, by the driver's own
//! handles.

use crate::error::Result;

/// A device's queues as its driver has them; users have [`Stream`](crate::Stream), [`Event`](crate::Event) and
/// [`Recording`](crate::Recording), which own the handles made here. A backend without queues, such as the CPU's,
/// computes at once.
///
/// In every function stream 0 is the default stream, and a live handle is one that the same queues made and have
/// not destroyed (or, of a stream, one that [`Stream::from_raw`](crate::Stream::from_raw) was promised).
pub trait Queues: Send + Sync {
    /// A new queue of work, which does not wait for the default one.
    ///
    /// # Errors
    /// An error of the driver.
    fn create_stream(&self) -> Result<u64>;

    /// Ends a queue; its work is done nevertheless.
    ///
    /// # Safety
    /// [`create_stream`](Self::create_stream) made it, and it is not used again.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn destroy_stream(&self, stream: u64) -> Result<()>;

    /// Waits until all work queued on `stream` is done.
    ///
    /// # Safety
    /// A live stream.
    ///
    /// # Errors
    /// An error of the driver, or a failure of that work.
    unsafe fn synchronize(&self, stream: u64) -> Result<()>;

    /// Queues a fill with zeros, in the order of `stream`; a capture records it.
    ///
    /// # Safety
    /// A live stream; `address .. address + bytes` is device memory that the stream may write then.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn zero(&self, address: *mut u8, bytes: u64, stream: u64) -> Result<()>;

    /// Queues a copy from device memory to device memory: in the order of `stream`; a capture records it.
    ///
    /// # Safety
    /// A live stream; both are memory of the device, of `bytes` bytes that do not overlap; the stream may then read
    /// `from` and write `to`.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn copy_bytes(&self, from: *const u8, to: *mut u8, bytes: u64, stream: u64) -> Result<()>;

    /// Copies device memory to the host, and waits until the copy is done.
    ///
    /// # Safety
    /// `from .. from + to.len()` is device memory that no queued work writes.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn read(&self, from: *const u8, to: &mut [u8]) -> Result<()>;

    /// A new event.
    ///
    /// # Errors
    /// An error of the driver, or a device without events.
    fn create_event(&self) -> Result<u64>;

    /// Ends an event.
    ///
    /// # Safety
    /// [`create_event`](Self::create_event) made it, and it is not used again.
    unsafe fn destroy_event(&self, event: u64);

    /// Records an event, which is reached when all work queued on the stream so far is done.
    ///
    /// # Safety
    /// Both are live.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn record_event(&self, event: u64, stream: u64) -> Result<()>;

    /// Makes all work queued on the stream from now on wait for the event.
    ///
    /// # Safety
    /// Both are live.
    ///
    /// # Errors
    /// An error of the driver, or a device without events.
    unsafe fn wait_event(&self, stream: u64, event: u64) -> Result<()>;

    /// Waits until the event is reached.
    ///
    /// # Safety
    /// A live event.
    ///
    /// # Errors
    /// An error of the driver, which includes failures of the work before the event.
    unsafe fn synchronize_event(&self, event: u64) -> Result<()>;

    /// Seconds between two events that are reached.
    ///
    /// # Safety
    /// Both are live.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn seconds_between(&self, start: u64, stop: u64) -> Result<f64>;

    /// Whether the device has a clock of its own: an emulated device has none, and reports the emulator's seconds.
    fn has_clock(&self) -> bool {
        true
    }

    /// Whether work put on `stream` is recorded instead of run, no matter who began the recording.
    ///
    /// # Safety
    /// A live stream.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn is_capturing(&self, stream: u64) -> Result<bool>;

    /// Records what `queue` puts on `stream` instead of running it; other threads' calls do not disturb that. The
    /// recording has ended when this function returns, also with an error.
    ///
    /// # Safety
    /// A live stream.
    ///
    /// # Errors
    /// What `queue` or the driver said.
    unsafe fn capture(&self, stream: u64, queue: &mut dyn FnMut() -> Result<()>) -> Result<u64>;

    /// Queues the recorded work.
    ///
    /// # Safety
    /// Both are live; the memory that the recorded calls named is there, and nothing else uses it until the work is
    /// done.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn replay(&self, graph: u64, stream: u64) -> Result<()>;

    /// Ends a recording.
    ///
    /// # Safety
    /// [`capture`](Self::capture) made it, and it is not used again.
    unsafe fn destroy_graph(&self, graph: u64);
}
