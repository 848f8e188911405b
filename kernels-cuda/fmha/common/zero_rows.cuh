// Writes zeros to a shared-memory tile behind the last key of a sequence.
#pragma once
#include <fmha/mma/smem_tile.cuh>
#include <fmha/ptx/copy.cuh>

namespace fmha {

// Zeros the keys from `begin` on in a [dim, keys] tile, 16 bytes at a
// time, with `num_threads` threads; `rank` is this thread's number.
template <class Tile>
FMHA_DEVICE void zero_columns(const Tile& tile, int32_t begin, int32_t rank, int32_t num_threads) {
  constexpr int elems = 16 / Tile::elem_bytes;  // of a word
  const int32_t first_word = begin / elems, words = Tile::dim / elems - first_word;
#pragma unroll 1
  for (int32_t at = rank; at < Tile::rows * words; at += num_threads) {
    const int32_t row = at / words, word = first_word + at - row * words;
    const uint32_t address = tile.address() + mma::word_offset<Tile>(row, elems * word);
    if (elems * word >= begin) {
      ptx::st_shared_v4_zero(address);
    } else {
      for (int32_t k = begin - elems * word; k < elems; ++k) {
        if constexpr (Tile::elem_bytes == 2) {
          ptx::st_shared_u16(address + 2 * k, 0);
        } else {
          ptx::st_shared_u8(address + k, 0);
        }
      }
    }
  }
}

// Zeros the rows from `first_row` on of a [keys, dim] tile.
template <class Tile>
FMHA_DEVICE void zero_rows(const Tile& tile, int32_t first_row, int32_t rank, int32_t num_threads) {
#pragma unroll 1
  for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
    const uint32_t base = tile.address() + chunk * Tile::chunk_bytes;
    for (uint32_t at = first_row * Tile::span_bytes + rank * 16; at < Tile::chunk_bytes; at += num_threads * 16)
      ptx::st_shared_v4_zero(base + at);
  }
}

}  // namespace fmha
