//! A device's queues, events on them, and recordings of their work.

use std::sync::atomic::{AtomicBool, Ordering};

use super::Device;
use crate::error::{Error, ProblemError, Result};
use crate::queues::Queues;

/// A queue of a device's work. Dropping it destroys the queue; work that is still queued is completed.
///
/// Safe code has no other way to a stream than its device's:
///
/// ```compile_fail,E0451
/// # fn forge(device: fmha_core::Device) -> fmha_core::Stream {
/// fmha_core::Stream { device, handle: 0xbad, owned: false, repeats_masks: false.into() }
/// # }
/// ```
#[derive(Debug)]
pub struct Stream {
    pub(super) device: Device,
    /// The driver's handle; 0 is the default stream.
    pub(super) handle: u64,
    pub(super) owned: bool,
    /// Whether a recording may contain calls with dropout, because its replays only measure time.
    repeats_masks: AtomicBool,
}

impl Stream {
    pub(super) fn new(device: &Device, handle: u64, owned: bool) -> Self {
        Self { device: device.clone(), handle, owned, repeats_masks: AtomicBool::new(false) }
    }

    /// Wraps a stream that the caller owns (a `CUstream`, a `hipStream_t`; 0 is the default one). The caller still has
    /// to destroy it.
    ///
    /// # Safety
    /// `handle` is a stream of the context that `device` computes in, and lives until this value is dropped and its
    /// work is done.
    #[must_use]
    pub unsafe fn from_raw(device: &Device, handle: u64) -> Self {
        Self::new(device, handle, false)
    }

    /// The driver's handle, for other libraries; 0 is the default stream.
    #[must_use]
    pub fn as_raw(&self) -> u64 {
        self.handle
    }

    /// Device of the stream.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits until all work queued on the stream is done.
    ///
    /// # Errors
    /// An error of the driver, or a failure of that work.
    pub fn synchronize(&self) -> Result<()> {
        match self.device.queues()? {
            // SAFETY: it lives as long as `self`.
            Some(queues) => unsafe { queues.synchronize(self.handle) },
            None => Ok(()),
        }
    }

    /// Makes work that is queued on this stream from now on wait until `event` is reached.
    ///
    /// # Errors
    /// `event`, if it is another device's; what the driver said.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device.has_it("event", &event.device)?;
        match (self.device.queues()?, event.handle) {
            // SAFETY: both live as long as they are borrowed.
            (Some(queues), Some(event)) => unsafe { queues.wait_event(self.handle, event) },
            _ => Ok(()),
        }
    }

    /// Seconds, by the device's clock, that the work takes that `queue` puts on the stream; waits for that work. An
    /// emulated device's seconds are the emulator's.
    ///
    /// # Errors
    /// What `queue` or the driver said; [`Error::NoDevice`] where there is no such clock.
    pub fn seconds(&self, queue: impl FnOnce() -> Result<()>) -> Result<f64> {
        let (start, stop) = (self.device.event()?, self.device.event()?);
        start.record(self)?;
        queue()?;
        stop.record(self)?;
        stop.seconds_since(&start)
    }

    /// Records what `queue` puts on the stream, which is not the default one, instead of running it. Each replay
    /// runs with the scalars of the recorded calls, so a call whose `p_drop` is above 0 is refused: each replay
    /// would repeat its keep mask.
    ///
    /// # Errors
    /// What `queue` or the driver said; [`Error::NoDevice`] where there are no streams.
    #[doc(alias = "graph")]
    #[doc(alias = "record")]
    pub fn capture(&self, mut queue: impl FnMut() -> Result<()>) -> Result<Recording> {
        let queues = self.device.queues()?.ok_or_else(|| no_streams(&self.device))?;
        // SAFETY: it lives as long as `self`.
        let graph = unsafe { queues.capture(self.handle, &mut queue)? };
        Ok(Recording { device: self.device.clone(), graph })
    }

    /// Records like [`capture`](Self::capture), also calls with dropout, for recordings that only measure time and
    /// whose results are not used.
    pub(crate) fn capture_for_its_time(&self, queue: impl FnMut() -> Result<()>) -> Result<Recording> {
        /// Guard that ends the recording's exception even where `queue` panics.
        struct Reset<'a>(&'a AtomicBool);
        impl Drop for Reset<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::Relaxed);
            }
        }
        self.repeats_masks.store(true, Ordering::Relaxed);
        let _reset = Reset(&self.repeats_masks);
        self.capture(queue)
    }

    /// Whether a recording from this stream may contain calls with dropout, although each replay repeats their keep
    /// mask.
    pub(crate) fn repeats_masks(&self) -> bool {
        self.repeats_masks.load(Ordering::Relaxed)
    }

    /// Handle of the stream, for a plan of `device`.
    ///
    /// # Errors
    /// `stream`, if it is another device's.
    #[inline]
    pub(crate) fn of(&self, device: &Device) -> Result<u64, ProblemError> {
        device.has_it("stream", &self.device)?;
        Ok(self.handle)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned
            && let Ok(Some(queues)) = self.device.queues()
        {
            // A stream that cannot be destroyed is gone with its context. SAFETY: `Device::stream` made the handle, and
            // nothing uses it any more.
            let _ = unsafe { queues.destroy_stream(self.handle) };
        }
    }
}

