// Stores a finished row from tensor memory to O and LSE, one row a thread.
//
// Rows are stored from registers, 16 bytes at a time; the L2 joins a row's stores to whole sectors. By TMA the bytes
// would cross shared memory twice, whose bandwidth the products need.
#pragma once
#include <fmha/common/output_place.cuh>
#include <fmha/ptx/tmem.cuh>
#include <fmha/sm100/common/store_columns.cuh>
#include <fmha/sm100/fwd/config.cuh>

namespace fmha::sm100 {

// Stores row `row` of the sequence and head, whose O is at `o` in tensor memory. A whole warp calls it. `seen` says
// which keys queries see. `scales` are scales of elements; with them O may overflow f32, as with bf16.
template <FwdSpec spec, Sm100Tile tile, class SeenKeys, class Scales>
FMHA_DEVICE void store_row(const FwdParams& p, const Work& work, int32_t row, float row_sum, float row_max,
                           uint32_t o, const SeenKeys& seen, const Scales& scales) {
  constexpr bool may_be_non_finite = is_scaled(tile) || fmha::may_be_non_finite(spec);
  constexpr int dim = spec.head_dim_v, chunk = 32;
  const TileRow of_tile = tile_row<tile>(p, work, row, EveryKey{});
  const bool stored = of_tile.stored;
  // P was scaled, and so were the sum and O: this factor undoes it.
  constexpr float of_p = 1.f / scale_of_p<spec, tile>();
  const float scale_log2 = softmax_scale_log2<spec>(p, work);
  const RowMax max = {__fmul_rn(row_max, scale_log2), __fmul_rn(row_max, scale_log2 * kLn2)};
  RowResult result = finish_row<spec>(p, max, row_sum * of_p, stored ? of_tile.to.i_head : 0);
  if constexpr (of_p != 1.f) result.factor *= of_p;
  result.factor = scaled_output<output_scales(spec)>(result.factor, p, work.i_batch, work.i_head_kv);
  const int64_t at = of_tile.to.o(p);

  float zero = 0.f;  // NaN once a number is not finite
#pragma unroll
  for (int c = 0; c < padded_dim(dim); c += chunk) {
    uint32_t words[chunk];
    ptx::tcgen05_ld(words, o + c);
    ptx::tcgen05_wait_ld();
    ptx::tcgen05_loaded(words);
    float x[chunk];
#pragma unroll
    for (int e = 0; e < chunk; ++e) {
      x[e] = float_of(words[e]) * result.factor;
      if constexpr (may_be_non_finite) zero = fmaf(x[e], 0.f, zero);
    }
    store_columns<spec.dtype_o, tile.vector_store>(p.o.data, at + c, x, dim - c, stored);
  }
  if constexpr (spec.write_lse) ptx::st_global_f32_if(of_tile.to.lse(p), result.lse, stored);
  if constexpr (may_be_non_finite) {
    // A row without visible keys must be 0. It is recomputed if hidden values have reached it.
    const bool suspect = stored && is_nan(zero) && result.lse < infinity();
    __syncwarp();
    if (!__any_sync(ptx::kAllLanes, suspect)) return;
    if constexpr (is_scaled(tile) && SeenKeys::has_tile_list) {
      recompute_rows<spec, tile>(p, work, row, suspect, seen.pairs, scales.elems());
    } else if constexpr (is_scaled(tile)) {
      recompute_rows<spec, tile>(p, work, row, suspect, seen, scales.elems());
    } else if constexpr (SeenKeys::has_tile_list) {
      recompute_rows<spec, tile>(p, work, row, suspect, seen.pairs);
    } else {
      recompute_rows<spec, tile>(p, work, row, suspect, seen);
    }
  }
}

}  // namespace fmha::sm100
