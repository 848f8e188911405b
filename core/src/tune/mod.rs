//! Tiles measured on one device: `search` finds the fastest one by alternating [`Burst`]s, [`Tune::keep`]
//! stores it beside the compiled kernels, and plans read it.

mod burst;
mod candidates;
mod class;
mod kept;
mod search;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::operation::AnyProblem;
use crate::plan::PlanOptions;

pub use burst::{Burst, clock};
pub use candidates::{Candidate, Candidates};
pub use class::TileClass;
pub use kept::{TunedKernel, TunedTiles};
pub use search::{Change, Found, InTurns, LEAST_GAIN, Timer, Tried, by_model, search};

/// Fields of a tile as `name=value` pairs, in the form of [`PlanOptions::tile`](crate::PlanOptions::tile).
pub type TileOptions = Vec<(String, String)>;

/// A tile that was faster than its kernel's own choice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedTile {
    /// Fields of the tile that were searched. All other fields follow from the problem and are the kernel's
    /// own choice.
    pub tile: TileOptions,
    /// Median seconds of a call with the tile.
    pub seconds: f64,
    /// Median seconds of a call with the kernel's own choice, in the same run.
    pub default_seconds: f64,
}

/// A backend whose tiles can be measured.
///
/// A backward call with `deterministic` has other tiles than one without. No other plan option affects tiles.
pub trait Tune: Sync {
    /// Kernel's own choice of a tile for the problem, with every tile field spelt out. The kernel is the one that
    /// the options name, or the best that supports the problem.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if no kernel with a tile supports the problem.
    fn default_tile(&self, problem: AnyProblem<'_>, options: &PlanOptions) -> Result<TileOptions>;

    /// Tunable fields of the tile with their values, in the order to try them. Not all combinations fit.
    ///
    /// # Errors
    /// Errors of [`default_tile`](Self::default_tile).
    fn knobs(
        &self,
        problem: AnyProblem<'_>,
        options: &PlanOptions,
    ) -> Result<Vec<(&'static str, Vec<String>)>>;

    /// Microseconds of a call with a tile by the kernel's cost model, if it has one. Tuning measures the fastest by
    /// model first.
    fn modelled_micros(
        &self,
        _problem: AnyProblem<'_>,
        _options: &PlanOptions,
        _tile: &TileOptions,
    ) -> Option<f64> {
        None
    }

    /// Stores a tile for this device; returns the file's path.
    ///
    /// # Errors
    /// What the system said; [`Error::NoDevice`](crate::Error::NoDevice) for an emulated device, whose times mean
    /// nothing; [`Error::Unsupported`](crate::Error::Unsupported) for an operation without tiles.
    fn keep(&self, problem: AnyProblem<'_>, options: &PlanOptions, tile: TunedTile) -> Result<PathBuf>;
}
