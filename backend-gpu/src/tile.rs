//! Whose tile a plan has: the user's, a measured one, or the kernel's own.

use fmha_core::tune::{TileClass, TileOptions, TunedTile};
use fmha_core::{Accuracy, PlanOptions, ValidFwd};

use crate::recipe::Facts;

/// Where a plan's tile comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileFrom {
    /// The kernel's own choice, and what the user sets of it.
    Table,
    /// What `fmha tune` has kept.
    Tuned,
}

impl TileFrom {
    /// As a plan tells it.
    #[must_use]
    pub fn detail(self) -> (&'static str, String) {
        let words = match self {
            Self::Table => "the table",
            Self::Tuned => "`fmha tune` on this device",
        };
        ("tile from", words.to_owned())
    }
}

/// The tile of a plan. `set` is the kernel's own with some fields set, if that fits the problem and the device. What
/// the user sets comes before what was measured, which holds where it fits: problems of one class differ in numbers.
///
/// # Errors
/// Why the kernel's own tile, with what the user sets, does not fit.
pub fn settle<T, E>(
    by_user: &TileOptions,
    tuned: Option<&TunedTile>,
    set: impl Fn(&TileOptions) -> Result<T, E>,
) -> Result<(T, TileFrom), E> {
    let tuned = tuned.filter(|_| by_user.is_empty());
    match tuned.and_then(|tuned| set(&tuned.tile).ok()) {
        Some(tile) => Ok((tile, TileFrom::Tuned)),
        None => Ok((set(by_user)?, TileFrom::Table)),
    }
}

/// The tile of a plan of the forward, as [`settle`] finds it: what was measured of `kernel` on the device holds for plans that
/// ask for neither exact maxima nor batch invariance, since tiles are measured as such a plan has them.
///
/// # Errors
/// As of [`settle`].
pub fn settle_fwd<T, E>(
    kernel: &str,
    problem: &ValidFwd,
    facts: &impl Facts,
    options: &PlanOptions,
    set: impl Fn(&TileOptions) -> Result<T, E>,
) -> Result<(T, TileFrom), E> {
    let as_measured = options.accuracy == Accuracy::Fast && !options.batch_invariant;
    let tuned = facts.tuned().get(kernel, &TileClass::of_fwd(problem)).filter(|_| as_measured);
    settle(&options.tile, tuned, set)
}
