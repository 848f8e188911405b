//! The programs.

mod approximate;
mod convert;
mod float;
mod integer;
mod matrix;
mod warp;
mod wgmma;

use crate::program::Program;

/// All programs.
#[must_use]
pub fn all() -> Vec<Program> {
    [
        integer::programs(),
        float::programs(),
        convert::programs(),
        approximate::programs(),
        warp::programs(),
        matrix::programs(),
        wgmma::programs(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
