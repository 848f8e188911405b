// O and LSE of a warp's rows, from registers to memory.
#pragma once
#include <fmha/common/fold.cuh>
#include <fmha/common/output_place.cuh>
#include <fmha/common/store_rows.cuh>
#include <fmha/sm80/fwd/consume.cuh>

namespace fmha::sm80 {

template <FwdSpec spec, Sm80Tile tile>
FMHA_DEVICE constexpr FwdSpec spec_of_part() {
  FwdSpec part = spec;
  if (tile.value_parts > 1) part.head_dim_v = spec.head_dim_v / tile.value_parts;
  return part;
}

template <FwdSpec spec, Sm80Tile tile, class Keys>
FMHA_DEVICE void store(Consumer<spec, tile, Keys>& consumer) {
  using RowSoftmax = typename Consumer<spec, tile, Keys>::RowSoftmax;
  constexpr bool turned = Smem<spec, tile>::turned;
  const FwdParams& p = consumer.p;
  const Work& work = consumer.work;
  const float scale_log2 = consumer.scale_log2, offset_log2 = consumer.modifiers.offset_log2();
  const int32_t quad_lane = threadIdx.x % 4, first_column = consumer.part * Consumer<spec, tile, Keys>::Output::columns;
  // The spec with which a part of O's columns is stored: a row ends with the part's last column.
  constexpr FwdSpec output = spec_of_part<spec, tile>();
  bool suspect[m_tiles(tile)][2];
#pragma unroll
  for (int m = 0; m < m_tiles(tile); ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowStats& stats = consumer.softmax[m].rows[r];
      const auto& o = consumer.o[m];
      const TileRow row = tile_row<tile>(p, work, consumer.row(m) + 8 * r, consumer.keys);
      const float row_sum = quad_reduce(stats.row_sum, [](float a, float b) { return a + b; });
      const float max_log2 = RowSoftmax::shift_of(stats.row_max, scale_log2) + offset_log2;
      const PartEnd end = end_lane_row<spec, RowSoftmax>(p, consumer.keys, max_log2, stats.row_max, row_sum, scale_log2,
                                                         row.stored ? row.to.i_head : 0, o, r);
      suspect[m][r] = row.stored && end.again;
      const float factor = scaled_output<output_scales(spec)>(end.result.factor, p, work.i_batch, work.i_head_kv);
      const int64_t at = row.to.o(p) + first_column;
      if constexpr (reads_raw_blocks(spec, tile)) {
        store_lane_rows<spec, tile.vector_store>(p.o.data, at, o, r, factor, row.stored);
      } else {
        store_lane_row<output, tile, turned>(p.o.data, at, o, r, factor, row.stored);
      }
      if constexpr (spec.write_lse) ptx::st_global_f32_if(row.to.lse(p), end.result.lse, row.stored && quad_lane == 0);
    }
  }
  // A row that is recomputed gets all its columns from one warp, so that warp waits until all warps have stored theirs.
  if constexpr (tile.value_parts > 1) {
    __syncthreads();
  } else {
    __syncwarp();
  }
#pragma unroll
  for (int m = 0; m < m_tiles(tile); ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // A row is recomputed if any of its four lanes has found a NaN or an infinity.
      const bool found = quad_reduce(suspect[m][r] ? 1.f : 0.f, [](float a, float b) { return fmaxf(a, b); }) > 0.f;
      if constexpr (leaves_rows_to_fold<tile, Keys>()) {
        const TileRow row = tile_row<tile>(p, work, consumer.row(m) + 8 * r, consumer.keys);
        ptx::st_global_f32_if(row.to.lse(p), float_of(kAgainBits), found && quad_lane == 0);
      } else if (__any_sync(ptx::kAllLanes, found))
        recompute_rows<spec, tile>(p, work, consumer.row(m) + 8 * r, found && quad_lane == 0, consumer.keys);
    }
  }
}

}  // namespace fmha::sm80
