// Typed products of one warpgroup: 64 rows of A against a tile in shared memory.
//
// Fragment: thread t of the warpgroup (warp w = t / 32, lane l = t % 32) holds rows
// 16 w + l / 4 and that + 8, columns 8 c + 2 (l % 4) and the next, of every 8-column group c.
// Element e of the fragment: column 8 (e / 4) + (e & 1) + 2 (l % 4), upper row iff e & 2.
#pragma once
#include <fmha/mma/sm90/descriptor.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/ptx/wgmma.cuh>

namespace fmha::mma::sm90 {

using mma::SmemTile;
using mma::Storage;

constexpr int kWarpgroup = 128;  // threads
constexpr int kRows = 64;        // of one product

// What one instruction contracts of either operand: 32 bytes.
template <class Elem>
constexpr int kDepth = 32 / int(sizeof(Elem));

// An accumulator of 64 x n.
template <int n>
struct Accumulator {
  static constexpr int columns = n, num_elems = n / 2;
  float elems[num_elems];

  // Row 0 or 1 of the thread's two.
  static constexpr int row(int e) { return e >> 1 & 1; }
  // Column, less what depends on the lane.
  static constexpr int column(int e) { return 8 * (e / 4) + (e & 1); }

  FMHA_DEVICE float& operator[](int e) { return elems[e]; }
  FMHA_DEVICE float operator[](int e) const { return elems[e]; }
  FMHA_DEVICE void clear() {
#pragma unroll
    for (int e = 0; e < num_elems; ++e) elems[e] = 0.f;
  }
};

// The first row of the thread's two, of the warpgroup's 64; the first column of its fragments.
FMHA_DEVICE int32_t fragment_row() { return threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4; }
FMHA_DEVICE int32_t fragment_column() { return threadIdx.x % 4 * 2; }

// A of 64 x depth in registers. Of 16-bit elements: an accumulator's own layout, packed.
template <class Elem, int depth>
struct RegisterTile {
  uint32_t elems[depth / kDepth<Elem>][4];

  // Columns that x lacks become `zero`: a 0 that ptxas does not know for one, since it writes known
  // constants before the wait for the product that still reads these registers, and then serialises.
  template <DType dtype, int n>
  FMHA_DEVICE void from(const Accumulator<n>& x, uint32_t zero) {
    static_assert(sizeof(Elem) == 2, "only of 16-bit elements is an accumulator's layout that of A");
    static_assert(n <= depth, "a tile takes no more columns than it has");
#pragma unroll
    for (int i = 0; i < depth / 4; ++i) {
      elems[i / 4][i % 4] = i < n / 4 ? ptx::cvt_rn_x2<dtype>(x[2 * i], x[2 * i + 1]) : zero;
    }
  }
};

// d = sign * A B^T: A's rows [row, row + 64) and as many of B's rows from `b_row` on as D has columns, both along their
// dim, of which the first `dim` elements if that is not 0. Starts, does not wait.
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
