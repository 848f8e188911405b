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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::tune::Burst;

    /// A queue that does all at once and says that it took a second.
    struct Device;

    /// The same, without a clock.
    struct Emulated;

    struct Nothing;

    impl Recording for Nothing {
        unsafe fn replay(&self, _: Stream) -> Result<()> {
            Ok(())
        }
    }

    impl Queues for Device {
        fn create_stream(&self) -> Result<Stream> {
            Ok(Stream(1))
        }

        fn destroy_stream(&self, _: Stream) -> Result<()> {
            Ok(())
        }

        fn seconds(&self, _: Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
            queue().map(|()| 1.0)
        }

        fn record(&self, _: Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recording>> {
            queue()?;
            Ok(Box::new(Nothing))
        }
    }

    impl Queues for Emulated {
        fn create_stream(&self) -> Result<Stream> {
            Device.create_stream()
        }

        fn destroy_stream(&self, stream: Stream) -> Result<()> {
            Device.destroy_stream(stream)
        }

        fn has_clock(&self) -> bool {
            false
        }

        fn seconds(&self, stream: Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
            Device.seconds(stream, queue)
        }

        fn record(
            &self,
            stream: Stream,
            queue: &mut dyn FnMut() -> Result<()>,
        ) -> Result<Box<dyn Recording>> {
            Device.record(stream, queue)
        }
    }

    #[test]
    fn calls_are_timed_on_a_device_unless_it_says_that_it_has_no_clock() {
        let record = |queues: &dyn Queues| {
            let mut calls = 0;
            let burst = Burst::record(queues, Stream(1), &mut || {
                calls += 1;
                Ok(())
            });
            (burst.err(), calls)
        };
        // One call first, one to be timed, and the fewest that are recorded.
        assert!(matches!(record(&Device), (None, 6)));
        assert!(matches!(record(&Emulated), (Some(Error::NoDevice(_)), 0)));
    }
}
