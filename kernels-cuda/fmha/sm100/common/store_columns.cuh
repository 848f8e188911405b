// Stores a thread's columns of a row from registers to memory.
#pragma once
#include <fmha/common/output_row.cuh>

namespace fmha::sm100 {

// Stores element `at` and the next ones, as many as `x` has and the row's `dims_left` allows: 16 bytes at a time where
// `vector` is set; the rest of the row is then a multiple of 16 bytes.
template <DType dtype, bool vector, int n>
FMHA_DEVICE void store_columns(void* data, int64_t at, const float (&x)[n], int32_t dims_left, bool stored) {
  if constexpr (vector && dtype == DType::F32) {
#pragma unroll
    for (int e = 0; e < n; e += 4) {
      const uint32_t v[4] = {bits_of(x[e]), bits_of(x[e + 1]), bits_of(x[e + 2]), bits_of(x[e + 3])};
      ptx::st_global_v4_b32_if(static_cast<float*>(data) + at + e, v, stored && e < dims_left);
    }
  } else if constexpr (vector && is_fp8(dtype)) {
#pragma unroll
    for (int e = 0; e < n; e += 16) {
      uint32_t v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* four = &x[e + 4 * k];
        v[k] = ptx::cvt_rn_satfinite_x4<dtype>(four[0], four[1], four[2], four[3]);
      }
      ptx::st_global_v4_b32_if(static_cast<uint8_t*>(data) + at + e, v, stored && e < dims_left);
    }
  } else if constexpr (vector) {
#pragma unroll
    for (int e = 0; e < n; e += 8) {
      uint32_t v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = ptx::cvt_rn_x2<dtype>(x[e + 2 * k], x[e + 2 * k + 1]);
      ptx::st_global_v4_b32_if(static_cast<uint16_t*>(data) + at + e, v, stored && e < dims_left);
    }
  } else {
#pragma unroll
    for (int e = 0; e < n; ++e) store_o<dtype>(data, at + e, x[e], stored && e < dims_left);
  }
}

}  // namespace fmha::sm100
