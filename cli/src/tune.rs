//! `fmha tune`: the tile of one problem, measured knob by knob on the present device.

use std::io::Write;

use clap::Args;
use fmha::PlanOptions;
use fmha::core::tune::{TileOptions, TunedTile};
use serde_json::{Value, json};

use crate::Verdict;
use crate::bench::measure::{Measured, Protocol, measure};
use crate::check::Verify;
use crate::failure::Failure;
use crate::options::{BackendArgs, ProblemArgs};
use crate::setup::Setup;
use crate::timing::duration;

/// Options of `fmha tune`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fmha tune -b 4 -h 32 -s 4096 -d 128 --mask b         try every knob of the tile, keep what is faster
  fmha tune -s 8192 -d 64 --knob block_m --knob block_n  only these
  fmha explain -b 4 -h 32 -s 4096 -d 128 --mask b      the plan says that its tile was tuned

Each tile's output is checked before it is timed. What is kept lies in the cache folder, for this
device and these kernels; it serves problems whose sizes have the same powers of two. An emulated
device has no speed: its times are shown as emulated, and nothing is kept.")]
pub(super) struct TuneArgs {
    #[command(flatten)]
    problem: ProblemArgs,

    #[command(flatten)]
    backend: BackendArgs,

    /// Only this knob (may be given again)
    #[arg(long, value_name = "NAME")]
    knob: Vec<String>,

    /// Rounds of the burst protocol for each tile
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A tile must be faster by this share to replace another: less is noise between bursts.
const LEAST_GAIN: f64 = 0.01;

/// A tile and what came of it.
struct Tried {
    changed: String,
    outcome: Result<f64, String>,
}

impl TuneArgs {
    pub(super) fn carry_out(&self, out: &mut dyn Write) -> Result<Verdict, Failure> {
        let setup = self.problem.setup(None)?;
        if setup.bwd.is_some() {
            return Err(Failure::wrong("backward 1: 0 of its kernels have a tile to tune"));
        }
        let opened = self.backend.open()?;
        let backend = &*opened.backend;
        let tuner = backend
            .tuner()
            .ok_or_else(|| Failure::wrong(format!("{}: 0 kernels have a tile to tune", backend.name())))?;
        let knobs = tuner.knobs();
        if let Some(unknown) = self.knob.iter().find(|name| knobs.iter().all(|(knob, _)| knob != name)) {
            let known: Vec<_> = knobs.iter().map(|(knob, _)| *knob).collect();
            return Err(Failure::wrong(format!("knob {unknown} is none of {}", known.join(", "))));
        }
        let problem = setup.fwd.clone().validate()?;
        let time = |tile: &TileOptions| self.time(backend, &setup, tile);
        let mut best = tuner.default_tile(&problem)?;
        let default_seconds = time(&best).map_err(Failure::wrong)?;
        let mut seconds = default_seconds;
        let mut tried = vec![Tried { changed: "the kernel's own".to_owned(), outcome: Ok(seconds) }];
        if !self.json {
            writeln!(out, "{:<18} {}", "device", backend.name())?;
            print(out, &tried[0])?;
        }
        for (knob, values) in knobs.iter().filter(|(knob, _)| self.wants(knob)) {
            for value in values {
                let tile = with(&best, knob, value);
                if tile == best {
                    continue;
                }
                let outcome = time(&tile);
                if let Ok(faster) = outcome
                    && faster < seconds * (1.0 - LEAST_GAIN)
                {
                    (best, seconds) = (tile, faster);
                }
                tried.push(Tried { changed: format!("{knob}={value}"), outcome });
                if !self.json {
                    print(out, &tried[tried.len() - 1])?;
                }
            }
        }
        let tile = TunedTile { tile: best.clone(), seconds, default_seconds };
        let kept = if seconds < default_seconds {
            tuner
                .keep(&problem, tile)
                .map(|path| path.display().to_string())
                .map_err(|error| error.to_string())
        } else {
            Err("the kernel's own tile is the best".to_owned())
        };
        if self.json {
            let report = json!({
                "device": backend.name(),
                "tile": best.iter().cloned().map(|(k, v)| (k, v.into())).collect::<serde_json::Map<_, _>>(),
                "seconds": seconds,
                "default_seconds": default_seconds,
                "tried": tried.iter().map(as_json).collect::<Vec<_>>(),
                "kept": kept.as_ref().ok(),
                "not_kept": kept.as_ref().err(),
            });
            writeln!(out, "{report:#}")?;
            return Ok(Verdict::Right);
        }
        let words: Vec<_> = best.iter().map(|(knob, value)| format!("{knob}={value}")).collect();
        writeln!(out, "{:<18} {}", "best", words.join(" "))?;
        writeln!(out, "{:<18} {:.1} %", "gain", (default_seconds / seconds - 1.0) * 100.0)?;
        match kept {
            Ok(path) => writeln!(out, "{:<18} {path}", "kept")?,
            Err(why) => writeln!(out, "{:<18} {why}", "not kept")?,
        }
        Ok(Verdict::Right)
    }

