// Typed products of one warpgroup: 64 rows of A against a tile in shared memory.
//
// Warp w of the warpgroup has rows 16 w to 16 w + 15 of an accumulator and of A in registers (mma/fragment.cuh).
#pragma once
#include <fmha/mma/fp8_operand.cuh>
#include <fmha/mma/fragment.cuh>
#include <fmha/mma/sm90/descriptor.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/ptx/wgmma.cuh>

namespace fmha::mma::sm90 {

using mma::Accumulator;
using mma::fragment_column;
using mma::kDepth;
using mma::key_at;
using mma::KeyOrder;
using mma::pack_operand;
using mma::RegisterTile;
using mma::SmemTile;
using mma::Storage;

constexpr int kWarpgroup = 128;  // threads
constexpr int kRows = 64;        // of one product

// The first of the thread's two rows in the warpgroup's 64.
FMHA_DEVICE int32_t fragment_row() { return threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4; }

// Starts d = sign * A B^T, and does not wait: A's rows [row, row + 64), and as many of B's rows from `b_row` on as D
// has columns. Both are read along their dim; only the first `dim` elements count if `dim` is not 0.
template <DType dtype, int sign, int dim = 0, class D, class TileA, class TileB>
FMHA_DEVICE void start_product_abt(D& d, const TileA& a, int row, const TileB& b, int b_row = 0) {
  static_assert(TileA::dim == TileB::dim && D::columns <= TileB::rows, "A and B share their inner dimension");
  static_assert(sizeof(typename TileA::Elem) == sizeof(Storage<dtype>) && sizeof(typename TileB::Elem) == sizeof(Storage<dtype>),
                "tiles hold elements of the product's type");
  constexpr int depth = kDepth<Storage<dtype>>, steps_per_chunk = TileA::span / depth;
  const Descriptor a0 = descriptor<TileA::span_bytes>(a.offset() + row * TileA::span_bytes, 16);
  const Descriptor b0 = descriptor<TileB::span_bytes>(b.offset() + b_row * TileB::span_bytes, 16);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < (dim ? dim : TileA::dim) / depth; ++step) {
    const int chunk = step / steps_per_chunk, within = step % steps_per_chunk * 32;
    ptx::wgmma_mma_async_ss<dtype, sign, 0, 0>(d.elems, a0.plus_bytes(chunk * TileA::chunk_bytes + within).bits(),
                                     b0.plus_bytes(chunk * TileB::chunk_bytes + within).bits(), step != 0);
  }
  ptx::wgmma_commit_group();
}

// d += A B: A in registers, B read across its rows. Starts, does not wait.
template <DType dtype, class D, class TileB>
FMHA_DEVICE void start_product_ab(D& d, const RegisterTile<Storage<dtype>, TileB::rows>& a, const TileB& b) {
  static_assert(sizeof(Storage<dtype>) == 2, "wgmma reads tiles of 16-bit elements alone across their rows");
  constexpr int depth = kDepth<Storage<dtype>>;
  const Descriptor b0 = descriptor<TileB::span_bytes>(b.offset(), TileB::chunk_bytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < TileB::rows / depth; ++step) {
    ptx::wgmma_mma_async_rs<dtype, 1, 1>(d.elems, a.elems[step],
                                  b0.plus_bytes(step * depth * TileB::span_bytes).bits(), true);
  }
  ptx::wgmma_commit_group();
}

}  // namespace fmha::mma::sm90
