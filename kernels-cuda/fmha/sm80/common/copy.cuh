// Loads by cp.async: every thread of the CTA copies its share of a tile, 16 bytes at a time where strides and addresses
// allow it.
//
// Threads walk a tile in the order in which it lies in shared memory, so that eight neighbours write 128 bytes side by side:
// no bank is written twice. A span of the swizzle, 32 to 128 bytes, is also what they read side by side of a row.
#pragma once
#include <fmha/mma/smem_tile.cuh>
#include <fmha/ptx/copy.cuh>

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

// Of the eight elements from `column` on, those that a row of `dim` has.
template <int dim>
FMHA_DEVICE int32_t elems_there(int32_t column) {
  return dim % kWord == 0 ? (column < dim ? kWord : 0) : clamp(dim - column, 0, kWord);
}

}  // namespace fmha::sm80
