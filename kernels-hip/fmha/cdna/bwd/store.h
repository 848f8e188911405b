// Stores a wave's gradient sums, scaled, from registers to memory.
#pragma once
#include <fmha/cdna/bwd/job.h>

namespace fmha::cdna::bwd {

// Stores a lane's row of a gradient. `row` is the element at which that row begins.
template <class U, int blocks>
FMHA_DEVICE void store_row(const View& view, int64_t row, const Array<typename U::Acc, blocks>& sums, float factor,
                           int32_t dim) {
  constexpr DType dtype = U::spec.dtype_grad;
  constexpr int run = 4;  // elements that are stored at once
  const int half = U::lane_half(opaque_thread_idx());
  uint8_t* const to = static_cast<uint8_t*>(view.data) + row * size_bytes(dtype);
#pragma unroll
  for (int d = 0; d < blocks; ++d) {
    const auto& x = U::in_runs(sums[d]);
#pragma unroll
    for (int i = 0; i < U::acc_elems; i += run) {
      const int32_t first = d * U::edge + U::row_of_run(i, half);
      if constexpr (U::tile.store == StorePath::Vector) {
        if (first >= dim) continue;
        U::template store_run<dtype>(to + first * size_bytes(dtype), x[i] * factor, x[i + 1] * factor,
                                     x[i + 2] * factor, x[i + 3] * factor);
      } else {
#pragma unroll
        for (int r = 0; r < run; ++r) {
          if (first + r < dim) U::template store_elem<dtype>(to + (first + r) * size_bytes(dtype), x[i + r] * factor);
        }
      }
    }
  }
}

// Returns NaN if one of the sums is not finite, otherwise 0.
template <class U, int blocks>
FMHA_DEVICE float zero_if_finite(const Array<typename U::Acc, blocks>& sums) {
  float zero = 0.f;
#pragma unroll
  for (int d = 0; d < blocks; ++d) {
#pragma unroll
    for (int i = 0; i < U::acc_elems; ++i) zero = v_fma_f32(sums[d][i], 0.f, zero);
  }
  return zero;
}

// Bits of the wave's own rows, from row `first` on, that have a non-finite sum. A hidden NaN may be
// the cause, since hidden pairs are multiplied by 0. The last launch recomputes those rows (rest.h).
template <class U>
FMHA_DEVICE void store_nonfinite(int32_t* word, int32_t first, float zero) {
  const uint64_t lanes = v_cmp_ballot(is_nan(zero));
  if (thread_idx() % kWaveSize != 0) return;
  if constexpr (U::edge == 32) {
    *word = int32_t(uint32_t(lanes) | uint32_t(lanes >> 32));
  } else {
    // Two waves share a word of flags, half of it each.
    static_assert(U::edge == 16, "own rows are a word, or a half of one");
    reinterpret_cast<uint16_t*>(word)[first / 16 % 2] = uint16_t(lanes | lanes >> 16);
  }
}

}  // namespace fmha::cdna::bwd
