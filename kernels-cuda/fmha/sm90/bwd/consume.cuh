// The consume role: a warpgroup multiplies its keys of the block with one query block after another, in one of six
// loops (consume/), and then stores dK and dV.
#pragma once
#include <fmha/sm90/bwd/consume/early_scores.cuh>
#include <fmha/sm90/bwd/consume/gradient_each.cuh>
#include <fmha/sm90/bwd/consume/half_blocks.cuh>
#include <fmha/sm90/bwd/consume/in_order.cuh>
#include <fmha/sm90/bwd/epilogue.cuh>
#include <fmha/sm90/bwd/head_sums.cuh>

namespace fmha::sm90::bwd {

// The loop that a tile's field `walk` selects. The tables select InOrder and LateDp up to head dimension 128; at 192
// HalfBlocks if V has at most 128, otherwise GradientEach; and InClusters at 256.
template <BwdSpec spec, Sm90BwdTile tile, class Keys>
FMHA_DEVICE auto loop_of(Consumer<spec, tile, Keys>& consumer) {
  static_assert(!Keys::has_tile_list || tile.walk == BwdWalk::InOrder || tile.walk == BwdWalk::LateDp, "lists are walked in order");
  if constexpr (tile.walk == BwdWalk::InOrder || tile.walk == BwdWalk::LateDp) {
    return InOrder<spec, tile, Keys>{consumer};
  } else if constexpr (tile.walk == BwdWalk::EarlyScores) {
    return EarlyScores<spec, tile>{consumer};
  } else if constexpr (tile.walk == BwdWalk::HalfBlocks) {
    return HalfBlocks<spec, tile>{consumer};
  } else if constexpr (tile.walk == BwdWalk::SplitDims) {
    return SplitDims<spec, tile>{consumer};
  } else if constexpr (has_gradient_each(tile)) {
    return GradientEach<spec, tile>{consumer};
  } else {
    return InClusters<spec, tile>{consumer};
  }
}

// Zeros rows beyond the sequence in the other CTA's keys; `walk_tile` zeros those of this CTA's keys.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void zero_others_keys(const Consumer<spec, tile>& c, const Work& work) {
  const int32_t there = work.cluster_keys.end - first_key_of_other<tile>(work);
  if (there < tile.block_n && has_rows_behind<spec>(c.p)) {
    ptx::mbarrier_wait_parity(c.smem.v_full, c.tile_phase);
    c.zero_rows(c.smem.other_k, max(there, 0));
    c.finish_zeros();
  }
}

template <BwdSpec spec, Sm90BwdTile tile, class Keys>
FMHA_DEVICE void walk_tile(Consumer<spec, tile, Keys>& c, const Sm90BwdSchedule& schedule, const Work& work) {
  ptx::mbarrier_wait_parity(c.smem.k_full, c.tile_phase);
  const int32_t there = work.keys.end - work.keys.begin;
  if (there < tile.block_n && has_rows_behind<spec>(c.p)) {
    ptx::mbarrier_wait_parity(c.smem.v_full, c.tile_phase);
    c.zero_rows(c.smem.k, max(there, 0));
    c.zero_rows(c.smem.v, max(there, 0));
    c.finish_zeros();
  }
  if constexpr (in_clusters(tile)) zero_others_keys(c, work);
  auto loop = loop_of(c);
  loop.walk(work, query_blocks<spec, tile>(c.p, schedule, work, c.pairs.keys));
  c.arrive(c.smem.kv_empty);
  c.tile_phase ^= 1;
  if constexpr (in_clusters(tile)) wait_until_sent(c);
}

template <BwdSpec spec>
FMHA_DEVICE float dv_factor_of(const BwdParams& p) {
  return spec.fwd.dropout ? p.fwd.dropout_scale : 1.f;
}
template <BwdSpec spec>
FMHA_DEVICE float dk_factor_of(const BwdParams& p) {
  return p.fwd.softmax_scale * dropout_factor_of_ds<spec>(p.fwd);
}

