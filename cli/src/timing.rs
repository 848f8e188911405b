//! Times of calls: by the device's clock if it has one, otherwise by the host's.

use std::time::{Duration, Instant};

use fmha::Device;
use fmha_conformance::execute::CallTime;

use crate::failure::Failure;

/// Times of calls, in seconds.
#[derive(Clone, Debug)]
pub(super) struct Timing {
    sorted: Vec<f64>,
    on_device: bool,
}

impl Timing {
    /// Makes statistics of at least one time.
    pub(super) fn of(times: &[CallTime]) -> Self {
        let mut sorted: Vec<f64> = times.iter().map(|time| time.seconds).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        Self { sorted, on_device: times.iter().all(|time| time.on_device) }
    }

    /// Clock that measured the times.
    pub(super) fn clock(&self) -> &'static str {
        if self.on_device { "device" } else { "host" }
    }

    pub(super) fn median(&self) -> f64 {
        let n = self.sorted.len();
        let upper = self.sorted.get(n / 2).copied().unwrap_or(f64::NAN);
        let lower = self.sorted.get(n.saturating_sub(1) / 2).copied().unwrap_or(f64::NAN);
        (lower + upper) / 2.0
    }

    pub(super) fn fastest(&self) -> f64 {
        self.sorted.first().copied().unwrap_or(f64::NAN)
    }

    pub(super) fn slowest(&self) -> f64 {
        self.sorted.last().copied().unwrap_or(f64::NAN)
    }

    pub(super) fn calls(&self) -> usize {
        self.sorted.len()
    }
}

/// One call, queued and waited for.
pub(super) type Call<'a> = dyn FnMut() -> Result<CallTime, Failure> + 'a;

fn sum(times: &[CallTime]) -> f64 {
    times.iter().map(|time| time.seconds).sum()
}

/// Consecutive calls, counted like Composable Kernel's `warmup` and `repeat`; by default one untimed call and about
/// a second of timed ones, at least three.
pub(super) fn in_a_row(
    call: &mut Call<'_>,
    warmup: Option<u32>,
    repeat: Option<u32>,
) -> Result<Timing, Failure> {
    for _ in 0..warmup.unwrap_or(1) {
        call()?;
    }
    let mut times = Vec::new();
    let enough = |times: &[CallTime]| match repeat {
        Some(repeat) => times.len() >= repeat as usize,
        None => times.len() >= 3 && (times.len() >= 20 || sum(times) >= 1.0),
    };
    while !enough(&times) {
        times.push(call()?);
    }
    Ok(Timing::of(&times))
}

/// Calls back to back for `seconds`; of their times the last half: a device that is hot by then.
pub(super) fn back_to_back(call: &mut Call<'_>, seconds: f64) -> Result<Timing, Failure> {
    let start = Instant::now();
    let mut times = Vec::new();
    while times.len() < 2 || start.elapsed().as_secs_f64() < seconds {
        times.push(call()?);
    }
    Ok(Timing::of(&times[times.len() / 2..]))
}

/// Whether the device is emulated: work is queued, but there is no clock, and seconds are the interpreter's.
pub(super) fn is_emulated(device: &Device) -> bool {
    device.has_streams() && !device.has_clock()
}

/// The burst protocol: short enough that a device limited by power keeps its clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Burst {
    pub(super) rounds: u32,
    pub(super) idle: Duration,
    /// Seconds of calls in a round,
    pub(super) seconds: f64,
    /// Most calls of a burst: a flush before each takes longer than a short call.
    pub(super) calls: usize,
}

impl Default for Burst {
    fn default() -> Self {
        Self { rounds: 3, idle: Duration::from_millis(200), seconds: 0.025, calls: 50 }
    }
}

impl Burst {
    /// Per round: idle, one untimed call, then timed calls, each after a `flush` of the caches. The
    /// times are the rounds' medians, so that their median and spread are those between rounds.
    pub(super) fn run(
        &self,
        call: &mut Call<'_>,
        flush: &mut dyn FnMut() -> Result<(), Failure>,
    ) -> Result<Timing, Failure> {
        let mut medians = Vec::new();
        for _ in 0..self.rounds.max(1) {
            std::thread::sleep(self.idle);
            call()?;
            let mut times = Vec::new();
            while times.is_empty() || (sum(&times) < self.seconds && times.len() < self.calls) {
                flush()?;
                times.push(call()?);
            }
            let round = Timing::of(&times);
            medians.push(CallTime { seconds: round.median(), on_device: round.on_device });
        }
        Ok(Timing::of(&medians))
    }
}

/// `1.234 ms`, with the unit that fits.
pub(super) fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.3} s"),
        s if s >= 1e-3 => format!("{:.3} ms", s * 1e3),
        s => format!("{:.2} us", s * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE_SECOND: CallTime = CallTime { seconds: 1.0, on_device: true };

    #[test]
    fn the_median_is_the_middle_of_the_sorted_times() {
        let timing = |seconds: &[f64]| {
            Timing::of(
                &seconds.iter().map(|&s| CallTime { seconds: s, on_device: false }).collect::<Vec<_>>(),
            )
        };
        assert_eq!(timing(&[3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(timing(&[4.0, 1.0, 3.0, 2.0]).median(), 2.5);
    }

    #[test]
    fn one_call_by_the_hosts_clock_makes_it_the_hosts_time() {
        let time = |on_device| CallTime { seconds: 1.0, on_device };
        assert_eq!(Timing::of(&[time(true), time(true)]).clock(), "device");
        assert_eq!(Timing::of(&[time(true), time(false)]).clock(), "host");
    }

    #[test]
    fn repeat_counts_timed_calls_and_warmup_the_others() {
        let mut calls = 0;
        let timing = in_a_row(
            &mut || {
                calls += 1;
                Ok(ONE_SECOND)
            },
            Some(2),
            Some(5),
        )
        .unwrap();
        assert_eq!((calls, timing.calls()), (7, 5));
    }

    #[test]
    fn a_burst_flushes_before_every_timed_call() {
        let (mut calls, mut flushes) = (0, 0);
        let burst = Burst { rounds: 2, idle: Duration::ZERO, seconds: 1e-9, calls: 9 };
        let timing = burst
            .run(
                &mut || {
                    calls += 1;
                    Ok(ONE_SECOND)
                },
                &mut || {
                    flushes += 1;
                    Ok(())
                },
            )
            .unwrap();
        assert_eq!(timing.calls(), 2);
        assert_eq!(calls, flushes + 2);
    }
}
