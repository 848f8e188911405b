// Zeros over keys that are not the sequence's, in a column-major block of V.
#pragma once
#include <fmha/mma/register_product.cuh>
#include <fmha/ptx/copy.cuh>

namespace fmha::sm90 {

// Of a [dim, keys] tile the keys from `begin` on, by one warpgroup, 8 keys at a time.
template <class Tile>
FMHA_DEVICE void clean_columns(const Tile& tile, int32_t begin) {
  constexpr int words_a_row = Tile::dim / 8;
  const int32_t first_word = begin / 8, words = words_a_row - first_word;
#pragma unroll 1
  for (int32_t at = threadIdx.x % mma::kWarpgroup; at < Tile::rows * words; at += mma::kWarpgroup) {
    const int32_t row = at / words, word = first_word + at - row * words;
    const uint32_t address = tile.address() + mma::word_offset<Tile>(row, 8 * word);
    if (8 * word >= begin) {
      ptx::st_shared_v4_zero(address);
    } else {
      for (int32_t k = begin - 8 * word; k < 8; ++k) ptx::st_shared_u16(address + 2 * k, 0);
    }
  }
  __syncwarp();
}

}  // namespace fmha::sm90