// Calls `store.operator()<dim>` with each gradient that the consumer has, of `dim` columns in memory, and its factor.
template <BwdSpec spec, Sm90BwdTile tile, class Keys, class Store>
FMHA_DEVICE void for_each_gradient(const Consumer<spec, tile, Keys>& c, Store store) {
  using S = Shape<spec, tile>;
  constexpr int qk = spec.fwd.head_dim_qk, v = spec.fwd.head_dim_v;
  if constexpr (!S::gradient_each) store.template operator()<v>(c.dv, c.p.dv, dv_factor_of<spec>(c.p));
  if (S::has_dv(c.index)) {
    store.template operator()<v>(c.dk, c.p.dv, dv_factor_of<spec>(c.p));
  } else {
    store.template operator()<qk>(c.dk, c.p.dk, dk_factor_of<spec>(c.p));
  }
}

// Writes dK and dV to memory, through the shared memory of dS if rows are stored 16 bytes at a time.
template <BwdSpec spec, Sm90BwdTile tile, class Keys>
FMHA_DEVICE void store_gradients(const Consumer<spec, tile, Keys>& c, const Sm90BwdSchedule& schedule,
                                 const Work& work) {
  using S = Shape<spec, tile>;
  constexpr DType dtype = spec.dtype_grad;
  const BwdParams& p = c.p;
  const int32_t row = c.pairs.own_key() + mma::fragment_row(), column = S::first_column(c.index);
  if constexpr (tile.head_parts) {
    const float dv_factor = dv_factor_of<spec>(p), dk_factor = dk_factor_of<spec>(p);
    constexpr int of_dv = mma::kRows * S::dv_columns, share = of_dv + mma::kRows * S::dk_columns;
    if (!work.keys.empty()) {
      const int64_t place = place_of_sums<spec, tile>(p, schedule, work);
      constexpr bool in_order = has_own_parts<spec, tile>();
      if constexpr (in_order) wait_for_parts_before<spec, tile>(schedule, work, place, c.signals);
      const bool stores = !in_order || work.i_part == 0;
      float* const sums = head_sums_of<spec, tile>(schedule, place) + c.index * share;
      if constexpr (of_dv > 0) add_head_sums(sums, c.dv, dv_factor, stores);
      add_head_sums(sums + of_dv, c.dk, S::has_dv(c.index) ? dv_factor : dk_factor, stores);
      if constexpr (in_order) {
        __syncwarp();
        if (c.signals) ptx::red_release_gpu_add(added_parts<spec, tile>(schedule, place), 1);
      }
    }
    __syncwarp();
  } else if constexpr (tile.vector_store && dtype != DType::F32) {
    static_assert(num_consumer_warps(tile) * kStagingBytes <= sizeof(c.smem.ds), "rows find room where dS was");
    const uint32_t staging = ptx::shared_address(&c.smem.ds) + (threadIdx.x / 32 - 4) * kStagingBytes;
    c.sync_consumers();  // All have done their products with dS.
    for_each_gradient(c, [&]<int dim>(const auto& grad, const View& view, float factor) {
      store_rows<dtype, dim>(grad, view, work, row, column, factor, staging);
    });
    c.sync_consumers();
  } else {
    for_each_gradient(c, [&]<int dim>(const auto& grad, const View& view, float factor) {
      store_elems<dtype, dim>(grad, view, work, row, column, factor);
    });
  }
}

template <BwdSpec spec, Sm90BwdTile tile, class Keys>
FMHA_DEVICE void consume(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem,
                         const Keys& keys) {
  const int32_t index = ptx::uniform(threadIdx.x / mma::kWarpgroup) - 1;
  Consumer<spec, tile, Keys> c{p, smem, index, {p, index, p.fwd.softmax_scale * kLog2E, keys}};
  for_each_tile<tile>(schedule, smem, c.signals, [&](int32_t i) {
    const Work work = resolve_work<spec, tile>(p, schedule, i, keys);
    if (work.cluster_keys.empty()) return;
    c.dk.clear();
    c.dv.clear();
    // Keys that no query sees have gradients of 0.
    if (!work.q_blocks.empty()) walk_tile(c, schedule, work);
    store_gradients(c, schedule, work);
    if constexpr (repairs<spec>()) {
      bool non_finite = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) non_finite |= has_non_finite(c.dk, r) || has_non_finite(c.dv, r);
      non_finite = __any_sync(ptx::kAllLanes, non_finite);
      const int32_t warp = threadIdx.x / 32 - 4;
      if (c.signals) non_finite_keys(p)[i * num_consumer_warps(tile) + warp] = non_finite;
      __syncwarp();
    }
  });
}

}  // namespace fmha::sm90::bwd