    fn wants(&self, knob: &str) -> bool {
        self.knob.is_empty() || self.knob.iter().any(|name| name == knob)
    }

    /// Median seconds of a call with this tile, or why there are none: a combination that does not go
    /// together is refused by the plan or by the compiler.
    fn time(
        &self,
        backend: &dyn fmha::FmhaBackend,
        setup: &Setup,
        tile: &TileOptions,
    ) -> Result<f64, String> {
        let options = PlanOptions { tile: tile.clone(), ..self.backend.plan_options() };
        let protocol = Protocol::burst(self.rounds);
        match measure(backend, setup, &options, protocol, Verify::Auto) {
            Ok(Measured::Timed { timing, .. }) => Ok(timing.median()),
            Ok(Measured::Absent(why)) => Err(why),
            Ok(Measured::Wrong(why)) => Err(format!("wrong: {why}")),
            Err(failure) => Err(failure.to_string()),
        }
    }
}

/// The tile with another value of a knob, said last: what cannot go with it yields.
fn with(tile: &TileOptions, knob: &str, value: &str) -> TileOptions {
    let mut tile = tile.clone();
    if let Some(at) = tile.iter().position(|(name, old)| name == knob && old != value) {
        tile.remove(at);
        tile.push((knob.to_owned(), value.to_owned()));
    }
    tile
}

fn print(out: &mut dyn Write, tried: &Tried) -> Result<(), Failure> {
    match &tried.outcome {
        Ok(seconds) => writeln!(out, "{:<18} {}", tried.changed, duration(*seconds))?,
        Err(why) => {
            let why = why.lines().next().unwrap_or_default();
            writeln!(out, "{:<18} not timed: {why}", tried.changed)?;
        }
    }
    out.flush()?;
    Ok(())
}

fn as_json(tried: &Tried) -> Value {
    match &tried.outcome {
        Ok(seconds) => json!({ "tile": tried.changed, "seconds": seconds }),
        Err(why) => json!({ "tile": tried.changed, "not_timed": why }),
    }
}

#[cfg(test)]
mod tests {
    use super::with;

    #[test]
    fn a_changed_knob_is_said_last_and_one_that_keeps_its_value_stays() {
        let tile = [("lazy_rescale_log2", "6"), ("skip_row_max", "1")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .to_vec();
        assert_eq!(with(&tile, "lazy_rescale_log2", "6"), tile);
        let changed = with(&tile, "lazy_rescale_log2", "0");
        assert_eq!(
            changed,
            [("skip_row_max", "1"), ("lazy_rescale_log2", "0")].map(|(k, v)| (k.to_owned(), v.to_owned()))
        );
        assert_eq!(with(&tile, "no_such_knob", "1"), tile);
    }
}
