//! What a device with queues of its own offers besides running a plan: streams, its clock, recordings.

use crate::error::Result;

/// A queue of work on a device: the vendor's own handle. The CPU has one, which is done at return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

impl Stream {
    /// The device's default queue.
    pub const DEFAULT: Self = Self(0);
}

/// A device's streams. A backend that has none, as the CPU's, computes at once and is timed by the
/// host's clock.
pub trait Queues: Send + Sync {
    /// A new queue of work.
    ///
    /// # Errors
    /// What the driver said.
    fn create_stream(&self) -> Result<Stream>;

    /// Ends a queue that [`create_stream`](Self::create_stream) made and whose work is done.
    ///
    /// # Errors
    /// What the driver said.
    fn destroy_stream(&self, stream: Stream) -> Result<()>;

    /// Whether there is a device whose clock it is: an emulated one has none, and its seconds are the
    /// emulator's.
    fn has_clock(&self) -> bool {
        true
    }

    /// Seconds, by the device's clock, of the work that `queue` puts on `stream`; waits for it.
    ///
    /// # Errors
    /// What `queue` or the driver said.
    fn seconds(&self, stream: Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<f64>;

    /// Records what `queue` puts on `stream`, which is not the default one, instead of running it.
    ///
    /// # Errors
    /// What `queue` or the driver said.
    #[doc(alias = "graph")]
    fn record(&self, stream: Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recording>>;
}

/// Work that was recorded once and can be queued again with one call: a graph.
pub trait Recording: Send {
    /// Queues the work on `stream`. Lengths are read anew, in the buffers that the recorded calls
    /// named.
    ///
    /// # Safety
    /// The memory that the recorded calls named is still there, and nothing else uses it until the
    /// work is done.
    ///
    /// # Errors
    /// What the driver said.
    unsafe fn replay(&self, stream: Stream) -> Result<()>;
}
