// Computes dQ in the pass that computes dK and dV: every CTA of keys adds its dS K to f32 sums in memory, in no order,
// and a later launch scales and rounds the sums.
//
// For this product a block's dS lies in shared memory as [keys, queries]: the product's rows are queries, and its inner
// dimension is the CTA's keys. Each warp has sixteen queries and a part of the columns. The sums lie in the order of
// the accumulators, so that the lanes of an addition have 128 bytes side by side.
#pragma once
#include <fmha/common/finish_dq.cuh>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/sm80/bwd/config.cuh>

namespace fmha::sm80::bwd {

// The part of a block's dQ that one warp computes.
template <BwdSpec spec, Sm80BwdTile tile>
struct DqShape {
  static constexpr int rows = tile.columns, dim = padded_dim(spec.fwd.head_dim_qk);
  static constexpr int row_groups = tile.columns / mma::kRows, parts = tile.warps / row_groups, n = dim / parts;
  static_assert(tile.warps % row_groups == 0 && dim % parts == 0 && n % 16 == 0, "sm80: all warps have whole products of dQ");

  // Address of the sums of dQ of a block of queries.
  FMHA_DEVICE static float* block_of(const BwdParams& p, const SeqSpan& span, int32_t i_head, int32_t first_query) {
    return p.dq_sums + stats_offset(p, span, i_head, first_query) * dim;
  }
  // Offset of an element of dQ from where its block's sums begin.
  FMHA_DEVICE static int32_t index_of(int32_t row, int32_t column) {
    const int32_t warp = column / n * row_groups + row / mma::kRows, within = column % n;
    const int32_t e = within / 8 * 4 + row / 8 % 2 * 2 + within % 2, lane = row % 8 * 4 + within % 8 / 2;
    return warp * (mma::kRows * n) + e * 32 + lane;
  }
};

// Stores a warp's 16 keys of dS to shared memory, or zeros in their place.
template <class Tile, class Operand>
FMHA_DEVICE void put_ds(const Tile& tile, int32_t warp_row, const Operand* ds) {
  const int32_t row = warp_row + threadIdx.x % 32 / 4;
#pragma unroll
  for (int f = 0; f < Tile::dim / 4; ++f) {
    const uint32_t at = tile.address() + fmha::mma::word_offset<Tile>(row + f % 2 * 8, f / 2 * 8) + threadIdx.x % 4 * 4;
    ptx::st_shared_b32(at, ds ? ds->elems[f / 4][f % 4] : 0);
  }
}

// Adds the contribution of the CTA's keys to dQ of the block of queries whose dS is in shared memory.
template <BwdSpec spec, Sm80BwdTile tile, class Gradients, class Keys>
FMHA_DEVICE void add_dq(float* sums, const Gradients& ds, const Keys& keys) {
  using Shape = DqShape<spec, tile>;
  const int32_t warp = threadIdx.x / 32;
  mma::Accumulator<Shape::n> dq;
  dq.clear();
  mma::product_atb<spec.fwd.dtype_qk, tile.fragments_ahead>(dq, ds, warp % Shape::row_groups * mma::kRows, keys,
                                                            warp / Shape::row_groups * Shape::n);
  float* own = sums + warp * (mma::kRows * Shape::n) + threadIdx.x % 32;
#pragma unroll
  for (int e = 0; e < dq.num_elems; ++e) ptx::red_global_add_f32(own + e * 32, dq[e]);
}

}  // namespace fmha::sm80::bwd
