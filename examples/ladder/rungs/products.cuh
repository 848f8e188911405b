// Products of a warp's sixteen rows on the tensor cores, by mma.sync, on tiles whose rows follow one another without a
// swizzle.
#pragma once
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/matrix.cuh>
#include <ladder/common.cuh>

namespace ladder {

template <int num_rows, int num_columns>
struct PlainTile {
  static constexpr int rows = num_rows, dim = num_columns;
  uint16_t elems[rows][dim];

  FMHA_DEVICE uint32_t address(int32_t row, int32_t column) const { return ptx::shared_address(&elems[row][column]); }
  // Address of this lane's row of eight, in the four 8 x 8 matrices that an ldmatrix reads from 16 x 16 elements:
  // `down` goes down a column of matrices first, `across` along a row.
  FMHA_DEVICE uint32_t down(int32_t row, int32_t column) const {
    const int32_t lane = threadIdx.x % 32;
    return address(row + lane % 16, column + lane / 16 * 8);
  }
  FMHA_DEVICE uint32_t across(int32_t row, int32_t column) const {
    const int32_t lane = threadIdx.x % 32;
    return address(row + lane / 16 * 8 + lane % 8, column + lane / 8 % 2 * 8);
  }
};

// Adds A B to d: sixteen rows of A, a depth of sixteen, and sixteen columns of B from `column` on.
template <int n>
FMHA_DEVICE void multiply(mma::Accumulator<n>& d, const uint32_t (&a)[4], const uint32_t (&b)[4], int column) {
  const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
  ptx::mma_m16n8k16<DType::Bf16>(&d.elems[column / 2], a, left);
  ptx::mma_m16n8k16<DType::Bf16>(&d.elems[column / 2 + 4], a, right);
}

// Computes S = Q K^T for sixteen rows of Q from `row` on. K's rows are S's columns.
template <int n, class Q, class K>
FMHA_DEVICE void scores(mma::Accumulator<n>& s, const Q& q, int32_t row, const K& k) {
  s.clear();
#pragma unroll
  for (int d = 0; d < Q::dim; d += 16) {
    uint32_t a[4], b[4];
    ptx::ldmatrix_x4(a, q.down(row, d));
#pragma unroll
    for (int key = 0; key < n; key += 16) {
      ptx::ldmatrix_x4(b, k.across(key, d));
      multiply(s, a, b, key);
    }
  }
}

// Adds P V to O. `load_p(a, key)` loads sixteen columns of P. V's rows are P's columns, so ldmatrix transposes V.
template <int dim, class LoadP, class V>
FMHA_DEVICE void add_values(mma::Accumulator<dim>& o, LoadP load_p, const V& v) {
#pragma unroll
  for (int key = 0; key < V::rows; key += 16) {
    uint32_t a[4], b[4];
    load_p(a, key);
#pragma unroll
    for (int d = 0; d < dim; d += 16) {
      ptx::ldmatrix_x4_trans(b, v.down(key, d));
      multiply(o, a, b, d);
    }
  }
}

constexpr int kThreads = 128;  // of a CTA

// Copies rows of a tile by cp.async, 16 bytes of each thread at a time, without waiting.
template <class Tile>
FMHA_DEVICE void copy_async(const Tile& to, const uint16_t* from, int32_t stride) {
  constexpr int words = Tile::dim / 8;
#pragma unroll
  for (int i = 0; i < Tile::rows * words; i += kThreads) {
    const int32_t at = i + threadIdx.x, row = at / words, column = at % words * 8;
    ptx::cp_async<16>(to.address(row, column), from + int64_t(row) * stride + column, 16);
  }
}

}  // namespace ladder
