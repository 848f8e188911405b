//! Tiles measured on one device: [`search`] finds the fastest by [`Burst`]s in turns, [`Tune::keep`] keeps
//! it beside the compiled kernels, plans read it.

mod burst;
mod kept;
mod search;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::problem::ValidFwd;

pub use burst::{Burst, clock};
pub use kept::TunedTiles;
pub use search::{Found, InTurns, LEAST_GAIN, Timer, Tried, search};

/// `name=value` pairs, as [`PlanOptions::tile`](crate::PlanOptions::tile) takes them.
pub type TileOptions = Vec<(String, String)>;

/// A tile that was faster than its kernel's own choice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedTile {
    /// All of its fields.
    pub tile: TileOptions,
    /// Median seconds of a call with it.
    pub seconds: f64,
    /// And with the kernel's own choice, in the same run.
    pub default_seconds: f64,
}

/// A backend whose tiles can be measured.
pub trait Tune: Sync {
    /// The kernel's own choice for a problem, all knobs spelt out.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) where no kernel with a tile takes the problem.
    fn default_tile(&self, problem: &ValidFwd) -> Result<TileOptions>;

    /// Each knob's values, in the order to try them; not all go together.
    fn knobs(&self) -> Vec<(&'static str, Vec<String>)>;

    /// Keeps a tile for this device; returns where.
    ///
    /// # Errors
    /// What the system said; [`Error::NoDevice`](crate::Error::NoDevice) for an emulated device, whose
    /// times are no device's.
    fn keep(&self, problem: &ValidFwd, tile: TunedTile) -> Result<PathBuf>;
}
