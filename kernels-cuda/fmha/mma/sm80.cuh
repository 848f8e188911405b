// Typed products of one warp, mma.sync on tiles in shared memory: a warp has `m_tiles` times 16 rows, and every
// fragment of B that it reads serves all of them.
//
// ldmatrix reads eight rows of 16 bytes at a time. In a swizzled tile (smem_tile.cuh) those lie in eight different
// groups of four banks, for each span of a tile, so that no read waits for another.
#pragma once
#include <fmha/mma/fp8_operand.cuh>
#include <fmha/mma/fragment.cuh>
#include <fmha/mma/smem_tile.cuh>
#include <fmha/ptx/matrix.cuh>

namespace fmha::mma::sm80 {

using mma::Accumulator;
using mma::kDepth;
using mma::KeyOrder;
using mma::pack_operand;
using mma::RegisterTile;
using mma::SmemTile;
using mma::Storage;

constexpr int kRows = 16;  // of one product

// Address of a lane's row of 16 bytes, among the four matrices of 8 rows of 16 bytes that one ldmatrix reads.
struct LanePlace {
  int32_t row, word;
};
// A [16 rows, 16 deep], or B^T of 16 columns read across its rows: matrices down the rows first.
FMHA_DEVICE LanePlace rows_first() {
  const int32_t lane = threadIdx.x % 32;
  return {lane % 16, lane / 16};
}
// B [16 columns, 16 deep] read along its rows, which are D's columns: matrices along the depth first.
FMHA_DEVICE LanePlace depth_first() {
  const int32_t lane = threadIdx.x % 32;
  return {lane / 16 * 8 + lane % 8, lane / 8 % 2};
}

// Address of a lane's row in a tile. The addresses of other rows and columns follow by one XOR and one addition of
// constants: the swizzle is linear, and whole eights of rows do not change it.
template <class Tile>
struct LaneAddress {
  uint32_t base, within;

  FMHA_DEVICE LaneAddress(const Tile& tile, LanePlace place)
      : base(tile.address()), within(word_offset<Tile>(place.row, place.word * (16 / Tile::elem_bytes))) {}
  // Address `rows` rows (whole eights) and `columns` columns further (whole 32 bytes, or 16 where the lane's place is
  // in the first word).
  FMHA_DEVICE uint32_t plus(int rows, int columns) const {
    constexpr int span = Tile::span;
    return base + (within ^ uint32_t(columns % span * Tile::elem_bytes)) + rows * Tile::span_bytes + columns / span * Tile::chunk_bytes;
  }
};

// How many fragments of B are read before their products are issued, besides the present one: ldmatrix takes some 30
// clocks.
template <int ahead>
struct FragmentRing {
  uint32_t words[ahead + 1][4];
  FMHA_DEVICE uint32_t (&operator[](int i))[4] { return words[i % (ahead + 1)]; }
};

// Accumulators of 16 rows and 8 columns, from operands of 32 bytes along the inner dimension.
template <DType dtype>
FMHA_DEVICE void multiply(float* d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (dtype == DType::F16 || dtype == DType::Bf16) {
    ptx::mma_m16n8k16<dtype>(d, a, b);
  } else {
    ptx::mma_m16n8k32<dtype>(d, a, b);
  }
}

// Computes two 8-column groups of D for all of A's rows, 16 at a time.
template <DType dtype, int m_tiles, int n>
FMHA_DEVICE void multiply(Accumulator<n> (&d)[m_tiles], const uint32_t (&a)[m_tiles][4], const uint32_t (&b)[4], int group) {
  const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
    multiply<dtype>(&d[m].elems[4 * group], a[m], first);
    multiply<dtype>(&d[m].elems[4 * group + 4], a[m], second);
  }
}

