// Converts a V of 8-bit elements to f16, which holds them exactly: P V is then a product of f16, whose sums the tensor
// cores keep in f32, where those of 8-bit products have some 14 bits.
//
// A lane takes 16 elements at a time, a warp 8 rows of 64 (or, where a row is no multiple of that, 16 of 32), at
// places that make its eight lanes of a pass read and write all banks: rows r and r ^ 5, so that what a lane reads
// lies apart by the swizzle's third bit, and what it writes, every other word of a span, by its first.
#pragma once
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/sm90/fwd/config.cuh>

namespace fmha::sm90 {

// Converts eight elements to f16. An e5m2 number is the upper half of an f16 number.
template <DType dtype>
FMHA_DEVICE void widen_pairs(uint32_t (&wide)[4], uint32_t first, uint32_t second) {
  if constexpr (dtype == DType::E5m2) {
    wide[0] = ptx::prmt(first, 0, 0x1404), wide[1] = ptx::prmt(first, 0, 0x3424);
    wide[2] = ptx::prmt(second, 0, 0x1404), wide[3] = ptx::prmt(second, 0, 0x3424);
  } else {
    wide[0] = ptx::cvt_rn_f16x2_e4m3x2(first), wide[1] = ptx::cvt_rn_f16x2_e4m3x2(first >> 16);
    wide[2] = ptx::cvt_rn_f16x2_e4m3x2(second), wide[3] = ptx::cvt_rn_f16x2_e4m3x2(second >> 16);
  }
}

// Widens a block by two warps, each with every second group of rows. `store` widens and stores eight elements of a row
// at an address. `batch`: number of loads before the first store, as the role's registers allow.
template <int batch, class Raw, class Wide, class Store>
FMHA_DEVICE void widen_rows(const Raw& raw, const Wide& wide, Store store) {
  static_assert(Raw::rows == Wide::rows && Raw::dim == Wide::dim, "the same elements");
  constexpr int columns = Raw::dim % 64 == 0 ? 64 : 32, words = columns / 16, rows = 32 / words;
  static_assert(Wide::span == columns && Raw::rows % rows == 0, "whole steps and groups");
  constexpr int groups = Raw::rows / rows, steps = Raw::dim / columns, at_once = max(batch / steps, 1);
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kValueWarps;
  const int32_t at = lane / words, row = warp * rows + (at & 1 ? at ^ 4 : at), column = lane % words * 16;
  uint32_t from = raw.address() + fmha::mma::word_offset<Raw>(row, column);
  uint32_t to = wide.address() + fmha::mma::word_offset<Wide>(row, column);
  constexpr int stride = kValueWarps * rows;
  int32_t place = row;
#pragma unroll 1
  for (int32_t group = warp; group < groups; group += at_once * kValueWarps) {
    // The last iteration has no next group.
    const auto there = [&](int item) {
      return groups % (at_once * kValueWarps) == 0 || group + item / steps * kValueWarps < groups;
    };
#pragma unroll
    for (int first = 0; first < at_once * steps; first += batch) {
      uint32_t v[batch][4];
#pragma unroll
      for (int i = first; i < min(first + batch, at_once * steps); ++i) {
        if (there(i)) ptx::ld_shared_v4_b32(v[i - first], fmha::mma::beyond<Raw>(from, i / steps * stride, i % steps * columns));
      }
#pragma unroll
      for (int i = first; i < min(first + batch, at_once * steps); ++i) {
        const uint32_t address = to + i / steps * stride * Wide::span_bytes + i % steps * Wide::chunk_bytes;
        if (there(i)) {
          const int32_t row_of_word = place + i / steps * stride;
          store(address, row_of_word, v[i - first][0], v[i - first][1]);
          store(address ^ 16, row_of_word, v[i - first][2], v[i - first][3]);
        }
      }
    }
    from += at_once * stride * Raw::span_bytes;
    to += at_once * stride * Wide::span_bytes;
    place += at_once * stride;
  }
}

// Converts the elements of V to f16.
template <DType dtype, int batch, class Raw, class Wide>
FMHA_DEVICE void widen_values(const Raw& raw, const Wide& wide) {
  widen_rows<batch>(raw, wide, [](uint32_t address, int32_t, uint32_t first, uint32_t second) {
    uint32_t words[4];
    widen_pairs<dtype>(words, first, second);
    ptx::st_shared_v4(address, words);
  });
}

}  // namespace fmha::sm90
