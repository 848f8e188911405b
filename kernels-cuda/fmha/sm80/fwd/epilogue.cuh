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
  const OutputPlace place = output_place<tile>(p, work);
  const int32_t quad_lane = threadIdx.x % 4, first_column = consumer.part * Consumer<spec, tile, Keys>::Output::columns;
  // Spec as the stores see it: a row ends with the part's columns.
  constexpr FwdSpec output = spec_of_part<spec, tile>();
  bool suspect[m_tiles(tile)][2];
#pragma unroll
  for (int m = 0; m < m_tiles(tile); ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowStats& stats = consumer.softmax[m].rows[r];
      const auto& o = consumer.o[m];
      const int32_t packed_row = consumer.row(m) + 8 * r, i = query_of<tile>(p, packed_row);
      const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
      const bool stored = i < work.seqlen_q;
      const float row_sum = quad_reduce(stats.row_sum, [](float a, float b) { return a + b; });
      // A row whose log2 maximum and natural maximum differ beyond rounding is computed again.
      const float max_log2 = RowSoftmax::shift_of(stats.row_max, scale_log2) + offset_log2;
      const RowEnd end = finish_row_of<spec>(p, consumer.keys, {max_log2, __fmul_rn(max_log2, kLn2)}, row_sum,
                                             stored ? i_head : 0);
      RowResult result = end.row;
      if constexpr (is_fp8(spec.dtype_v)) result.factor *= scalar_of(p.descale_v, work.i_batch, work.i_head_kv, 1.f);
      if constexpr (is_fp8(spec.dtype_o)) result.factor *= p.scale_o ? *p.scale_o : 1.f;
      if constexpr (spec.dropout) result.factor *= p.dropout_scale;
      suspect[m][r] = stored && RowSoftmax::is_too_large(stats.row_max, scale_log2);
      // A row that sees no key (LSE -inf) is among them: its O is to be 0, but 0 times a hidden NaN of V is NaN.
      if constexpr (may_be_non_finite(spec)) suspect[m][r] |= stored && has_non_finite(o, r) && end.lse_of_keys < infinity();
      const int32_t o_row = place.row + query_of_sequence(consumer.keys, i);
      const int64_t at = place.batch * p.o.batch + int64_t(o_row) * p.o.row + i_head * p.o.head + first_column;
      if constexpr (reads_raw_blocks(spec, tile)) {
        store_lane_rows<spec, tile.vector_store>(p.o.data, at, o, r, result.factor, stored);
      } else if constexpr (tile.split_keys > 0) {
        store_part<output, turned>(static_cast<float*>(p.o.data) + at, o, r, result.factor, stored);
      } else if constexpr (!tile.vector_store || spec.dtype_o == DType::F32) {
        store_elements<output, turned>(p.o.data, at, o, r, result.factor, stored);
      } else if constexpr (is_fp8(spec.dtype_o)) {
        store_bytes<output, turned>(static_cast<uint8_t*>(p.o.data) + at, o, r, result.factor, stored);
      } else {
        store_vectors<output, turned>(static_cast<uint16_t*>(p.o.data) + at, o, r, result.factor, stored);
      }
      if constexpr (spec.write_lse) {
        float* out = p.lse + place.batch * p.lse_batch + i_head * p.lse_head + o_row;
        ptx::st_global_f32_if(out, result.lse, stored && quad_lane == 0);
      }
    }
  }
  // A row computed again is written whole: after all its parts.
  if constexpr (tile.value_parts > 1) {
    __syncthreads();
  } else {
    __syncwarp();
  }
#pragma unroll
  for (int m = 0; m < m_tiles(tile); ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Any of a row's four lanes may have found a non-finite value.
      const bool found = quad_reduce(suspect[m][r] ? 1.f : 0.f, [](float a, float b) { return fmaxf(a, b); }) > 0.f;
      if constexpr (leaves_rows_to_fold<tile, Keys>()) {
        const int32_t packed_row = consumer.row(m) + 8 * r, i = query_of<tile>(p, packed_row);
        const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
        float* out = p.lse + place.batch * p.lse_batch + i_head * p.lse_head + place.row + i;
        ptx::st_global_f32_if(out, float_of(kAgainBits), found && quad_lane == 0);
      } else if (__any_sync(ptx::kAllLanes, found))
        recompute_rows<spec, tile>(p, work, consumer.row(m) + 8 * r, found && quad_lane == 0, consumer.keys);
    }
  }
}

}  // namespace fmha::sm80
