// A wave's sums to a gradient, scaled, from registers to memory.
#pragma once
#include <fmha/cdna/bwd/config.h>
#include <fmha/cdna/epilogue.h>

namespace fmha::cdna::bwd {

// `row`: where the lane's own row of the gradient begins, in elements.
template <DType dtype, StorePath path, int blocks>
FMHA_DEVICE void store_row(const View& view, int64_t row, const Array<Acc, blocks>& sums, float factor, int32_t dim) {
  const int half = lane_half(opaque_thread_idx());
  uint8_t* const to = static_cast<uint8_t*>(view.data) + row * size_bytes(dtype);
#pragma unroll
  for (int d = 0; d < blocks; ++d) {
#pragma unroll
    for (int i = 0; i < 16; i += kRun) {
      const int32_t first = d * kEdge + acc_row(i, half);
      const Acc& x = sums[d];
      if constexpr (path == StorePath::Vector) {
        if (first >= dim) continue;
        store_run_of_o<dtype>(to + first * size_bytes(dtype), x[i] * factor, x[i + 1] * factor, x[i + 2] * factor,
                              x[i + 3] * factor);
      } else {
#pragma unroll
        for (int r = 0; r < kRun; ++r) {
          if (first + r < dim) store_elem_of_o<dtype>(to + (first + r) * size_bytes(dtype), x[i + r] * factor);
        }
      }
    }
  }
}

// NaN where one of the sums is not finite, else 0.
template <int blocks>
FMHA_DEVICE float zero_if_finite(const Array<Acc, blocks>& sums) {
  float zero = 0.f;
#pragma unroll
  for (int d = 0; d < blocks; ++d) {
#pragma unroll
    for (int i = 0; i < 16; ++i) zero = v_fma_f32(sums[d][i], 0.f, zero);
  }
  return zero;
}

// Which of the wave's 32 own rows have a sum that is not finite, a bit to each: it may come of a hidden NaN, for
// hidden pairs are multiplied too, by 0. The launch behind computes those rows again (rest.h).
FMHA_DEVICE void store_nonfinite(int32_t* to, float zero) {
  const uint64_t lanes = v_cmp_ballot(is_nan(zero));
  if (lane_idx() == 0) *to = int32_t(uint32_t(lanes) | uint32_t(lanes >> 32));
}

}  // namespace fmha::cdna::bwd
