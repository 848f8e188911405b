// O and LSE of a finished tile, from registers to memory.
#pragma once
#include <fmha/common/output_place.cuh>
#include <fmha/common/quads.cuh>
#include <fmha/common/seen_keys.cuh>
#include <fmha/common/softmax.cuh>
#include <fmha/common/store_rows.cuh>
#include <fmha/sm90/fwd/folded_output.cuh>

namespace fmha::sm90 {

// Recomputes those of a warp's 16 rows that any lane has flagged as non-finite. `row` is the thread's first in its
// tile. The rows have been stored, as they were, before the warp's last synchronisation.
template <FwdSpec spec, Sm90Tile tile, class Keys>
FMHA_DEVICE void recompute_rows(const FwdParams& p, const Work& work, int32_t row, const bool (&suspect)[2],
                                const Keys& keys) {
  const int32_t first_row = row - threadIdx.x % 32 / 4;
  const SeqSpan span = {work.i_batch, work.storage_batch, work.q_row, work.seqlen_q, work.k_row, work.seqlen_k};
  const uint32_t lanes[2] = {ptx::vote_ballot(suspect[0]), ptx::vote_ballot(suspect[1])};
#pragma unroll 1
  for (int32_t within = 0; within < 16; ++within) {
    const uint32_t quad = (within < 8 ? lanes[0] : lanes[1]) >> within % 8 * 4 & 15;
    if (!ptx::uniform(quad)) continue;
    const int32_t packed_row = ptx::uniform(first_row + within);
    const int32_t i = query_of<tile>(p, packed_row);
    const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
    if constexpr (split_keys<tile>() > 0) {
      const OutputPlace place = output_place<tile>(p, work);
      const Range own = keys_of_work<tile>(p, work);
      RecomputedRow<spec, tile.stored> recomputed{p, span, i_head, i, place.batch, place.row + i, own};
      recomputed.run();
    } else if constexpr (Keys::all) {
      RecomputedRow<spec, tile.stored> recomputed{p, span, i_head, i};
      recomputed.run();
    } else {
      const Range every = {0, span.seqlen_k};
      RecomputedRow<spec, spec.dtype_qk, Keys> recomputed{p, span, i_head, i, span.storage_batch, span.q_row + i,
          every, keys};
      recomputed.run();
    }
  }
}

// A thread's two rows of a tile, the first of them `row`.
template <FwdSpec spec, Sm90Tile tile>
struct RowsOfThread {
  const FwdParams& p;
  const Work& work;
  const int32_t row;

  FMHA_DEVICE int32_t packed_row(int r) const { return row + 8 * r; }
  FMHA_DEVICE int32_t query(int r) const { return query_of<tile>(p, packed_row(r)); }
  FMHA_DEVICE int32_t head(int r) const {
    return tile.pack_gqa ? work.i_head + packed_row(r) - query(r) * p.gqa_ratio : work.i_head;
  }
  FMHA_DEVICE bool is_stored(int r) const {
    const bool is_of_tile = !whole_groups<tile>() || packed_row(r) - work.first_row < rows_of_tile<tile>(p);
    return query(r) < work.seqlen_q && is_of_tile;
  }

