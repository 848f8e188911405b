// Transposition of NVFP4's V: from pairs along its rows, [keys, dim / 2] bytes, to pairs of keys, [dim, keys / 2]
// bytes, which the tensor cores read. Both lie in one slot of the ring: threads read the whole block to registers, wait
// for each other, and write it transposed.
//
//   unit, of a thread   8 keys x 16 elements of the head: eight words of 8 bytes, two squares of 8 x 8 elements
//   square              half words of keys k and k + 4 are exchanged, then bytes of k and k + 2, then halves of bytes
//                       of k and k + 1; register c then has element c of eight keys
#pragma once
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/sm100/fwd/config.cuh>

namespace fmha::sm100 {

// Transposes 8 x 8 elements of four bits, a row of them a register, the first in the lowest bits.
FMHA_DEVICE void transpose_square(uint32_t (&rows)[8]) {
  constexpr uint32_t even = 0x0f0f0f0f;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t a = rows[k], b = rows[k + 4];
    rows[k] = ptx::prmt(a, b, 0x5410), rows[k + 4] = ptx::prmt(a, b, 0x7632);
  }
#pragma unroll
  for (int k = 0; k < 8; k = k % 4 == 1 ? k + 3 : k + 1) {
    const uint32_t a = rows[k], b = rows[k + 2];
    rows[k] = ptx::prmt(a, b, 0x6240), rows[k + 2] = ptx::prmt(a, b, 0x7351);
  }
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    const uint32_t a = rows[k], b = rows[k + 1];
    rows[k] = a & even | (b & even) << 4, rows[k + 1] = a >> 4 & even | b & ~even;
  }
}

// A unit's first key, and its first element of the head. Four lanes read neighbouring units of one row, so that as many
// rows of equal banks are read at once as columns of equal banks are written.
template <int num_keys, int num_dims>
struct UnitOfPairs {
  static constexpr int keys = num_keys / 8, beside = num_dims % 64 == 0 ? 4 : 2;
  static constexpr int count = keys * (num_dims / 16);

  FMHA_DEVICE static int32_t key(int32_t unit) { return unit / beside % keys * 8; }
  FMHA_DEVICE static int32_t dim(int32_t unit) { return (unit / (beside * keys) * beside + unit % beside) * 16; }
};

// Address of a place's bytes `row` rows below it, in the same swizzle atom of 8 rows, whose first row has `first`.
template <class Tile>
FMHA_DEVICE uint32_t below(uint32_t first, int32_t row) {
  const uint32_t bytes = row * Tile::span_bytes, exchanged = bytes >> 7 & (Tile::span_bytes / 16 - 1);
  return (first ^ exchanged << 4) + bytes;
}

// Transposes the block of V in a slot, by `count` threads of which `rank` is one; `sync` waits for all of them.
template <FwdSpec spec, Sm100Tile tile, int count, class Slot, class Sync>
FMHA_DEVICE void transpose_pairs(const Slot& slot, int32_t rank, Sync sync) {
  using Rows = typename Smem<spec, tile>::VRows;
  using Columns = typename Smem<spec, tile>::VTile;
  using Unit = UnitOfPairs<tile.block_n, Columns::rows>;
  static_assert(Columns::rows % 32 == 0, "whole units");
  constexpr int each = ceil_div(Unit::count, count);
  const uint32_t from = slot.v_rows().address(), to = slot.v().address();
  uint32_t squares[each][2][8];
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int32_t unit = rank + i * count, key = Unit::key(unit), at_byte = Unit::dim(unit) / 2;
    if (Unit::count % count != 0 && unit >= Unit::count) continue;
    const uint32_t first = from + mma::word_offset<Rows>(key, at_byte / 16 * 16) + at_byte % 16;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      uint32_t words[2];
      ptx::ld_shared_v2_b32(words, below<Rows>(first, k));
      squares[i][0][k] = words[0], squares[i][1][k] = words[1];
    }
  }
  sync();
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int32_t unit = rank + i * count, at_byte = Unit::key(unit) / 2, d = Unit::dim(unit);
    if (Unit::count % count != 0 && unit >= Unit::count) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      transpose_square(squares[i][half]);
      const uint32_t first = to + mma::word_offset<Columns>(d + 8 * half, at_byte / 16 * 16) + at_byte % 16;
#pragma unroll
      for (int c = 0; c < 8; ++c) ptx::st_shared_b32(below<Columns>(first, c), squares[i][half][c]);
    }
  }
}

}  // namespace fmha::sm100
