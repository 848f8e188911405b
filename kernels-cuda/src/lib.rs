//! The NVIDIA kernels of `fmha`: the CUDA device text, embedded, and the recipes that choose and launch it.
//!
//! Nothing here calls a driver or a compiler: a recipe works with any [`Nvidia`](nvidia::Nvidia) backend. A kernel
//! is a [`KernelSource`]: an entry file and the headers it includes, none of which comes from NVIDIA, so that NVRTC
//! needs no include path. This crate's `README.md` lists the arguments of a launch.

mod lists;
pub mod maps;
pub mod nvidia;
mod operands;
pub mod recipes;
mod row_order;
pub mod rows;
pub mod schedule;
pub mod sm100;
pub mod sm100_bwd;
pub mod sm100_mla;
pub mod sm80;
pub mod sm80_bwd;
pub mod sm80_index;
pub mod sm80_index_loss;
pub mod sm80_lists_bwd;
pub mod sm90;
pub mod sm90_bwd;
pub mod sm90_index;
pub mod sm90_lists_bwd;
pub mod sm90_mla;
pub mod sm90_widened;
pub mod split;
pub mod tile_list;
pub mod tma;
pub mod tree_mask;
pub mod wgmma;

use fmha_core::functions::round_up;
use fmha_core::source::{Header, KernelSource};
use include_dir::{Dir, include_dir};

/// NVRTC options, besides `--gpu-architecture`.
pub const COMPILE_OPTIONS: &[&str] = &["-std=c++20", "-default-device"];

/// Every embedded header, the shared ones included.
#[must_use]
pub fn headers() -> Vec<Header> {
    static FOLDER: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/fmha");
    let mut headers = fmha_core::source::headers();
    headers.extend(Header::all_of(&FOLDER));
    headers
}

/// CTAs for a kernel in which each warp processes rows one after another: at most 16 CTAs per multiprocessor, and
/// none without a row.
fn row_grid(num_rows: u64, num_threads: u32, num_sms: u32) -> u32 {
    let needed = num_rows.div_ceil(u64::from(num_threads / 32)).max(1);
    u32::try_from(needed).unwrap_or(u32::MAX).min(16 * num_sms)
}

/// C++ definitions in a namespace.
fn within(namespace: &str, definitions: &[String]) -> String {
    format!("namespace {namespace} {{\n{}}}\n", definitions.concat())
}

/// An entry with those headers that it includes, from the headers above and those rendered for it alone.
fn source<const N: usize>(
    entry: String,
    rendered: impl Fn() -> [Header; N] + Send + Sync + 'static,
) -> KernelSource {
    KernelSource::new(entry, move || {
        let mut headers = headers();
        headers.extend(rendered());
        headers
    })
}
