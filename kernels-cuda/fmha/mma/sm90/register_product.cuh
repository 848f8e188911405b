// Products of A in registers with a tile read along its rows.
#pragma once
#include <fmha/mma/sm90.cuh>
#include <fmha/ptx/matrix.cuh>

namespace fmha::mma::sm90 {

// Loads rows [row, row + 64) of a tile to registers, as an A operand.
template <class Tile>
FMHA_DEVICE void load_a(RegisterTile<typename Tile::Elem, Tile::dim>& a, const Tile& tile, int32_t row) {
  constexpr int depth = kDepth<typename Tile::Elem>;
  const int32_t lane = threadIdx.x % 32, warp_row = row + threadIdx.x % kWarpgroup / 32 * 16;
#pragma unroll
  for (int step = 0; step < Tile::dim / depth; ++step) {
    const uint32_t offset = word_offset<Tile>(warp_row + lane % 16, step * depth + lane / 16 * (depth / 2));
    ptx::ldmatrix_x4(a.elems[step], tile.address() + offset);
  }
}

// Starts d = sign * A B^T (+ d), and does not wait. B has as many rows as D has columns, from `row` on, read along
// their dim.
template <DType dtype, int sign, class D, class TileB>
FMHA_DEVICE void start_register_product_abt(D& d, const RegisterTile<Storage<dtype>, TileB::dim>& a, const TileB& b, int row,
                                            bool accumulate) {
  static_assert(D::columns <= TileB::rows, "D's columns are rows of B");
  constexpr int depth = kDepth<Storage<dtype>>, steps_per_chunk = TileB::span / depth;
  const Descriptor b0 = descriptor<TileB::span_bytes>(b.offset() + row * TileB::span_bytes, 16);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < TileB::dim / depth; ++step) {
    const int chunk = step / steps_per_chunk, within = step % steps_per_chunk * 32;
    ptx::wgmma_mma_async_rs<dtype, sign, 0>(d.elems, a.elems[step], b0.plus_bytes(chunk * TileB::chunk_bytes + within).bits(),
                                     accumulate || step != 0);
  }
  ptx::wgmma_commit_group();
}

}  // namespace fmha::mma::sm90
