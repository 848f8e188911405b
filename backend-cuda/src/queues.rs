//! Streams, events and graphs.

use std::sync::Arc;

use fmha_core::error::Result;
use fmha_core::{Queues, Recording, Stream};

use crate::CudaMemory;
use crate::driver::{Device, Event, Graph};

impl Queues for CudaMemory {
    fn create_stream(&self) -> Result<Stream> {
        self.device()?.create_stream().map(Stream)
    }

    fn destroy_stream(&self, stream: Stream) -> Result<()> {
        self.device()?.destroy_stream(stream.0)
    }

    fn has_clock(&self) -> bool {
        !self.emulated
    }

    fn seconds(&self, stream: Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let device: &Arc<Device> = self.device()?;
        let (start, stop) = (Event::new(device)?, Event::new(device)?);
        start.record(stream.0)?;
        queue()?;
        stop.record(stream.0)?;
        stop.seconds_since(&start)
    }

    fn record(&self, stream: Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recording>> {
        Ok(Box::new(Graph::capture(self.device()?, stream.0, queue)?))
    }
}

impl Recording for Graph {
    unsafe fn replay(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream.0) }
    }
}
