//! The NVIDIA kernels of `fmha`: the CUDA device text, embedded, and the recipes that choose and launch it.
//!
//! Nothing here talks to a driver or a compiler: a recipe serves any [`Nvidia`](nvidia::Nvidia) backend. A
//! kernel is a [`KernelSource`]: an entry file and the headers it includes, none of them a vendor's, so that
//! NVRTC needs no include path. `README.md` beside this crate says what a launch binds.

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
pub mod sm80;
pub mod sm80_bwd;
pub mod sm80_lists_bwd;
pub mod sm90;
pub mod sm90_bwd;
pub mod sm90_mla;
pub mod sm90_widened;
pub mod split;
pub mod tile_list;
pub mod tma;
pub mod tree_mask;
pub mod wgmma;

use fmha_core::source::{Header, KernelSource};

/// NVRTC options, besides `--gpu-architecture`.
pub const COMPILE_OPTIONS: &[&str] = &["-std=c++20", "-default-device"];

/// Every embedded header, the shared ones included.
#[must_use]
pub fn headers() -> Vec<Header> {
    macro_rules! embedded {
        ($($name:literal),* $(,)?) => {
            [$(Header::embedded(
                concat!("fmha/", $name),
                include_str!(concat!("../fmha/", $name)),
            )),*]
        };
    }
    let mut headers = fmha_core::source::headers();
    headers.extend(embedded!(
        "ptx/barrier.cuh",
        "ptx/bulk.cuh",
        "ptx/cluster.cuh",
        "ptx/collective.cuh",
        "ptx/copy.cuh",
        "ptx/elect.cuh",
        "ptx/f32x2.cuh",
        "ptx/fp8.cuh",
        "ptx/flag.cuh",
        "ptx/grid.cuh",
        "ptx/matrix.cuh",
        "ptx/mbarrier.cuh",
        "ptx/memory.cuh",
        "ptx/num.cuh",
        "ptx/tcgen05.cuh",
        "ptx/shared.cuh",
        "ptx/tma.cuh",
        "ptx/tmem.cuh",
        "ptx/warp.cuh",
        "ptx/wgmma.cuh",
        "common/arrivals.cuh",
        "common/copy_tile.cuh",
        "common/data_keys.cuh",
        "common/dropout.cuh",
        "common/exp2.cuh",
        "common/finish_dq.cuh",
        "common/keep_mask.cuh",
        "common/merge_lists.cuh",
        "common/merge_parts.cuh",
        "common/merge_tree.cuh",
        "common/output_place.cuh",
        "common/output_row.cuh",
        "common/part_keys.cuh",
        "common/philox_parts.cuh",
        "common/pipeline.cuh",
        "common/quads.cuh",
        "common/recompute_row.cuh",
        "common/rows_behind.cuh",
        "common/scheduler.cuh",
        "common/score_modifiers.cuh",
        "common/score_pair.cuh",
        "common/seen_keys.cuh",
        "common/shares.cuh",
        "common/shown_blocks.cuh",
        "common/softmax.cuh",
        "common/store_rows.cuh",
        "common/tile_list.cuh",
        "common/token_keys.cuh",
        "common/tree_keys.cuh",
        "common/update_cache.cuh",
        "common/widen.cuh",
        "common/widen_cache.cuh",
        "common/work.cuh",
        "common/zero_rows.cuh",
        "mma/fp8_operand.cuh",
        "mma/fragment.cuh",
        "mma/sm100.cuh",
        "mma/sm80.cuh",
        "mma/smem_tile.cuh",
        "mma/sm90.cuh",
        "mma/sm90/descriptor.cuh",
        "mma/sm90/register_product.cuh",
        "sm80/bwd/add_dq.cuh",
        "sm80/bwd/captured.cuh",
        "sm80/bwd/config.cuh",
        "sm80/bwd/dbias.cuh",
        "sm80/bwd/lists.cuh",
        "sm80/bwd/main.cuh",
        "sm80/bwd/masked.cuh",
        "sm80/bwd/owner.cuh",
        "sm80/bwd/pairs.cuh",
        "sm80/bwd/store.cuh",
        "sm80/common/copy.cuh",
        "sm80/fwd/config.cuh",
        "sm80/fwd/consume.cuh",
        "sm80/fwd/epilogue.cuh",
        "sm80/fwd/fp8_product.cuh",
        "sm80/fwd/fwd.cuh",
        "sm80/fwd/fwd_lists.cuh",
        "sm80/fwd/fwd_masked.cuh",
        "sm80/fwd/fwd_tree.cuh",
        "sm80/fwd/load.cuh",
        "sm80/fwd/tma.cuh",
        "sm100/bwd/compute.cuh",
        "sm100/bwd/config.cuh",
        "sm100/bwd/epilogue.cuh",
        "sm100/bwd/finish.cuh",
        "sm100/bwd/issue.cuh",
        "sm100/bwd/load.cuh",
        "sm100/bwd/main.cuh",
        "sm100/bwd/order.cuh",
        "sm100/bwd/reduce.cuh",
        "sm100/bwd/work.cuh",
        "sm100/common/store_columns.cuh",
        "sm100/fwd/config.cuh",
        "sm100/fwd/correct.cuh",
        "sm100/fwd/fwd.cuh",
        "sm100/fwd/issue.cuh",
        "sm100/fwd/load.cuh",
        "sm100/fwd/output.cuh",
        "sm100/fwd/pair.cuh",
        "sm100/fwd/softmax.cuh",
        "mma/sm90/transposed_product.cuh",
        "sm90/bwd/config.cuh",
        "sm90/bwd/consume.cuh",
        "sm90/bwd/consume/cluster.cuh",
        "sm90/bwd/consume/consumer.cuh",
        "sm90/bwd/consume/early_scores.cuh",
        "sm90/bwd/consume/gradient_each.cuh",
        "sm90/bwd/consume/half_blocks.cuh",
        "sm90/bwd/consume/in_order.cuh",
        "sm90/bwd/consume/split_dims.cuh",
        "sm90/bwd/consume/whole_dims.cuh",
        "sm90/bwd/dbias.cuh",
        "sm90/bwd/dq/finish.cuh",
        "sm90/bwd/dq/output.cuh",
        "sm90/bwd/dq/semaphore.cuh",
        "sm90/bwd/dq/store.cuh",
        "sm90/bwd/dq/sums.cuh",
        "sm90/bwd/epilogue.cuh",
        "sm90/bwd/head_sums.cuh",
        "sm90/bwd/listed.cuh",
        "sm90/bwd/load.cuh",
        "sm90/bwd/main.cuh",
        "sm90/bwd/make_delta.cuh",
        "sm90/bwd/masked.cuh",
        "sm90/bwd/modifiers.cuh",
        "sm90/bwd/order.cuh",
        "sm90/bwd/pairs.cuh",
        "sm90/bwd/postprocess.cuh",
        "sm90/bwd/preprocess.cuh",
        "sm90/bwd/repair.cuh",
        "sm90/bwd/work.cuh",
        "sm90/fwd/config.cuh",
        "sm90/fwd/consume.cuh",
        "sm90/fwd/epilogue.cuh",
        "sm90/fwd/fwd.cuh",
        "sm90/fwd/fwd_masked.cuh",
        "sm90/fwd/load.cuh",
        "sm90/fwd/load_bias.cuh",
        "sm90/fwd/prepare_values.cuh",
        "sm90/fwd/recompute_scores.cuh",
        "sm90/fwd/turn_values.cuh",
        "sm90/fwd/value_role.cuh",
        "sm90/fwd/widen_values.cuh",
        "sm90/fwd/zero_values.cuh",
        "sm90/mla/config.cuh",
        "sm90/mla/consume.cuh",
        "sm90/mla/epilogue.cuh",
        "sm90/mla/fwd.cuh",
        "sm90/mla/load.cuh",
        "sm90/mla/products.cuh",
        "sm90/mla/work.cuh",
        "simt/bwd.cuh",
        "simt/fwd.cuh",
        "simt/lists.cuh",
        "simt/lists_bwd.cuh",
        "simt/masked.cuh",
        "simt/scaled.cuh",
        "combine.cuh",
    ));
    headers
}

/// CTAs for a kernel in which a warp takes rows in turn: 16 CTAs to a multiprocessor, none without a
/// row of its own.
fn row_grid(num_rows: u64, num_threads: u32, num_sms: u32) -> u32 {
    let needed = num_rows.div_ceil(u64::from(num_threads / 32)).max(1);
    u32::try_from(needed).unwrap_or(u32::MAX).min(16 * num_sms)
}

/// `a`, or the next multiple of `b` after it.
const fn round_up(a: i32, b: i32) -> i32 {
    (a + b - 1) / b * b
}

/// An entry with what it includes of the headers above and of those rendered for it alone.
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