// Computes d = A B^T: A's rows from `a_row` on, 16 to an accumulator, against B's rows, both read along their dim.
template <DType dtype, int ahead, int m_tiles, int n, class TileA, class TileB>
FMHA_DEVICE void product_abt(Accumulator<n> (&d)[m_tiles], const TileA& a, int32_t a_row, const TileB& b) {
  static_assert(TileA::dim == TileB::dim && TileB::rows == n, "A and B share their inner dimension, B's rows are D's columns");
  constexpr int depth = kDepth<typename TileA::Elem>, steps = TileA::dim / depth, groups = n / 16, loads = steps * groups;
  const LanePlace rows = rows_first();
  const LaneAddress<TileA> a0(a, {a_row + rows.row, rows.word});
  const LaneAddress<TileB> b0(b, depth_first());
  uint32_t a_words[2][m_tiles][4];
  FragmentRing<ahead> b_words;
  const auto load_a = [&](int step) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) ptx::ldmatrix_x4(a_words[step % 2][m], a0.plus(m * kRows, step * depth));
  };
  const auto load_b = [&](int i) { ptx::ldmatrix_x4(b_words[i], b0.plus(i % groups * 16, i / groups * depth)); };
  load_a(0);
#pragma unroll
  for (int i = 0; i < ahead && i < loads; ++i) load_b(i);
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) d[m].clear();
#pragma unroll
  for (int i = 0; i < loads; ++i) {
    const int step = i / groups;
    if (i + ahead < loads) load_b(i + ahead);
    if (i % groups == 0 && step + 1 < steps) load_a(step + 1);
    multiply<dtype>(d, a_words[step % 2], b_words[i], 2 * (i % groups));
  }
}

// d += A B: A in registers, B's rows its inner dimension; or, `b_is_transposed`, its columns. D has B's columns from
// `part` times as many as it has on: whole spans of the tile where there are several parts.
template <DType dtype, int ahead, bool b_is_transposed, int m_tiles, int n, int depth, class TileB>
FMHA_DEVICE void product_ab(Accumulator<n> (&d)[m_tiles], const RegisterTile<uint16_t, depth> (&a)[m_tiles], const TileB& b,
                            int32_t part = 0) {
  constexpr int columns = b_is_transposed ? TileB::rows : TileB::dim;
  static_assert(columns == n || (columns % n == 0 && (b_is_transposed || n % TileB::span == 0)), "parts are whole spans");
  static_assert((b_is_transposed ? TileB::dim : TileB::rows) == depth, "A and B share their inner dimension");
  constexpr int groups = n / 16, loads = depth / kDepth<uint16_t> * groups;
  LaneAddress<TileB> b0(b, b_is_transposed ? depth_first() : rows_first());
  if constexpr (columns != n) b0.base += part * (b_is_transposed ? n * TileB::span_bytes : n / TileB::span * TileB::chunk_bytes);
  FragmentRing<ahead> b_words;
  const auto load_b = [&](int i) {
    const int group = i % groups, step = i / groups;
    if constexpr (b_is_transposed) {
      ptx::ldmatrix_x4(b_words[i], b0.plus(group * 16, step * kDepth<uint16_t>));
    } else {
      ptx::ldmatrix_x4_trans(b_words[i], b0.plus(step * kDepth<uint16_t>, group * 16));
    }
  };
#pragma unroll
  for (int i = 0; i < ahead && i < loads; ++i) load_b(i);
#pragma unroll
  for (int i = 0; i < loads; ++i) {
    const int step = i / groups;
    if (i + ahead < loads) load_b(i + ahead);
    uint32_t a_words[m_tiles][4];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int k = 0; k < 4; ++k) a_words[m][k] = a[m].elems[step][k];
    }
    multiply<dtype>(d, a_words, b_words[i], 2 * (i % groups));
  }
}

