// Attention forward on Hopper: one warpgroup loads, one to three consume.
//
// The schedule is that of FlashAttention-3 (Shah et al., 2024). In the first warpgroup one warp loads (load.cuh), one
// takes tile indices and resolves tiles (common/scheduler.cuh), one zeroes V rows that are not the sequence's
// (zero_values.cuh), or two do so and prepare a V of 8 bits (value_role.cuh), or prepare it in the workspace once for
// all tiles (prepare_values.cuh), or widen K and V of a cache of 8 bits (cache_role.cuh).
#pragma once
#include <fmha/ptx/grid.cuh>
#include <fmha/sm90/fwd/consume.cuh>
#include <fmha/sm90/fwd/load.cuh>

namespace fmha::sm90 {

template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void init_barriers(Smem<spec, tile>& smem) {
  constexpr int warps = num_consumer_warps(tile), loads = num_load_arrivals(tile);
  for (int i = 0; i < Smem<spec, tile>::q_buffers; ++i) {
    ptx::mbarrier_init(smem.q_full[i], loads);
    ptx::mbarrier_init(smem.q_empty[i], warps / Smem<spec, tile>::q_pieces);
  }
  for (int i = 0; i < tile.stages; ++i) {
    ptx::mbarrier_init(smem.k_full[i], widens_cache(spec, tile) ? kValueWarps : loads);
    ptx::mbarrier_init(smem.k_empty[i], tile.cluster * warps);
    ptx::mbarrier_init(smem.v_full[i], passes_twice(spec, tile) ? kValueWarps : loads);
    if constexpr (prepares_v(spec, tile)) ptx::mbarrier_init(smem.v_raw_empty[i], kValueWarps);
    if constexpr (!widens_cache(spec, tile)) ptx::mbarrier_init(smem.v_raw[i], 1);
    ptx::mbarrier_init(smem.v_empty[i], tile.cluster * warps);
  }
  for (int i = 0; i < tile.raw_stages; ++i) {
    ptx::mbarrier_init(smem.v_raw[i], 1);
    ptx::mbarrier_init(smem.v_raw_empty[i], kValueWarps);
  }
  for (int i = 0; i < num_bias_slots(tile); ++i) {
    ptx::mbarrier_init(smem.bias_full[i], 1);
    ptx::mbarrier_init(smem.bias_empty[i], warps / num_consumers(tile));
  }
  for (int i = 0; i < kWorkSlots; ++i) {
    ptx::mbarrier_init(smem.work_full[i], 1);
    ptx::mbarrier_init(smem.work_empty[i], num_work_readers(spec, tile));
  }
  if constexpr (tile.cluster > 1 && tile.order == TileOrder::Dynamic) {
    ptx::mbarrier_init(smem.claimed_full, 1);
    ptx::mbarrier_init(smem.claimed_empty, 1);
  }
  ptx::fence_mbarrier_init();
}

template <FwdSpec spec, Sm90Tile tile, class ArrivedKeys = AllKeysHere, class SeenKeys = EveryKey>
FMHA_DEVICE void fwd(const FwdParams& p, const Maps& maps, const TileSchedule& schedule, const PreparedValues& values = {},
                     ArrivedKeys arrived = {}, const SeenKeys& seen = {}) {
  static_assert(spec.dtype_qk == spec.dtype_v || is_fp8(spec.dtype_qk), "sm90: Q, K and V share a type, or Q and K are FP8");
  static_assert(size_bytes(spec.dtype_qk) <= 2 && size_bytes(spec.dtype_v) <= 2, "sm90: types of 16 and 8 bits");
  static_assert(!is_fp8(spec.dtype_qk) || tile.copy_bytes == 0, "sm90: FP8 comes by TMA");
  static_assert(!is_fp8(operand_v(spec, tile)) || !tile.skip_row_max, "sm90: a P of 8 bits has no room above a row's maximum");
  static_assert(!is_fp8(operand_v(spec, tile)) || p_offset_log2(spec, tile) >= 0, "sm90: FP8's range holds the rescale threshold");
  static_assert(!takes_prepared_v(tile) || (is_fp8(spec.dtype_v) && spec.v_layout == VLayout::RowMajor),
                "sm90: a row-major V of FP8 is prepared in the workspace");
  static_assert(!prepares_v(spec, tile) || tile.cluster == 1, "sm90: the load role's warpgroup prepares its own V");
  static_assert(!flushes_output(tile) || is_fp8(operand_v(spec, tile)), "sm90: 16-bit products are summed in f32");
  static_assert(tile.output_columns == 0 ||
                    (flushes_output(tile) && padded_dim(spec.head_dim_v) % tile.output_columns == 0),
                "sm90: parts of O are flushed with every block");
  static_assert(!loads_pages(tile) || (spec.kv_layout == KvKind::Paged && tile.copy_bytes == 0 && tile.cluster == 1),
                "sm90: pages by TMA, of a CTA by itself");
  static_assert(spec.kv_layout != KvKind::Paged || loads_pages(tile) || tile.copy_bytes > 0,
                "sm90: pages come by boxes of their own, or by copies");
  static_assert(spec.kv_layout != KvKind::Paged || !takes_prepared_v(tile),
                "sm90: a V in pages is prepared by its tiles");
  static_assert(!widens_cache(spec, tile) ||
                    (tile.raw_stages > 0 && is_fp8(tile.stored) && size_bytes(spec.dtype_qk) == 2 && tile.copy_bytes == 0 &&
                     tile.cluster == 1 && tile.bias_stages == 0 && spec.v_layout == VLayout::RowMajor),
                "sm90: a cache of 8 bits comes by TMA, to be widened by its own CTA");
  static_assert(tile.bias_stages == 0 || (Modifiers<spec, tile>::adds_wide_elements && tile.copy_bytes == 0 &&
                                          tile.cluster == 1 && !tile.pack_gqa),
                "sm90: a spare warp of the load role brings a bias of 16 bits, its rows those of one head");
  static_assert(tile.split_keys == 0 || (tile.cluster == 1 && !tile.skip_row_max && !takes_prepared_v(tile)),
                "sm90: a part of the keys is one CTA's, and does not end at the sequence's first key");
  static_assert(tile.fold_keys == 0 || (tile.split_keys == 0 && !tile.skip_row_max && !flushes_output(tile) &&
                                        !spec.sink && !spec.sink_columns && !is_fp8(spec.dtype_o) && !SeenKeys::has_tile_list &&
                                        tile.fold_keys % tile.block_n == 0),
                "sm90: a tile that folds its parts walks whole blocks of the band's, with no decision that rows share");
  static_assert(!ArrivedKeys::waits || (tile.copy_bytes == 0 && !takes_prepared_v(tile)),
                "sm90: one thread loads keys that come while the kernel runs");
  static_assert(!spec.write_keep_mask, "sm90: it does not write the keep mask");
  static_assert(spec.v_layout == VLayout::RowMajor || tile.copy_bytes == 0, "sm90: only TMA loads a column-major V");
  static_assert(tile.cluster == 1 || tile.copy_bytes == 0,
                "sm90: a cluster loads by TMA");
  static_assert(!tile.cluster_heads || (tile.cluster > 1 && !tile.pack_gqa), "sm90: heads of a cluster, not packed");
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<spec, tile>& smem = *reinterpret_cast<Smem<spec, tile>*>(raw);
  if (threadIdx.x == 0) {
    // Prefetches the tensor maps before the previous grid ends; as kernel arguments they do not depend on it.
    if constexpr (tile.copy_bytes == 0) {
      ptx::prefetch_tensormap(maps.q);
      ptx::prefetch_tensormap(maps.k);
      ptx::prefetch_tensormap(maps.v);
    }
    init_barriers(smem);
  }
  if constexpr (whole_groups<tile>()) {
    // Rows of a tile that no TMA box loads are set to zero, since the products read them.
    for (int i = 0; i < Smem<spec, tile>::q_buffers; ++i) zero_rows(smem.q[i], rows_of_tile<tile>(p), threadIdx.x, num_threads(tile));
    ptx::fence_proxy_async();
  }
  if constexpr (tile.cluster > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  // Every thread waits, since what it stores may be what the grid before still reads. The next grid is let start at
  // once: its CTAs find no room on an SM before these end, and wait here for all of them.
  if constexpr (tile.dependent_launch) {
    ptx::launch_dependents();
    ptx::wait_for_grids_before();
  }
  if (ptx::uniform(threadIdx.x / mma::kWarpgroup) == 0) {
    load<spec, tile>(p, maps, schedule, values, arrived, seen, smem);
  } else {
    consume<spec, tile>(p, smem, seen);
  }
  // A CTA exits only when the others have received what it loads for them, and it has received what they load for it.
  if constexpr (tile.cluster > 1) ptx::cluster_sync();
}

}  // namespace fmha::sm90
