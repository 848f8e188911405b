//! Parts of a run's time.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::AnyError;
use crate::bench::Bench;
use crate::groups::Marked;

/// Number of runs that are timed in parts, one after another.
const APART: usize = 32;

impl Bench {
    /// Splits the time of a run that gathers once, run and replayed in alternation. Events on each rank's
    /// stream, over some runs in a row, give the time before the gather, of the gather, after it, and between
    /// two runs.
    pub(crate) fn in_parts(
        &self,
        (name, alone): (&str, f64),
        marked: &Marked,
        mut run: impl FnMut() -> Result<(), AnyError>,
        mut replay: impl FnMut() -> Result<(), AnyError>,
    ) -> Result<(), AnyError> {
        let ranks = self.group.size();
        for _ in 0..3 {
            let [eager, replayed] = [self.fastest(&mut run)?, self.fastest(&mut replay)?];
            if self.is_first() {
                let share = |seconds: f64| alone / (f64::from(ranks) * seconds);
                let [shares, us] = [[eager, replayed].map(share), [eager, replayed].map(|s| s * 1e6)];
                self.say(&format!(
                    "{name}: run {:.1} us ({:.3}), replayed {:.1} us ({:.3})",
                    us[0], shares[0], us[1], shares[1]
                ));
            }
        }
        let mut told = String::new();
        for _ in 0..2 {
            let events = (0..2 * APART).map(|_| self.device.event()).collect::<Result<Vec<_>, _>>()?;
            marked.marks(&self.device, APART)?;
            std::thread::sleep(Duration::from_millis(200));
            self.stream.synchronize()?;
            self.meet(1 << 10)?;
            let begun = Instant::now();
            for ends in events.chunks_exact(2) {
                ends[0].record(&self.stream)?;
                run()?;
                ends[1].record(&self.stream)?;
            }
            let host = begun.elapsed().as_secs_f64() / APART as f64;
            let marks = marked.marks(&self.device, 0)?;
            let mut parts: [Vec<f64>; 5] = Default::default();
            for (at, (ends, [from, to])) in events.chunks_exact(2).zip(&marks).enumerate() {
                parts[0].push(from.seconds_since(&ends[0])?);
                parts[1].push(to.seconds_since(from)?);
                parts[2].push(ends[1].seconds_since(to)?);
                parts[4].push(ends[1].seconds_since(&ends[0])?);
                if let Some(next) = events.get(2 * at + 2) {
                    parts[3].push(next.seconds_since(&ends[1])?);
                }
            }
            let names = ["before the gather", "gather", "behind it", "to the next", "run"];
            for (name, mut part) in names.into_iter().zip(parts) {
                let first = part.first().copied().unwrap_or(f64::NAN);
                part.sort_by(f64::total_cmp);
                let [least, middle, most] = [0, part.len() / 2, part.len().saturating_sub(1)]
                    .map(|at| part.get(at).copied().unwrap_or(f64::NAN) * 1e6);
                let first = first * 1e6;
                let _ = write!(told, "{name} {middle:.1} ({least:.1} to {most:.1}, first {first:.1}), ");
            }
            let _ = writeln!(told, "host {:.1} us a run", host * 1e6);
        }
        // Latency of a run, from an empty queue until all is done, by the host's clock.
        let seconds = |call: &mut dyn FnMut() -> Result<(), AnyError>| -> Result<[f64; 2], AnyError> {
            let mut taken = Vec::new();
            for _ in 0..APART {
                self.group.share(&[])?;
                let begun = Instant::now();
                call()?;
                let queued = begun.elapsed().as_secs_f64() * 1e6;
                self.stream.synchronize()?;
                taken.push([queued, begun.elapsed().as_secs_f64() * 1e6]);
            }
            Ok([0, 1].map(|which| {
                taken.sort_by(|a, b| a[which].total_cmp(&b[which]));
                taken[APART / 2][which]
            }))
        };
        for (what, [queued, done]) in [("run", seconds(&mut run)?), ("replayed", seconds(&mut replay)?)] {
            let _ = writeln!(told, "{what} alone: queued after {queued:.1} us, done after {done:.1}");
        }
        for (rank, told) in self.group.share(told.as_bytes())?.iter().enumerate().filter(|_| self.is_first())
        {
            String::from_utf8_lossy(told).lines().for_each(|line| self.say(&format!("rank {rank}: {line}")));
        }
        Ok(())
    }
}
