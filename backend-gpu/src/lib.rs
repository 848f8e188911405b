//! Code that all GPU backends of `fmha` share, for any vendor.
//!
//! ```text
//!  Vendor        what a vendor implements: its driver, the facts of its devices, its recipes best first, its ranges
//!    Driver      allocate, copy, load, launch, enter; streams, events, graphs: all that calls the vendor's library
//!    Toolchain   finds its compiler
//!    Facts       what a choice depends on besides the problem
//!    Kernel      takes a problem or refuses it; says its launches in stages, their workspace and what they promise; binds
//!                arguments
//!  Backend<V>    the rest, written once: selection, fallbacks, handles, memory, tuning, precompilation
//! ```
//!
//! A vendor's crate implements the first five and gives out a [`Device`](fmha_core::Device) over a [`Backend`].

mod backend;
mod driver;
mod launches;
mod memory;
mod portable;
mod ranges;
mod recipe;
mod select;
mod steps;
mod tile;

pub use backend::{Backend, tuned_kernels};
pub use driver::{Driver, Toolchain};
pub use launches::{Grid, Launch, Launches, Stage};
pub use portable::{
    BlockValues, Choose, Combine, IndexLoss, IndexProducts, MultipliesLists, NoIndexer, OfValues, OwnText,
    Quantize, ReadsValues, RowKernel, ScoresIndex, Simt, SimtBwd, SimtIndexer, SimtLists, lists, tile_list,
    update,
};
pub use ranges::{PopRange, PushRange, Ranges};
pub use recipe::{
    About, AnyAddress, Choice, Facts, GpuProblem, Kernel, Operand, Planned, Recipe, Tiles, Vendor,
    deterministic_rows,
};
pub use select::{Selected, select};
pub use steps::{Step, Steps};
pub use tile::{TileFrom, settle};
