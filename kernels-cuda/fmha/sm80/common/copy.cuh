// Loads by cp.async: every thread of the CTA copies its share of a tile, 16 bytes at a time where strides and addresses
// allow it.
//
// Threads walk a tile in the order in which it lies in shared memory, so that eight neighbours write 128 bytes side by side:
// no bank is written twice. A span of the swizzle, 32 to 128 bytes, is also what they read side by side of a row.
#pragma once
#include <fmha/mma/smem_tile.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/num.cuh>

namespace fmha::sm80 {

constexpr int kWord = 8;  // elements of 16 bytes

// One word of a row: its first `there` elements from `from` on, then zeros. `any` is an address that may be named where
// nothing is read. Fewer than 4 bytes at a time are read element by element.
template <int bytes>
FMHA_DEVICE void copy_word(uint32_t to, const uint16_t* from, int32_t there, const void* any) {
  if constexpr (bytes >= 4) {
    constexpr int elems = bytes / 2;
#pragma unroll
    for (int e = 0; e < kWord; e += elems) {
      const int32_t here = clamp(there - e, 0, elems);
      ptx::cp_async<bytes>(to + 2 * e, here > 0 ? static_cast<const void*>(from + e) : any, 2 * here);
    }
  } else {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t low = 2 * k < there ? from[2 * k] : 0, high = 2 * k + 1 < there ? from[2 * k + 1] : 0;
      words[k] = low | high << 16;
    }
    ptx::st_shared_v4(to, words);
  }
}

// A tile, of whose row r the elements are where `row_of(r)` says (null: zeros); `there_of(r, column)` of the eight from a
// column on are there. Not waited for.
template <int bytes, int threads, class Tile, class RowOf, class ThereOf>
FMHA_DEVICE void copy_tile(const Tile& tile, const void* any, RowOf row_of, ThereOf there_of) {
  constexpr int words = Tile::span / kWord, step = threads / words;  // words of a row in a span; rows in a pass
  static_assert(threads % words == 0, "a pass takes whole rows");
  const int32_t word = threadIdx.x % words, first_row = threadIdx.x / words;
#pragma unroll
  for (int pass = 0; pass < ceil_div(Tile::rows, step); ++pass) {
    const int32_t row = first_row + pass * step;
    if (Tile::rows % step != 0 && row >= Tile::rows) break;
    const uint16_t* from = row_of(row);
    const uint32_t to = tile.address() + fmha::mma::word_offset<Tile>(row, word * kWord);
#pragma unroll
    for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
      const int32_t column = chunk * Tile::span + word * kWord;
      copy_word<bytes>(to + chunk * Tile::chunk_bytes, from + column, from ? there_of(row, column) : 0, any);
    }
  }
}

// Two FP8 numbers, the first in the low byte, to f32.
template <DType stored>
FMHA_DEVICE void unpack_fp8x2(uint32_t pair, float& low, float& high) {
  static_assert(stored == DType::E4m3Fn || stored == DType::E5m2, "sm80: caches are of OCP FP8");
  if constexpr (stored == DType::E5m2) {
    // The upper halves of two f16.
    ptx::unpack_f16x2((pair & 0xffu) << 8 | (pair & 0xff00u) << 16, low, high);
  } else {
    // f16 with the same bits of exponent and mantissa, whose bias is 8 larger; the largest of them is NaN.
    const uint32_t first = pair & 0x7fu, second = pair & 0x7f00u;
    ptx::unpack_f16x2(first << 7 | (pair & 0x80u) << 8 | second << 15 | (pair & 0x8000u) << 16, low, high);
    low = first == 0x7fu ? float_of(0x7fffffffu) : low * 256.f;
    high = second == 0x7f00u ? float_of(0x7fffffffu) : high * 256.f;
  }
}

// A tile of 16-bit elements from rows of FP8: each times `descale`, rounded to f32 and then to its type once, as a cache that
// was widened before has it. `whole_words`: rows begin on 8 bytes. Loads of a batch are under way together, and waited for.
template <DType stored, DType wide, bool whole_words, int threads, class Tile, class RowOf, class ThereOf>
FMHA_DEVICE void widen_tile(const Tile& tile, float descale, RowOf row_of, ThereOf there_of) {
  constexpr int words = Tile::span / kWord, step = threads / words, passes = ceil_div(Tile::rows, step);
  constexpr int loads = passes * Tile::num_chunks, batch = min(16, loads);
  static_assert(threads % words == 0, "a pass takes whole rows");
  const int32_t word = threadIdx.x % words, first_row = threadIdx.x / words;
#pragma unroll 1
  for (int32_t first = 0; first < loads; first += batch) {
    uint32_t bytes[batch][2];
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      const int32_t row = first_row + (first + k) / Tile::num_chunks * step;
      const int32_t column = (first + k) % Tile::num_chunks * Tile::span + word * kWord;
      const uint8_t* from = row < Tile::rows ? row_of(row) : nullptr;
      const int32_t there = from ? there_of(row, column) : 0;
      if (whole_words && (there == kWord || there == 0)) {
        ptx::ld_global_v2_b32_if(bytes[k], from + column, there == kWord);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          bytes[k][half] = 0;
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (4 * half + e < there) bytes[k][half] |= uint32_t(from[column + 4 * half + e]) << 8 * e;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      const int32_t row = first_row + (first + k) / Tile::num_chunks * step, chunk = (first + k) % Tile::num_chunks;
      uint32_t packed[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        float low, high;
        unpack_fp8x2<stored>(bytes[k][pair / 2] >> 16 * (pair % 2) & 0xffffu, low, high);
        packed[pair] = ptx::cvt_rn_x2<wide>(low * descale, high * descale);
      }
      if (first + k < loads && row < Tile::rows)
        ptx::st_shared_v4(tile.address() + fmha::mma::word_offset<Tile>(row, word * kWord) + chunk * Tile::chunk_bytes, packed);
    }
  }
}

// Of the eight elements from `column` on, those that a row of `dim` has.
template <int dim>
FMHA_DEVICE int32_t elems_there(int32_t column) {
  return dim % kWord == 0 ? (column < dim ? kWord : 0) : clamp(dim - column, 0, kWord);
}

}  // namespace fmha::sm80
