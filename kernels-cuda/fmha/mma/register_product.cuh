// Products of A in registers with a tile read along its rows.
#pragma once
#include <fmha/mma/sm90.cuh>
#include <fmha/ptx/matrix.cuh>

namespace fmha::mma {

// Where 16 bytes of a tile lie: `row`, from column `column`, a multiple of 8. The copy engine's
// swizzle exchanges the 16-byte words of a span by the 128-byte line they are on.
// PTX ISA, Tensors: Swizzling Modes.
template <class Tile>
FMHA_DEVICE uint32_t word_offset(int32_t row, int32_t column) {
  const uint32_t offset = row * Tile::span_bytes + column % Tile::span * 2;
  constexpr uint32_t exchanged = Tile::span_bytes / 16 - 1;
  return column / Tile::span * Tile::chunk_bytes + (offset ^ (offset >> 7 & exchanged) << 4);
}

// Rows [row, row + 64) of a tile as an A operand.
template <class Tile>
FMHA_DEVICE void load_a(RegisterTile<Tile::dim>& a, const Tile& tile, int32_t row) {
  const int32_t lane = threadIdx.x % 32, warp_row = row + threadIdx.x % kWarpgroup / 32 * 16;
#pragma unroll
  for (int step = 0; step < Tile::dim / kDepth; ++step) {
    const uint32_t offset = word_offset<Tile>(warp_row + lane % 16, step * kDepth + lane / 16 * 8);
    ptx::ldmatrix_x4(a.elems[step], tile.address() + offset);
  }
}

// d = sign * A B^T (+ d): as many of B's rows as D has columns, along their dim. Starts, does not wait.
template <int sign, bool accumulate, class D, class TileB>
FMHA_DEVICE void start_register_product_abt(D& d, const RegisterTile<TileB::dim>& a, const TileB& b) {
  constexpr int steps_per_chunk = TileB::span / kDepth;
  const Descriptor b0 = descriptor<TileB::span_bytes>(b.offset(), 16);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < TileB::dim / kDepth; ++step) {
    const int chunk = step / steps_per_chunk, within = step % steps_per_chunk * (2 * kDepth);
    ptx::wgmma_mma_async_rs<sign, 0>(d.elems, a.elems[step], b0.plus_bytes(chunk * TileB::chunk_bytes + within).bits(),
                                     accumulate || step != 0);
  }
  ptx::wgmma_commit_group();
}

}  // namespace fmha::mma
