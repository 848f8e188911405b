// O and LSE of a finished tile, from registers to memory.
#pragma once
#include <fmha/common/output_row.cuh>
#include <fmha/common/recompute_row.cuh>
#include <fmha/sm90/common/fragment.cuh>
#include <fmha/sm90/fwd/config.cuh>
#include <fmha/sm90/fwd/softmax.cuh>

namespace fmha::sm90 {

// Computes those of a warp's 16 rows again that any lane suspects. `row` is the thread's first in its tile; of its
// two rows `suspect` says whether their values in this thread are not finite, and `lse` what their log-sum-exp is.
// The rows have been stored, as they were, before the warp's last synchronisation.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void recompute_rows(const FwdParams& p, const Work& work, int32_t row, const bool (&suspect)[2],
                           const float (&lse)[2]) {
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
    const float row_lse = ptx::shfl_idx(within < 8 ? lse[0] : lse[1], within % 8 * 4);
    RecomputedRow<spec> recomputed{p, span, i_head, i, row_lse};
    recomputed.run();
  }
}

template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void epilogue(const FwdParams& p, const Work& work, int32_t row, RowStats (&rows)[2], float scale_log2, float offset_log2,
                          mma::Accumulator<padded_dim(spec.head_dim_v)>& o) {
  constexpr int dim = spec.head_dim_v;
  const int32_t quad_lane = threadIdx.x % 4;
  bool suspect[2] = {false, false};
  float lse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t packed_row = row + 8 * r, i = query_of<tile>(p, packed_row);
    const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
    const bool stored = i < work.seqlen_q;
    const float row_sum = quad_reduce(rows[r].row_sum, [](float a, float b) { return a + b; });
    RowResult result = finish_row<spec>(p, rows[r].row_max * scale_log2 + offset_log2, row_sum, stored ? i_head : 0);
    if constexpr (spec.dropout) result.factor *= p.dropout_scale;
    lse[r] = result.lse;
    // A row that sees no key (LSE -inf) is among them: its O is to be 0, but 0 times a hidden NaN of V is NaN.
    if constexpr (spec.mask != MaskKind::Full) suspect[r] = stored && has_non_finite(o, r) && result.lse < infinity();
    const int64_t at = work.storage_batch * p.o.batch + int64_t(work.q_row + i) * p.o.row + i_head * p.o.head;

    if constexpr (tile.vector_store) {
      uint16_t* out = static_cast<uint16_t*>(p.o.data) + at;
#pragma unroll
      for (int c = 0; c < padded_dim(dim) / 8; c += 4) {
        uint32_t words[4];
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          const int e = 4 * (c + g) + 2 * r;
          words[g] = ptx::cvt_rn_x2<spec.dtype_o>(o[e] * result.factor, o[e + 1] * result.factor);
        }
        quad_transpose(words);
        const int32_t column = 8 * (c + quad_lane);
        ptx::st_global_v4_b32_if(out + column, words, stored && column < dim);
      }
    } else {
#pragma unroll
      for (int e = 2 * r; e < padded_dim(dim) / 2; e += 4) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int32_t column = o.column(e + k) + 2 * quad_lane;
          const float value = o[e + k] * result.factor;
          const bool inside = stored && column < dim;
          if constexpr (spec.dtype_o == DType::F32) {
            ptx::st_global_f32_if(static_cast<float*>(p.o.data) + at + column, value, inside);
          } else {
            const uint16_t half = uint16_t(ptx::cvt_rn_x2<spec.dtype_o>(value, 0.f));
            ptx::st_global_u16_if(static_cast<uint16_t*>(p.o.data) + at + column, half, inside);
          }
        }
      }
    }
    if constexpr (spec.write_lse) {
      float* out = p.lse + work.storage_batch * p.lse_batch + i_head * p.lse_head + work.q_row + i;
      ptx::st_global_f32_if(out, result.lse, stored && quad_lane == 0);
    }
  }
  __syncwarp();
  if constexpr (spec.mask != MaskKind::Full) {
    if (__any_sync(ptx::kAllLanes, suspect[0] || suspect[1])) recompute_rows<spec, tile>(p, work, row, suspect, lse);
  }
}

}  // namespace fmha::sm90