/// A point in a stream's work at which time can be taken, or for which another stream can wait.
#[derive(Debug)]
pub struct Event {
    pub(super) device: Device,
    /// The driver's handle; `None` on a device that completes all work before it returns.
    pub(super) handle: Option<u64>,
}

impl Event {
    /// Records the event: it is reached when all work queued on the stream so far is done.
    ///
    /// # Errors
    /// `stream`, if it is another device's; what the driver said.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let stream = stream.of(&self.device)?;
        match self.queues()? {
            // SAFETY: both live as long as they are borrowed.
            Some((queues, event)) => unsafe { queues.record_event(event, stream) },
            None => Ok(()),
        }
    }

    /// Waits until it is reached; at once where it was never recorded.
    ///
    /// # Errors
    /// An error of the driver, or a failure of the work before the event.
    pub fn synchronize(&self) -> Result<()> {
        match self.queues()? {
            // SAFETY: it lives as long as `self`.
            Some((queues, event)) => unsafe { queues.synchronize_event(event) },
            None => Ok(()),
        }
    }

    /// Seconds from `start` to here by the device's clock; waits for both.
    ///
    /// # Errors
    /// `start`, if it is another device's; what the driver said; [`Error::NoDevice`] where there is no clock.
    pub fn seconds_since(&self, start: &Event) -> Result<f64> {
        self.device.has_it("start", &start.device)?;
        match (self.queues()?, start.handle) {
            // SAFETY: both live as long as they are borrowed.
            (Some((queues, stop)), Some(start)) => unsafe {
                queues.synchronize_event(stop)?;
                queues.seconds_between(start, stop)
            },
            _ => Err(no_streams(&self.device)),
        }
    }

    fn queues(&self) -> Result<Option<(&dyn Queues, u64)>> {
        Ok(self.device.queues()?.zip(self.handle))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(Some((queues, event))) = self.queues() {
            // SAFETY: `Device::event` made the event, and nothing uses it any more.
            unsafe { queues.destroy_event(event) };
        }
    }
}

/// Work that was recorded once and can be queued again with one call: a graph.
#[derive(Debug)]
pub struct Recording {
    device: Device,
    graph: u64,
}

impl Recording {
    /// The device on which the work was recorded.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Queues the work on `stream`. Lengths are read anew, in the buffers that the recorded calls named.
    ///
    /// # Safety
    /// The memory that the recorded calls named is still there, and nothing else uses it until the work is done.
    ///
    /// # Errors
    /// `stream`, if it is another device's; what the driver said.
    pub unsafe fn replay(&self, stream: &Stream) -> Result<()> {
        let stream = stream.of(&self.device)?;
        match self.device.queues()? {
            // SAFETY: the caller keeps the contract of `replay`; the graph lives as long as `self`.
            Some(queues) => unsafe { queues.replay(self.graph, stream) },
            None => Err(no_streams(&self.device)),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Ok(Some(queues)) = self.device.queues() {
            // SAFETY: `Stream::capture` made the graph, and nothing uses it any more.
            unsafe { queues.destroy_graph(self.graph) };
        }
    }
}

fn no_streams(device: &Device) -> Error {
    Error::NoDevice(format!("{} has no streams: its work is done at return", device.name()))
}
