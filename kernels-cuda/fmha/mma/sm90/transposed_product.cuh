// Matrix products of the backward, where a tile is read in either orientation, and the transposed store of a fragment.
#pragma once
#include <fmha/mma/sm90.cuh>
#include <fmha/ptx/shared.cuh>

namespace fmha::mma::sm90 {

// Starts d = A^T B^T, and does not wait: A's columns [column, column + 64), read across its rows; as many of B's rows
// as D has columns, read along their dim, which runs over A's rows.
template <DType dtype, class D, class TileA, class TileB>
FMHA_DEVICE void start_product_atbt(D& d, const TileA& a, int column, const TileB& b) {
  static_assert(TileA::rows == TileB::dim && D::columns <= TileB::rows, "A's rows are B's columns");
  static_assert(TileA::span == kRows, "64 columns of A are one chunk");
  constexpr int depth = kDepth<Storage<dtype>>, steps_per_chunk = TileB::span / depth;
  const Descriptor a0 =
      descriptor<TileA::span_bytes>(a.offset() + column / TileA::span * TileA::chunk_bytes, TileA::chunk_bytes);
  const Descriptor b0 = descriptor<TileB::span_bytes>(b.offset(), 16);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < TileB::dim / depth; ++step) {
    const int chunk = step / steps_per_chunk, within = step % steps_per_chunk * 32;
    ptx::wgmma_mma_async_ss<dtype, 1, 1, 0>(d.elems, a0.plus_bytes(step * depth * TileA::span_bytes).bits(),
                                            b0.plus_bytes(chunk * TileB::chunk_bytes + within).bits(), step != 0);
  }
  ptx::wgmma_commit_group();
}

// d += A^T B: A's columns [column, column + 64) and B's from `b_column` on, as many as D has, both read across their
// rows. Starts, does not wait.
template <DType dtype, class D, class TileA, class TileB>
FMHA_DEVICE void start_product_atb(D& d, const TileA& a, int column, const TileB& b, int b_column) {
  static_assert(TileA::rows == TileB::rows && D::columns <= TileB::dim, "A's rows are B's rows");
  static_assert(TileA::span == kRows, "64 columns of A are one chunk");
  constexpr int depth = kDepth<Storage<dtype>>;
  const Descriptor a0 =
      descriptor<TileA::span_bytes>(a.offset() + column / TileA::span * TileA::chunk_bytes, TileA::chunk_bytes);
  const Descriptor b0 =
      descriptor<TileB::span_bytes>(b.offset() + b_column / TileB::span * TileB::chunk_bytes, TileB::chunk_bytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < TileA::rows / depth; ++step) {
    ptx::wgmma_mma_async_ss<dtype, 1, 1, 1>(d.elems, a0.plus_bytes(step * depth * TileA::span_bytes).bits(),
                                            b0.plus_bytes(step * depth * TileB::span_bytes).bits(), true);
  }
  ptx::wgmma_commit_group();
}

// Starts d = A B, or d += A B, and does not wait. A is rows [row, row + 64), contracted along their dim. B is read
// across its rows from `b_column` on, which begins a chunk or lies in a chunk that has all of D's columns.
template <DType dtype, bool adds = false, class D, class TileA, class TileB>
FMHA_DEVICE void start_product_ab(D& d, const TileA& a, int row, const TileB& b, int b_column = 0) {
  static_assert(TileA::dim == TileB::rows && D::columns <= TileB::dim, "A's columns are B's rows");
  constexpr int depth = kDepth<Storage<dtype>>, steps_per_chunk = TileA::span / depth;
  const Descriptor a0 = descriptor<TileA::span_bytes>(a.offset() + row * TileA::span_bytes, 16);
  const uint32_t column_bytes = b_column / TileB::span * TileB::chunk_bytes + b_column % TileB::span * 2;
  const Descriptor b0 = descriptor<TileB::span_bytes>(b.offset() + column_bytes, TileB::chunk_bytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < TileA::dim / depth; ++step) {
    const int chunk = step / steps_per_chunk, within = step % steps_per_chunk * 32;
    ptx::wgmma_mma_async_ss<dtype, 1, 0, 1>(d.elems, a0.plus_bytes(chunk * TileA::chunk_bytes + within).bits(),
                                            b0.plus_bytes(step * depth * TileB::span_bytes).bits(), adds || step != 0);
  }
  ptx::wgmma_commit_group();
}

// d += A B: A in registers, B's rows from `b_row` on, as many as A has columns, read across. Starts, does not wait.
template <DType dtype, int depth_a, class D, class TileB>
FMHA_DEVICE void start_register_product_ab(D& d, const RegisterTile<Storage<dtype>, depth_a>& a, const TileB& b,
                                           int b_row) {
  constexpr int depth = kDepth<Storage<dtype>>;
  const Descriptor b0 = descriptor<TileB::span_bytes>(b.offset() + b_row * TileB::span_bytes, TileB::chunk_bytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < depth_a / depth; ++step) {
    ptx::wgmma_mma_async_rs<dtype, 1, 1>(d.elems, a.elems[step], b0.plus_bytes(step * depth * TileB::span_bytes).bits(),
                                         true);
  }
  ptx::wgmma_commit_group();
}

// Stores the warpgroup's fragment of 64 rows and `depth` columns to the tile, transposed. Row r of the fragment becomes
// column `first + r` of the tile, and column c becomes row `first_row + c`.
template <class Tile, class Elem, int depth>
FMHA_DEVICE void store_transposed(const Tile& tile, const RegisterTile<Elem, depth>& a, int32_t first,
                                  int32_t first_row = 0) {
  static_assert(depth <= Tile::rows, "a column of the fragment is a row of the tile");
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
  // Lanes 8 m to 8 m + 7 hold the addresses of matrix m of a step's four 8 x 8 matrices: matrices 1 and 3 lie eight
  // columns of the tile further on, matrices 2 and 3 eight rows.
  const int32_t row = first_row + lane / 16 * 8 + lane % 8, column = first + warp * 16 + lane / 8 % 2 * 8;
  const uint32_t address = tile.address() + word_offset<Tile>(row, column);
#pragma unroll
  for (int step = 0; step < depth / 16; ++step)
    ptx::stmatrix_x4_trans(address + step * 16 * Tile::span_bytes, a.elems[step]);
}

}  // namespace fmha::mma::sm90
