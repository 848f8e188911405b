//! Calls back to back by the device's clock.

use crate::backend::FmhaBackend;
use crate::error::{Error, Result};
use crate::queues::Stream;
use crate::queues::{Queues, Recording};

/// Seconds of work in a burst: a hundred times what the clock's half microsecond blurs, and too short for
/// a device that is limited by power to change its clock.
const BURST_SECONDS: f64 = 2e-3;
/// A graph of more nodes takes longer to make than it saves.
const MOST_CALLS: u32 = 200;
/// Fewer would time how a launch begins.
const FEWEST_CALLS: u32 = 4;

/// A call, recorded so many times that one launch of the recording is a burst: the host has no part in the
/// time between its calls.
pub struct Burst {
    recording: Box<dyn Recording>,
    calls: u32,
}

impl Burst {
    /// Records what `queue` puts on `stream`, which has a clock behind it.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for an emulated device, whose seconds are the emulator's; what `queue` or the
    /// driver said.
    pub fn record(
        queues: &dyn Queues,
        stream: Stream,
        queue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        if !queues.has_clock() {
            return Err(emulated());
        }
        // The first call may load what the second finds.
        queue()?;
        let once = queues.seconds(stream, queue)?;
        let calls = (BURST_SECONDS / once.max(1e-9)).ceil() as u32;
        let calls = calls.clamp(FEWEST_CALLS, MOST_CALLS);
        let recording = queues.record(stream, &mut || (0..calls).try_for_each(|_| queue()))?;
        Ok(Self { recording, calls })
    }

    /// Seconds of a call.
    ///
    /// # Safety
    /// The memory that the recorded calls named is still there, and nothing else uses it meanwhile.
    ///
    /// # Errors
    /// What the driver said.
    pub unsafe fn seconds(&self, queues: &dyn Queues, stream: Stream) -> Result<f64> {
        let seconds = queues.seconds(stream, &mut || {
            // SAFETY: the caller's promise.
            unsafe { self.recording.replay(stream) }
        })?;
        Ok(seconds / f64::from(self.calls))
    }
}

/// The queues of a device whose time can be taken.
///
/// # Errors
/// [`Error::NoDevice`] where there is no device, or an emulated one, whose times are no device's.
pub fn clock(backend: &dyn FmhaBackend) -> Result<&dyn Queues> {
    let queues = backend.queues().ok_or_else(|| {
        Error::NoDevice(format!("{} has no clock of its own to time tiles by", backend.name()))
    })?;
    if queues.has_clock() { Ok(queues) } else { Err(emulated()) }
}

fn emulated() -> Error {
    Error::NoDevice("the device is emulated: its times are no device's".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Queues whose work takes so long, whatever it is.
    struct Clocked {
        has_clock: bool,
        seconds: f64,
    }

    struct Recorded;

    impl Recording for Recorded {
        unsafe fn replay(&self, _: Stream) -> Result<()> {
            Ok(())
        }
    }

    impl Queues for Clocked {
        fn create_stream(&self) -> Result<Stream> {
            Ok(Stream(1))
        }

        fn destroy_stream(&self, _: Stream) -> Result<()> {
            Ok(())
        }

        fn has_clock(&self) -> bool {
            self.has_clock
        }

        fn seconds(&self, _: Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
            queue().map(|()| self.seconds)
        }

        fn record(&self, _: Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recording>> {
            queue()?;
            Ok(Box::new(Recorded))
        }
    }

    /// The burst of calls that take so long, and how often a call was queued for it.
    fn burst(has_clock: bool, seconds: f64) -> (Result<Burst>, u32) {
        let mut queued = 0;
        let mut queue = || {
            queued += 1;
            Ok(())
        };
        let burst = Burst::record(&Clocked { has_clock, seconds }, Stream(1), &mut queue);
        (burst, queued)
    }

    #[test]
    fn a_burst_has_as_many_calls_as_fill_it_within_bounds() {
        // 2 ms of 0.3 ms each; two calls go before: one that loads, one that is timed.
        for (seconds, calls) in [(3e-4, 7), (1.0, FEWEST_CALLS), (0.0, MOST_CALLS)] {
            let (burst, queued) = burst(true, seconds);
            let burst = burst.unwrap();
            assert_eq!((burst.calls, queued), (calls, 2 + calls), "{seconds}");
            // SAFETY: nothing was recorded.
            let each = unsafe { burst.seconds(&Clocked { has_clock: true, seconds: 1.0 }, Stream(1)) };
            assert_eq!(each.unwrap(), 1.0 / f64::from(calls));
        }
    }

    #[test]
    fn an_emulated_device_is_not_timed() {
        let (burst, queued) = burst(false, 3e-4);
        assert!(matches!(burst, Err(Error::NoDevice(_))));
        assert_eq!(queued, 0);
    }
}
