//! What every GPU backend of `fmha` has in common, whichever vendor's.
//!
//! ```text
//!  Vendor        a vendor's seat: its driver, the facts of its devices, its recipes best first, its ranges
//!    Driver      allocate, copy, load, launch, enter; streams, events, graphs: all that calls the vendor's library
//!    Toolchain   finds its compiler
//!    Facts       what a choice depends on besides the problem
//!    Recipe      takes a problem or refuses it; says its launches in stages, their workspace and what they promise; binds
//!                arguments
//!  Backend<V>    the rest, written once: selection, fallbacks, handles, memory, tuning, precompilation
//! ```
//!
//! A vendor's crate implements the first five and gives out a [`Device`](fmha_core::Device) over a [`Backend`].

mod backend;
mod driver;
mod memory;
mod ranges;
mod recipe;
mod select;
mod steps;
mod tile;

pub use backend::{Backend, tuned_kernels};
pub use driver::{Driver, Toolchain};
pub use ranges::{PopRange, PushRange, Ranges};
pub use recipe::{
    AnyAddress, BwdKernel, Choice, Classed, CombineKernel, Facts, Family, FwdKernel, Grid, Kernel, Launch,
    Launches, Recipe, Tiled, Tunable, Vendor, deterministic_rows,
};
pub use select::{Selected, select};
pub use steps::{Step, Steps, chosen, exactly};
pub use tile::{TileFrom, settle, settle_fwd};
