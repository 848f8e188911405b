// Stores O and LSE of a finished tile from registers to memory.
#pragma once
#include <fmha/common/output_place.cuh>
#include <fmha/common/quads.cuh>
#include <fmha/common/seen_keys.cuh>
#include <fmha/common/softmax.cuh>
#include <fmha/common/store_rows.cuh>
#include <fmha/sm90/fwd/folded_output.cuh>

namespace fmha::sm90 {

// Recomputes those of a warp's 16 rows that any lane has flagged as non-finite. `row` is the thread's first row in its
// tile. The flagged rows' first results have been stored before the warp's last synchronisation.
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

// The end of row `r` of a thread, over all of its keys or a part of them.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE PartEnd end_of_thread(const FwdParams& p, const Work& work, const TileRow& of_thread, const RowStats& stats,
                                  float scale_log2, float offset_log2,
                                  const mma::Accumulator<product_dim(spec.head_dim_v, spec.dtype_v)>& o, int r) {
  using RowSoftmax = Softmax<tile, p_offset_log2(spec, tile)>;
  const float row_sum = quad_reduce(stats.row_sum, [](float a, float b) { return a + b; });
  const float max_log2 = RowSoftmax::shift_of(stats.row_max, scale_log2) + offset_log2;
  PartEnd end = end_lane_row<spec, RowSoftmax>(p, EveryKey{}, max_log2, stats.row_max, row_sum, scale_log2,
                                               of_thread.stored ? of_thread.to.i_head : 0, o, r);
  end.result.factor = scaled_output<output_scales(spec)>(end.result.factor, p, work.i_batch, work.i_head_kv);
  end.again &= of_thread.stored;
  return end;
}

template <FwdSpec spec, Sm90Tile tile, class Keys>
FMHA_DEVICE void epilogue(const FwdParams& p, const Work& work, int32_t row, RowStats (&rows)[2], float scale_log2, float offset_log2,
                          mma::Accumulator<product_dim(spec.head_dim_v, spec.dtype_v)>& o, const Keys& keys) {
  constexpr bool turned = turns_v(spec, tile);
  const int32_t quad_lane = threadIdx.x % 4;
  const TileRow of_thread[2] = {tile_row<tile>(p, work, row, keys), tile_row<tile>(p, work, row + 8, keys)};
  PartEnd ends[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    ends[r] = end_of_thread<spec, tile>(p, work, of_thread[r], rows[r], scale_log2, offset_log2, o, r);
  if constexpr (tile.fold_keys > 0) {
    // A warpgroup without rows may have walked no block, so it has no folded O to read.
    const bool has_rows = of_thread[0].i < work.seqlen_q;
    if (ptx::uniform(has_rows && FoldedOutput<spec, tile>::has_several_parts(work)))
      FoldedOutput<spec, tile>::template add<true>(p, false, ends, o);
  }
  const bool suspect[2] = {ends[0].again, ends[1].again};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const TileRow& to = of_thread[r];
    const RowResult& result = ends[r].result;
    store_lane_row<spec, tile, turned>(p.o.data, to.to.o(p), o, r, result.factor, to.stored);
    if constexpr (spec.write_lse) ptx::st_global_f32_if(to.to.lse(p), result.lse, to.stored && quad_lane == 0);
  }
  __syncwarp();
  if (!__any_sync(ptx::kAllLanes, suspect[0] || suspect[1])) return;
  if constexpr (leaves_rows_to_fold<tile, Keys>()) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Any of a row's four lanes may have found a NaN or an infinity.
      const bool found = ptx::vote_ballot(suspect[r]) >> (threadIdx.x % 32 / 4 * 4) & 15;
      ptx::st_global_f32_if(of_thread[r].to.lse(p), float_of(kAgainBits), found && quad_lane == 0);
    }
    return;
  }
  recompute_rows<spec, tile>(p, work, row, suspect, keys);
}

}  // namespace fmha::sm90
