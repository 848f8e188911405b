//! Calls back to back by the device's clock.

use crate::device::{Device, Recording, Stream};
use crate::error::{Error, Result};

/// Seconds of work in a burst: a hundred times what the clock's half microsecond blurs, and too short for
/// a device that is limited by power to change its clock.
const BURST_SECONDS: f64 = 2e-3;
/// A graph of more nodes takes longer to make than it saves.
const MOST_CALLS: u32 = 200;
/// Fewer would time how a launch begins.
const FEWEST_CALLS: u32 = 4;

/// A recorded sequence of equal calls, long enough that one launch of the recording is a burst: the host has
/// no part in the time between its calls.
pub struct Burst {
    recording: Recording,
    calls: u32,
}

impl Burst {
    /// Records what `queue` puts on `stream`, which has a clock behind it.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for an emulated device, whose seconds are the emulator's; what `queue` or the
    /// driver said.
    pub fn record(stream: &Stream, queue: &mut dyn FnMut() -> Result<()>) -> Result<Self> {
        if !stream.device().has_clock() {
            return Err(no_clock(stream.device()));
        }
        // The first call may load data that the second finds in a cache.
        queue()?;
        let once = stream.seconds(&mut *queue)?;
        let calls = (BURST_SECONDS / once.max(1e-9)).ceil() as u32;
        let calls = calls.clamp(FEWEST_CALLS, MOST_CALLS);
        let recording = stream.capture_for_its_time(|| (0..calls).try_for_each(|_| queue()))?;
        Ok(Self { recording, calls })
    }

    /// Seconds of a call.
    ///
    /// # Safety
    /// The memory that the recorded calls named is still there, and nothing else uses it meanwhile.
    ///
    /// # Errors
    /// What the driver said.
    pub unsafe fn seconds(&self, stream: &Stream) -> Result<f64> {
        // SAFETY: promised by the caller: the memory that the recorded calls named is still there, and
        // nothing else uses it meanwhile.
        let seconds = stream.seconds(|| unsafe { self.recording.replay(stream) })?;
        Ok(seconds / f64::from(self.calls))
    }
}

/// A stream of a device whose time can be taken.
///
/// # Errors
/// [`Error::NoDevice`] where there is no device, or an emulated one, whose times are no device's.
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

    /// The burst of calls that take so long, and how often a call was queued for it.
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
        // 2 ms of 0.3 ms each; two calls go before: one that loads, one that is timed.
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
