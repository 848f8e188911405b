// dK and dV of a finished key block, from registers to memory.
#pragma once
#include <fmha/num.h>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/sm90/bwd/work.cuh>
#include <fmha/sm90/common/fragment.cuh>

namespace fmha::sm90::bwd {

// Rows of a gradient times `factor`, whose batch stride is 0 where keys are packed; `row`: the first of the thread's two in
// the key block; `first_column`: where the fragment's columns begin.
template <DType dtype, int dim, bool vectors, int n>
FMHA_DEVICE void store_rows(const mma::Accumulator<n>& grad, const View& view, const Work& work, int32_t row,
                            int32_t first_column, float factor) {
  const int32_t quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t j = work.keys.begin + row + 8 * r;
    const bool stored = j < work.keys.end;
    const int64_t at = row_offset(view, work.span.i_batch, int64_t(work.span.k_row) + j, work.i_head_kv);
    if constexpr (vectors && dtype != DType::F32) {
      uint16_t* out = static_cast<uint16_t*>(view.data) + at;
#pragma unroll
      for (int c = 0; c < n / 8; c += 4) {
        uint32_t words[4];
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          const int e = 4 * (c + g) + 2 * r;
          words[g] = ptx::cvt_rn_x2<dtype>(grad[e] * factor, grad[e + 1] * factor);
        }
        quad_transpose(words);
        const int32_t column = first_column + 8 * (c + quad_lane);
        ptx::st_global_v4_b32_if(out + column, words, stored && column < dim);
      }
    } else {
#pragma unroll
      for (int e = 2 * r; e < grad.num_elems; e += 4) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int32_t column = first_column + grad.column(e + k) + 2 * quad_lane;
          const float value = grad[e + k] * factor;
          const bool inside = stored && column < dim;
          if constexpr (dtype == DType::F32) {
            ptx::st_global_f32_if(static_cast<float*>(view.data) + at + column, value, inside);
          } else {
            const uint16_t half = uint16_t(ptx::cvt_rn_x2<dtype>(value, 0.f));
            ptx::st_global_u16_if(static_cast<uint16_t*>(view.data) + at + column, half, inside);
          }
        }
      }
    }
  }
  __syncwarp();
}

}  // namespace fmha::sm90::bwd
