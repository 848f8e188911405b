//! Source of a plan's tile: the user, a measurement, or the kernel's own table.

use fmha_core::PlanOptions;
use fmha_core::tune::TileOptions;

use crate::recipe::{Facts, Tiles};

/// Source of a plan's tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileFrom {
    /// The kernel's own choice, with the fields that the user has set.
    Table,
    /// A tile that `fmha tune` has measured and stored.
    Tuned,
}

impl TileFrom {
    /// Name and text of this line in a plan.
    #[must_use]
    pub fn detail(self) -> (&'static str, String) {
        let words = match self {
            Self::Table => "the table",
            Self::Tuned => "`fmha tune` on this device",
        };
        ("tile from", words.to_owned())
    }
}

/// The tile of a plan. `fit` returns the kernel's own tile with some fields set, if that fits the problem and the
/// device. The user's fields take precedence over a measured tile. The measured tile is used only if it fits, since
/// problems of one class differ in numbers.
///
/// # Errors
/// Why the kernel's own tile with the user's fields does not fit.
pub fn settle<P, T, E>(
    tiles: &Tiles<P>,
    problem: &P,
    facts: &impl Facts,
    options: &PlanOptions,
    fit: impl Fn(&TileOptions) -> Result<T, E>,
) -> Result<(T, TileFrom), E> {
    let by_user = &options.tile;
    let is_open = by_user.is_empty() && (tiles.are_measured_for)(options);
    let tuned = is_open.then(|| facts.tuned().get(tiles.label, &(tiles.class)(problem, options))).flatten();
    match tuned.and_then(|tuned| fit(&tuned.tile).ok()) {
        Some(fit) => Ok((fit, TileFrom::Tuned)),
        None => Ok((fit(by_user)?, TileFrom::Table)),
    }
}
