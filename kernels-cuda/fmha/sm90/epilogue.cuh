// O and LSE of a finished tile, from registers to memory.
#pragma once
#include <fmha/num.h>
#include <fmha/sm90/config.cuh>
#include <fmha/sm90/redo.cuh>
#include <fmha/sm90/softmax.cuh>

namespace fmha::sm90 {

// A row's factor for O, and its natural log-sum-exp.
struct RowResult {
  float factor, lse;
};

template <FwdSpec spec>
FMHA_DEVICE RowResult finish_row(const FwdParams& p, RowStats row, float scale_log2, int32_t i_head) {
  const float row_sum = quad_reduce(row.row_sum, [](float a, float b) { return a + b; });
  float max_log2 = row.row_max * scale_log2;
  if constexpr (!spec.sink) {
    if (row_sum == 0.f) return {0.f, -infinity()};
    return {ptx::rcp_approx_ftz(row_sum), (max_log2 + ptx::lg2_approx_ftz(row_sum)) * kLn2};
  } else {
    const float sink_log2 = scalar_of(p.sink, 0, i_head, -infinity()) * kLog2E;
    const float top = fmaxf(row_sum == 0.f ? -infinity() : max_log2, sink_log2);
    if (top == -infinity()) return {0.f, -infinity()};
    const float seen = row_sum == 0.f ? 0.f : ptx::ex2_approx_ftz(max_log2 - top);
    const float total = row_sum * seen + ptx::ex2_approx_ftz(sink_log2 - top);
    return {seen / total, (top + ptx::lg2_approx_ftz(total)) * kLn2};
  }
}

// Four lanes hold 8-column groups c..c+3 of a row, two columns of each; afterwards lane l holds all
// of group c + l: a 4x4 transpose of words in two exchanges.
FMHA_DEVICE void quad_transpose(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = ptx::shfl_xor(odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t received = ptx::shfl_xor(high ? w[i] : w[i + 2], 2);
    (high ? w[i] : w[i + 2]) = received;
  }
}

// Whether a thread's part of a row of O is not finite.
template <int n>
FMHA_DEVICE bool has_non_finite(const mma::Accumulator<n>& o, int r) {
  float zero = 0.f;
#pragma unroll
  for (int e = 2 * r; e < o.num_elems; e += 4) zero = fmaf(o[e], 0.f, fmaf(o[e + 1], 0.f, zero));
  return is_nan(zero);
}

template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void epilogue(const FwdParams& p, const Work& work, int32_t row, RowStats (&rows)[2], float scale_log2,
                          mma::Accumulator<padded_dim(spec.head_dim_v)>& o) {
  constexpr int dim = spec.head_dim_v;
  const int32_t quad_lane = threadIdx.x % 4;
  uint32_t suspects = 0;  // of the warp's 16 rows, a bit each
  float lse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t packed_row = row + 8 * r, i = query_of<tile>(p, packed_row);
    const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
    const bool inside = i < work.seqlen_q;
    const RowResult result = finish_row<spec>(p, rows[r], scale_log2, inside ? i_head : 0);
    lse[r] = result.lse;
    bool stored = inside;
    if constexpr (spec.mask != MaskKind::Full) {
      const bool suspect = inside && has_non_finite(o, r) && abs_of(result.lse) < infinity();
      const uint32_t lanes = __ballot_sync(ptx::kAllLanes, suspect);
#pragma unroll
      for (int quad = 0; quad < 8; ++quad) suspects |= uint32_t((lanes >> 4 * quad & 15) != 0) << (8 * r + quad);
      stored = inside && !(suspects >> (8 * r + threadIdx.x % 32 / 4) & 1);
    }
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
          const bool there = stored && column < dim;
          if constexpr (spec.dtype_o == DType::F32) {
            ptx::st_global_f32_if(static_cast<float*>(p.o.data) + at + column, value, there);
          } else {
            const uint16_t half = uint16_t(ptx::cvt_rn_x2<spec.dtype_o>(value, 0.f));
            ptx::st_global_u16_if(static_cast<uint16_t*>(p.o.data) + at + column, half, there);
          }
        }
      }
    }
    if constexpr (spec.write_lse) {
      float* out = p.lse + work.storage_batch * p.lse_batch + i_head * p.lse_head + work.q_row + i;
      ptx::st_global_f32_if(out, result.lse, inside && quad_lane == 0);
    }
  }
  __syncwarp();
  if constexpr (spec.mask != MaskKind::Full) {
    if (ptx::uniform(suspects)) redo_rows<spec, tile>(p, work, row, ptx::uniform(suspects), lse);
  }
}

}  // namespace fmha::sm90