// d += A^T B: the rows of both tiles are the inner dimension. A's sixteen columns from `a_column` on against B's from
// `b_column` on, which is a multiple of n, a power of two or all of B.
template <DType dtype, int ahead, int n, class TileA, class TileB>
FMHA_DEVICE void product_atb(Accumulator<n>& d, const TileA& a, int32_t a_column, const TileB& b, int32_t b_column) {
  static_assert(TileA::rows == TileB::rows, "A and B share their inner dimension");
  static_assert(n == TileB::dim || (n & (n - 1)) == 0, "columns of a part differ in bits of their own");
  constexpr int depth = kDepth<uint16_t>, groups = n / 16, loads = TileA::rows / depth * groups;
  const LanePlace a_place = depth_first(), b_place = rows_first();
  const LaneAddress<TileA> a0(a, {a_place.row, a_place.word + a_column / 8});
  const LaneAddress<TileB> b0(b, {b_place.row, b_place.word + b_column / 8});
  FragmentRing<ahead> b_words;
  const auto load_b = [&](int i) { ptx::ldmatrix_x4_trans(b_words[i], b0.plus(i / groups * depth, i % groups * 16)); };
#pragma unroll
  for (int i = 0; i < ahead && i < loads; ++i) load_b(i);
  uint32_t a_words[4];
#pragma unroll
  for (int i = 0; i < loads; ++i) {
    if (i + ahead < loads) load_b(i + ahead);
    if (i % groups == 0) ptx::ldmatrix_x4_trans(a_words, a0.plus(i / groups * depth, 0));
    const uint32_t (&w)[4] = b_words[i];
    const uint32_t first[2] = {w[0], w[1]}, second[2] = {w[2], w[3]};
    multiply<dtype>(&d.elems[8 * (i % groups)], a_words, first);
    multiply<dtype>(&d.elems[8 * (i % groups) + 4], a_words, second);
  }
}

// product_ab of 8-bit elements. The tensor cores of sm_89 keep some 14 bits of such sums (SageAttention2, arXiv
// 2411.10958: FP22), so a block's products are added up apart, and then to d in f32.
//
// For a B with rows of the inner dimension ldmatrix transposes pairs of neighbouring columns, and bytes of two
// registers make the B of even columns and that of odd ones. Its keys then have the order of an accumulator
// (fp8_operand.cuh), and the thread's columns of sixteen are four neighbours (store_rows.cuh: turned).
template <DType dtype, int ahead, bool b_is_transposed, int m_tiles, int n, int depth, class TileB>
FMHA_DEVICE void product_ab(Accumulator<n> (&d)[m_tiles], const RegisterTile<uint8_t, depth> (&a)[m_tiles], const TileB& b,
                            int32_t = 0) {
  static_assert((b_is_transposed ? TileB::rows : TileB::dim) == n, "B has D's columns");
  static_assert((b_is_transposed ? TileB::dim : TileB::rows) == depth, "A and B share their inner dimension");
  constexpr int groups = n / 16, steps = depth / kDepth<uint8_t>, loads = steps * groups;
  const LaneAddress<TileB> b0(b, b_is_transposed ? depth_first() : LanePlace{int32_t(threadIdx.x % 32), 0});
  FragmentRing<ahead> b_words;
  const auto load_b = [&](int i) {
    const int group = i / steps, step = i % steps;
    if constexpr (b_is_transposed) {
      ptx::ldmatrix_x4(b_words[i], b0.plus(group * 16, step * kDepth<uint8_t>));
    } else {
      ptx::ldmatrix_x4_trans(b_words[i], b0.plus(step * kDepth<uint8_t>, group * 16));
    }
  };
#pragma unroll
  for (int i = 0; i < ahead && i < loads; ++i) load_b(i);
#pragma unroll
  for (int group = 0; group < groups; ++group) {
    Accumulator<16> sums[m_tiles];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) sums[m].clear();
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int i = group * steps + step;
      if (i + ahead < loads) load_b(i + ahead);
      const uint32_t (&w)[4] = b_words[i];
      uint32_t a_words[m_tiles][4], words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[k] = b_is_transposed ? w[k] : ptx::prmt(w[k % 2 * 2], w[k % 2 * 2 + 1], k < 2 ? 0x6420 : 0x7531);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) a_words[m][k] = a[m].elems[step][k];
      }
      multiply<dtype>(sums, a_words, words, 0);
    }
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int e = 0; e < sums[m].num_elems; ++e) d[m][8 * group + e] += sums[m][e];
    }
  }
}

}  // namespace fmha::mma::sm80
