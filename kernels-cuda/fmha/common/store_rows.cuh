// A thread's part of rows of O, from a fragment's registers to memory.
#pragma once
#include <fmha/common/output_row.cuh>
#include <fmha/common/quads.cuh>
#include <fmha/mma/fragment.cuh>

namespace fmha {

// A thread's elements of row r in sixteen columns of O, from element `first` on. With a transposed V these are four
// neighbouring dimensions; otherwise two of the first 8-column group and two of the next.
template <bool turned, int n>
FMHA_DEVICE void four_of(const mma::Accumulator<n>& o, int first, int r, float factor, float (&x)[4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int group = turned ? k % 2 : k / 2, within = turned ? k / 2 : k % 2;
    x[k] = o[first + 4 * group + 2 * r + within] * factor;
  }
}

// Stores a thread's 16-bit elements of a row, 16 bytes at a time. `out` is where the row begins.
template <FwdSpec spec, bool turned, int n>
FMHA_DEVICE void store_vectors(uint16_t* out, const mma::Accumulator<n>& o, int r, float factor, bool stored) {
  const int32_t quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < n / 8; c += 4) {
    uint32_t words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[4] = {};
      if (c + 2 * half < n / 8) four_of<turned>(o, 4 * c + 8 * half, r, factor, x);
      words[2 * half] = ptx::cvt_rn_x2<spec.dtype_o>(x[0], x[1]);
      words[2 * half + 1] = ptx::cvt_rn_x2<spec.dtype_o>(x[2], x[3]);
    }
    int32_t column;
    if constexpr (turned) {
      // Even lanes take the first 16 of 32 columns and odd lanes the last 16; each receives its missing half from its
      // neighbour.
      exchange_halves(words);
      column = 8 * c + 16 * (quad_lane & 1) + 4 * (quad_lane & 2);
    } else {
      quad_transpose(words);
      column = 8 * (c + quad_lane);
    }
    ptx::st_global_v4_b32_if(out + column, words, stored && column < spec.head_dim_v);
  }
}

// Stores a thread's FP8 elements of a row, four or two bytes at a time.
template <FwdSpec spec, bool turned, int n>
FMHA_DEVICE void store_bytes(uint8_t* out, const mma::Accumulator<n>& o, int r, float factor, bool stored) {
  const int32_t quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int first = 0; first < o.num_elems; first += 8) {
    float x[4];
    four_of<turned>(o, first, r, factor, x);
    const uint32_t word = ptx::cvt_rn_satfinite_x4<spec.dtype_o>(x[0], x[1], x[2], x[3]);
    const bool inside = stored && 2 * first < spec.head_dim_v;  // which is whole sixteens
    if constexpr (turned) {
      ptx::st_global_b32_if(out + 2 * first + 4 * quad_lane, word, inside);
    } else {
      uint8_t* pair = out + 2 * first + 2 * quad_lane;
      ptx::st_global_u16_if(reinterpret_cast<uint16_t*>(pair), uint16_t(word), inside);
      ptx::st_global_u16_if(reinterpret_cast<uint16_t*>(pair + 8), uint16_t(word >> 16), inside);
    }
  }
}

// Stores a thread's elements of a row one by one, for any type.
template <FwdSpec spec, bool turned, int n>
FMHA_DEVICE void store_elements(void* data, int64_t at, const mma::Accumulator<n>& o, int r, float factor, bool stored) {
  const int32_t quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int first = 0; first < o.num_elems; first += 8) {
    float x[4];
    four_of<turned>(o, first, r, factor, x);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int32_t column = 2 * first + (turned ? 4 * quad_lane + k : k / 2 * 8 + 2 * quad_lane + k % 2);
      store_o<spec.dtype_o>(data, at + column, x[k], stored && column < spec.head_dim_v);
    }
  }
}

// Stores a row of O of one part of the keys. Such rows begin at multiples of 16 bytes and are padded to 16 bytes; the
// padding is stored too.
template <FwdSpec spec, bool turned, int n>
FMHA_DEVICE void store_part(float* out, const mma::Accumulator<n>& o, int r, float factor, bool stored) {
  const int32_t quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int first = 0; first < o.num_elems; first += 8) {
    float x[4];
    four_of<turned>(o, first, r, factor, x);
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      const int32_t column = 2 * first + (turned ? 4 * quad_lane + k : 4 * k + 2 * quad_lane);
      ptx::st_global_v2_f32_if(out + column, x[k], x[k + 1], stored && column < spec.head_dim_v);
    }
  }
}

// Stores a row from element `at` on, as a tile stores it: f32 for a part of the keys, otherwise O's type.
template <FwdSpec spec, auto tile, bool turned, int n>
FMHA_DEVICE void store_lane_row(void* data, int64_t at, const mma::Accumulator<n>& o, int r, float factor,
                                bool stored) {
  if constexpr (tile.split_keys > 0) {
    store_part<spec, turned>(static_cast<float*>(data) + at, o, r, factor, stored);
  } else if constexpr (!tile.vector_store || spec.dtype_o == DType::F32) {
    store_elements<spec, turned>(data, at, o, r, factor, stored);
  } else if constexpr (is_fp8(spec.dtype_o)) {
    store_bytes<spec, turned>(static_cast<uint8_t*>(data) + at, o, r, factor, stored);
  } else {
    store_vectors<spec, turned>(static_cast<uint16_t*>(data) + at, o, r, factor, stored);
  }
}

}  // namespace fmha