  // The end of a row, over all of its keys or a part of them.
  FMHA_DEVICE PartEnd end(int r, const RowStats& stats, float scale_log2, float offset_log2,
                          const mma::Accumulator<product_dim(spec.head_dim_v, spec.dtype_v)>& o) const {
    using RowSoftmax = Softmax<tile, p_offset_log2(spec, tile)>;
    const bool stored = is_stored(r);
    const float row_sum = quad_reduce(stats.row_sum, [](float a, float b) { return a + b; });
    // A row whose log2 maximum and natural maximum differ beyond rounding is computed again.
    const float max_log2 = RowSoftmax::shift_of(stats.row_max, scale_log2) + offset_log2;
    RowResult result = finish_row<spec>(p, {max_log2, __fmul_rn(max_log2, kLn2)}, row_sum, stored ? head(r) : 0);
    if constexpr (is_fp8(spec.dtype_v)) result.factor *= scalar_of(p.descale_v, work.i_batch, work.i_head_kv, 1.f);
    if constexpr (is_fp8(spec.dtype_o)) result.factor *= p.scale_o ? *p.scale_o : 1.f;
    if constexpr (spec.dropout) result.factor *= p.dropout_scale;
    bool again = stored && RowSoftmax::is_too_large(stats.row_max, scale_log2);
    // A row that sees no key (LSE -inf) is among them: its O is to be 0, but 0 times a hidden NaN of V is NaN.
    if constexpr (may_be_non_finite(spec)) again |= stored && has_non_finite(o, r) && result.lse < infinity();
    return {result, again};
  }
};

template <FwdSpec spec, Sm90Tile tile, class Keys>
FMHA_DEVICE void epilogue(const FwdParams& p, const Work& work, int32_t row, RowStats (&rows)[2], float scale_log2, float offset_log2,
                          mma::Accumulator<product_dim(spec.head_dim_v, spec.dtype_v)>& o, const Keys& keys) {
  constexpr bool turned = turns_v(spec, tile);
  const OutputPlace place = output_place<tile>(p, work);
  const RowsOfThread<spec, tile> of_thread{p, work, row};
  const int32_t quad_lane = threadIdx.x % 4;
  PartEnd ends[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) ends[r] = of_thread.end(r, rows[r], scale_log2, offset_log2, o);
  if constexpr (tile.fold_keys > 0) {
    // A warpgroup without rows may have walked no block, and then has folded nothing.
    const bool has_rows = of_thread.query(0) < work.seqlen_q;
    if (ptx::uniform(has_rows && FoldedOutput<spec, tile>::has_several_parts(work)))
      FoldedOutput<spec, tile>::template add<true>(p, false, ends, o);
  }
  const bool suspect[2] = {ends[0].again, ends[1].again};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t i = of_thread.query(r), i_head = of_thread.head(r);
    const bool stored = of_thread.is_stored(r);
    const RowResult& result = ends[r].result;
    const int64_t at = place.batch * p.o.batch + int64_t(place.row + i) * p.o.row + i_head * p.o.head;

    if constexpr (split_keys<tile>() > 0) {
      store_part<spec, turned>(static_cast<float*>(p.o.data) + at, o, r, result.factor, stored);
    } else if constexpr (tile.vector_store && is_fp8(spec.dtype_o)) {
      store_bytes<spec, turned>(static_cast<uint8_t*>(p.o.data) + at, o, r, result.factor, stored);
    } else if constexpr (tile.vector_store && spec.dtype_o != DType::F32) {
      store_vectors<spec, turned>(static_cast<uint16_t*>(p.o.data) + at, o, r, result.factor, stored);
    } else {
      store_elements<spec, turned>(p.o.data, at, o, r, result.factor, stored);
    }
    if constexpr (spec.write_lse) {
      float* out = p.lse + place.batch * p.lse_batch + i_head * p.lse_head + place.row + i;
      ptx::st_global_f32_if(out, result.lse, stored && quad_lane == 0);
    }
  }
  __syncwarp();
  if (!__any_sync(ptx::kAllLanes, suspect[0] || suspect[1])) return;
  if constexpr (leaves_rows_to_fold<tile, Keys>()) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Any of a row's four lanes may have found a value.
      const bool found = ptx::vote_ballot(suspect[r]) >> (threadIdx.x % 32 / 4 * 4) & 15;
      float* out = p.lse + place.batch * p.lse_batch + of_thread.head(r) * p.lse_head + place.row + of_thread.query(r);
      ptx::st_global_f32_if(out, float_of(kAgainBits), found && quad_lane == 0);
    }
    return;
  }
  recompute_rows<spec, tile>(p, work, row, suspect, keys);
}

}  // namespace fmha::sm90
