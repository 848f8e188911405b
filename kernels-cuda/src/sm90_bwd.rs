//! The Hopper backward kernels.
//!
//! A problem that they [`accept`](accepts) has a tile, of the [table](choose_tile) or as a user sets it, which is
//! checked against the [spec](Sm90BwdTile::check). Tile and spec determine how work is divided
//! ([`Sm90BwdSchedule`]), the workspace, and the compiled [entries](main). The [recipe](recipe::Sm90Bwd) combines
//! these.

mod accepts;
mod check;
mod cost;
mod entries;
mod head_parts;
mod ordered_parts;
pub mod recipe;
mod schedule;
mod shared_memory;
mod spec;
mod table;
mod tile;
mod walk;
mod workspace;

pub use accepts::accepts;
pub(crate) use accepts::{as_it_lies, odd_stride, takes, takes_masks_and_code};
pub use entries::{
    HEAD_SUMS_CTAS, ROW_THREADS, dbias, head_sums, main, main_of_arriving_keys, masked_main,
    masked_preprocess, masked_repair, postprocess, preprocess, repair, repair_ctas,
};
pub use head_parts::HeadParts;
pub use schedule::Sm90BwdSchedule;
pub use spec::{leaves_far_queries, masked_spec, modifies_score, padded_dim, repairs};
pub use table::{choose_tile, default_tile, dq_candidates};
pub use tile::Sm90BwdTile;
pub use walk::{BwdWalk, DqFinish, DqPath};

/// The kernels' name in plans and refusals.
pub const NAME: &str = "sm90";

/// Name under which these kernels' measured tiles are stored: [`NAME`] is also the forward kernel's.
pub const LABEL: &str = "sm90-bwd";

/// The device headers that the kernels' entries include.
pub const HEADERS: [&str; 7] = [
    "fmha/sm90/bwd/preprocess.cuh",
    "fmha/sm90/bwd/main.cuh",
    "fmha/sm90/bwd/postprocess.cuh",
    "fmha/sm90/bwd/head_sums.cuh",
    "fmha/sm90/bwd/repair.cuh",
    "fmha/sm90/bwd/dbias.cuh",
    "fmha/sm90/bwd/masked.cuh",
];
