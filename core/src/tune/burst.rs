//! Time of a call, from a burst of equal calls that run back to back, by the device's clock.

use crate::device::{Device, Recording, Stream};
use crate::error::{Error, Result};

/// Seconds of work in a burst: long against the half microsecond of the clock's error, and too short for a
/// power-limited device to change its frequency.
const BURST_SECONDS: f64 = 2e-3;
/// Most calls in a recording: a larger graph takes longer to make than it saves.
const MOST_CALLS: u32 = 200;
/// Fewest calls in a recording: with fewer the start of a launch would count too much.
const FEWEST_CALLS: u32 = 4;

/// A recording of equal calls, one launch of which is a burst: the host plays no part between its calls.
pub struct Burst {
    recording: Recording,
    calls: u32,
}

impl Burst {
    /// Records the calls that `queue` puts on `stream`, a stream of a device with a clock.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for an emulated device, whose seconds are the emulator's; what `queue` or the
    /// driver said.
    pub fn record(stream: &Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<Self> {
        if !stream.device().has_clock() {
            return Err(no_clock(stream.device()));
        }
        // The first call runs before the timed one, since it may fill caches.
        queue()?;
        let once = stream.seconds(&mut *queue)?;
        let calls = (BURST_SECONDS / once.max(1e-9)).ceil() as u32;
        let calls = calls.clamp(FEWEST_CALLS, MOST_CALLS);
        let recording = stream.capture_for_its_time(|| (0..calls).try_for_each(|_| queue()))?;
        Ok(Self { recording, calls })
    }

    /// Seconds of one call, as the mean of a burst.
    ///
    /// # Safety
    /// The memory that the recorded calls named is still there, and nothing else uses it meanwhile.
    ///
    /// # Errors
    /// An error of the driver.
    pub unsafe fn seconds(&self, stream: &Stream) -> Result<f64> {
        // SAFETY: the caller promises that the memory that the recorded calls named still exists, and that nothing else
        // uses it meanwhile.
        let seconds = stream.seconds(|| unsafe { self.recording.replay(stream) })?;
        Ok(seconds / f64::from(self.calls))
    }
}

/// A stream of a device with a clock.
///
/// # Errors
/// [`Error::NoDevice`] if there is no device, or an emulated one, whose times mean nothing.
pub fn clock(device: &Device) -> Result<Stream> {
    if device.has_clock() { device.stream() } else { Err(no_clock(device)) }
}

fn no_clock(device: &Device) -> Error {
    if device.has_streams() {
        return Error::NoDevice("the device is emulated: its times are no device's".to_owned());
    }
    Error::NoDevice(format!("{} has no clock of its own to time tiles by", device.name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toy::Toy;

    /// Makes a burst of calls that take `seconds` each, and returns how many calls were queued for it.
    fn burst(has_clock: bool, seconds: f64) -> (Result<Burst>, u32) {
        let mut queued = 0;
        let mut queue = || {
            queued += 1;
            Ok(())
        };
        let device = Device::new(Toy { has_clock, seconds, ..Toy::on_a_device() });
        let burst = Burst::record(&device.stream().unwrap(), &mut queue);
        (burst, queued)
    }

    #[test]
    fn a_burst_has_as_many_calls_as_fill_it_within_bounds() {
        // A burst of 2 ms has seven calls of 0.3 ms; two more calls run before: one that fills caches, one that is
        // timed.
        for (seconds, calls) in [(3e-4, 7), (1.0, FEWEST_CALLS), (0.0, MOST_CALLS)] {
            let (burst, queued) = burst(true, seconds);
            let burst = burst.unwrap();
            assert_eq!((burst.calls, queued), (calls, 2 + calls), "{seconds}");
            // SAFETY: nothing was recorded.
            let each = unsafe { burst.seconds(&burst.recording.device().stream().unwrap()) };
            assert_eq!(each.unwrap(), seconds / f64::from(calls));
        }
    }

    #[test]
    fn an_emulated_device_is_not_timed() {
        let (burst, queued) = burst(false, 3e-4);
        assert!(matches!(burst, Err(Error::NoDevice(_))));
        assert_eq!(queued, 0);
        let emulated = Device::new(Toy { has_clock: false, ..Toy::on_a_device() });
        assert!(clock(&emulated).unwrap_err().to_string().contains("emulated"));
        let host = Device::new(Toy::in_host_memory());
        assert!(clock(&host).unwrap_err().to_string().contains("no clock of its own"));
        assert!(clock(&Device::new(Toy::on_a_device())).is_ok());
    }
}
