//! Streams' events and graphs: optional in a library, an error where it lacks them.

use std::ffi::c_int;

use fmha_core::{Error, Queues, Recording, Result, Stream};

use super::sys::Handle;
use super::{Driver, handle};

/// A moment on a stream, with a clock.
pub struct Event {
    driver: Driver,
    event: Handle,
}

/// Work captured from a stream, to be queued again at one call.
pub struct Graph {
    driver: Driver,
    executable: Handle,
}

// SAFETY: handles of the driver, which is thread-safe.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}
// SAFETY: as above.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

/// `hipStreamCaptureModeThreadLocal`: other threads' calls do not disturb the capture.
const CAPTURE_MODE: c_int = 1;

macro_rules! optional {
    ($driver:expr, $name:ident) => {
        $driver.hip().$name.ok_or_else(|| Error::NoDevice(format!("libamdhip64 lacks {}", stringify!($name))))
    };
}

impl Event {
    pub(crate) fn new(driver: &Driver) -> Result<Self> {
        let _selected = driver.select()?;
        let create = optional!(driver, hipEventCreate)?;
        let mut event: Handle = std::ptr::null_mut();
        // SAFETY: `event` is a pointer to fill.
        driver.check("hipEventCreate", unsafe { create(&raw mut event) })?;
        Ok(Self { driver: driver.clone(), event })
    }

    #[cfg(test)]
    pub(super) fn handle(&self) -> Handle {
        self.event
    }

    /// Marks the point of `stream` that its work has reached when it gets here.
    ///
    /// # Errors
    /// What the driver said.
    pub fn record(&self, stream: Stream) -> Result<()> {
        let _selected = self.driver.select()?;
        let record = optional!(self.driver, hipEventRecord)?;
        // SAFETY: both handles are the driver's.
        self.driver.check("hipEventRecord", unsafe { record(self.event, handle(stream)) })
    }

    /// Milliseconds from `start` to here, once both have passed.
    ///
    /// # Errors
    /// What the driver said, of the work before it too.
    pub fn milliseconds_since(&self, start: &Event) -> Result<f32> {
        let _selected = self.driver.select()?;
        let (synchronize, elapsed) =
            (optional!(self.driver, hipEventSynchronize)?, optional!(self.driver, hipEventElapsedTime)?);
        // SAFETY: `new` made the event.
        self.driver.check("hipEventSynchronize", unsafe { synchronize(self.event) })?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are the driver's.
        let status = unsafe { elapsed(&raw mut milliseconds, start.event, self.event) };
        self.driver.check("hipEventElapsedTime", status)?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(destroy) = self.driver.hip().hipEventDestroy {
            // SAFETY: made by `new`, destroyed once.
            unsafe { destroy(self.event) };
        }
    }
}

impl Graph {
    /// Captures what `queue` puts on `stream`, which is not the default one, instead of running it.
    pub(crate) fn capture(
        driver: &Driver,
        stream: Stream,
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let _selected = driver.select()?;
        let (begin, end, instantiate, destroy) = (
            optional!(driver, hipStreamBeginCapture)?,
            optional!(driver, hipStreamEndCapture)?,
            optional!(driver, hipGraphInstantiate)?,
            optional!(driver, hipGraphDestroy)?,
        );
        // SAFETY: the stream is the driver's.
        driver.check("hipStreamBeginCapture", unsafe { begin(handle(stream), CAPTURE_MODE) })?;
        let queued = queue();
        let mut graph: Handle = std::ptr::null_mut();
        // SAFETY: ends the capture begun above, whether or not `queue` succeeded.
        let ended = driver.check("hipStreamEndCapture", unsafe { end(handle(stream), &raw mut graph) });
        queued.and(ended)?;
        let mut executable: Handle = std::ptr::null_mut();
        // SAFETY: `graph` was captured; the error node and the log are optional.
        let status =
            unsafe { instantiate(&raw mut executable, graph, std::ptr::null_mut(), std::ptr::null_mut(), 0) };
        // SAFETY: the executable graph is a copy; this one is used no more.
        unsafe { destroy(graph) };
        driver.check("hipGraphInstantiate", status)?;
        Ok(Self { driver: driver.clone(), executable })
    }

    #[cfg(test)]
    pub(super) fn handle(&self) -> Handle {
        self.executable
    }

    /// Queues the captured work on `stream`.
    ///
    /// # Safety
    /// The device memory that the captured calls named still lives, and nothing else uses it until
    /// the work is done.
    ///
    /// # Errors
    /// What the driver said.
    pub unsafe fn launch(&self, stream: Stream) -> Result<()> {
        let _selected = self.driver.select()?;
        let launch = optional!(self.driver, hipGraphLaunch)?;
        // SAFETY: the handles are the driver's; the caller promised the memory.
        self.driver.check("hipGraphLaunch", unsafe { launch(self.executable, handle(stream)) })
    }
}

impl Queues for Driver {
    fn create_stream(&self) -> Result<Stream> {
        Driver::create_stream(self)
    }

    fn destroy_stream(&self, stream: Stream) -> Result<()> {
        Driver::destroy_stream(self, stream)
    }

    fn has_clock(&self) -> bool {
        !self.emulated()
    }

    fn seconds(&self, stream: Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let (start, stop) = (Event::new(self)?, Event::new(self)?);
        start.record(stream)?;
        queue()?;
        stop.record(stream)?;
        stop.milliseconds_since(&start).map(|milliseconds| f64::from(milliseconds) * 1e-3)
    }

    fn record(&self, stream: Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recording>> {
        Ok(Box::new(Graph::capture(self, stream, queue)?))
    }
}

impl Recording for Graph {
    unsafe fn replay(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Some(destroy) = self.driver.hip().hipGraphExecDestroy {
            // SAFETY: made by `capture`, destroyed once.
            unsafe { destroy(self.executable) };
        }
    }
}
