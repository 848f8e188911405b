//! How long a call takes: by the clock of the host, from the call to the end of its work.

use std::time::{Duration, Instant};

use super::failure::Failure;

/// Times of calls, in seconds.
#[derive(Clone, Debug)]
pub(super) struct Timing {
    sorted: Vec<f64>,
}

impl Timing {
    /// At least one time.
    pub(super) fn of(mut seconds: Vec<f64>) -> Self {
        seconds.sort_unstable_by(f64::total_cmp);
        Self { sorted: seconds }
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
pub(super) type Call<'a> = dyn FnMut() -> Result<(), Failure> + 'a;

fn timed(call: &mut Call<'_>) -> Result<f64, Failure> {
    let start = Instant::now();
    call()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Calls in a row, as Composable Kernel's `warmup` and `repeat` count them; where they are not
/// given, one untimed call and about a second of timed ones, three at least.
pub(super) fn in_a_row(
    call: &mut Call<'_>,
    warmup: Option<u32>,
    repeat: Option<u32>,
) -> Result<Timing, Failure> {
    for _ in 0..warmup.unwrap_or(1) {
        call()?;
    }
    let mut seconds = Vec::new();
    let enough = |seconds: &[f64]| match repeat {
        Some(repeat) => seconds.len() >= repeat.max(1) as usize,
        None => seconds.len() >= 3 && (seconds.len() >= 20 || seconds.iter().sum::<f64>() >= 1.0),
    };
    while !enough(&seconds) {
        seconds.push(timed(call)?);
    }
    Ok(Timing::of(seconds))
}

/// Calls back to back for `seconds`; of their times the last half: a device that is hot by then.
pub(super) fn back_to_back(call: &mut Call<'_>, seconds: f64) -> Result<Timing, Failure> {
    let start = Instant::now();
    let mut times = Vec::new();
    while times.len() < 2 || start.elapsed().as_secs_f64() < seconds {
        times.push(timed(call)?);
    }
    Ok(Timing::of(times.split_off(times.len() / 2)))
}

/// The burst protocol: short enough that a device limited by power keeps its clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Burst {
    pub(super) rounds: u32,
    pub(super) idle: Duration,
    /// Seconds of calls in a round.
    pub(super) seconds: f64,
}

impl Default for Burst {
    fn default() -> Self {
        Self { rounds: 3, idle: Duration::from_millis(200), seconds: 0.025 }
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
            let mut seconds = Vec::new();
            while seconds.is_empty() || seconds.iter().sum::<f64>() < self.seconds {
                flush()?;
                seconds.push(timed(call)?);
            }
            medians.push(Timing::of(seconds).median());
        }
        Ok(Timing::of(medians))
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

    #[test]
    fn the_median_is_the_middle_of_the_sorted_times() {
        assert_eq!(Timing::of(vec![3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(Timing::of(vec![4.0, 1.0, 3.0, 2.0]).median(), 2.5);
    }

    #[test]
    fn repeat_counts_timed_calls_and_warmup_the_others() {
        let mut calls = 0;
        let timing = in_a_row(
            &mut || {
                calls += 1;
                Ok(())
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
        let burst = Burst { rounds: 2, idle: Duration::ZERO, seconds: 1e-9 };
        let timing = burst
            .run(
                &mut || {
                    calls += 1;
                    Ok(())
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
