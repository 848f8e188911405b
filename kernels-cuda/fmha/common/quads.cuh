// Operations of the four lanes that share an accumulator's rows. Layout: mma/fragment.cuh.
#pragma once
#include <fmha/mma/fragment.cuh>
#include <fmha/ptx/warp.cuh>

namespace fmha {

// Reduces a value over the four lanes that share a row.
template <class Op>
FMHA_DEVICE float quad_reduce(float x, Op op) {
  x = op(x, ptx::shfl_xor(x, 1));
  return op(x, ptx::shfl_xor(x, 2));
}

// Lanes 2l and 2l + 1 hold words of two column groups, two of each; afterwards the even lane has all four words of the
// first group and the odd lane those of the second, in the order of lanes.
template <class Word>
FMHA_DEVICE void exchange_halves(Word (&w)[4]) {
  const bool odd = threadIdx.x & 1;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const Word own = odd ? w[2 + k] : w[k], received = ptx::shfl_xor(odd ? w[k] : w[2 + k], 1);
    w[k] = odd ? received : own;
    w[2 + k] = odd ? own : received;
  }
}

// Four lanes hold 8-column groups c..c+3 of a row, two columns of each; afterwards lane l holds all
// of group c + l: a 4x4 transpose of words in two exchanges.
FMHA_DEVICE void quad_transpose(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = ptx::shfl_xor(odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t received = ptx::shfl_xor(high ? w[i] : w[i + 2], 2);
    (high ? w[i] : w[i + 2]) = received;
  }
}

// Whether this thread's elements of a row of O contain a NaN or an infinity.
template <int n>
FMHA_DEVICE bool has_non_finite(const mma::Accumulator<n>& o, int r) {
  float zero = 0.f;
#pragma unroll
  for (int e = 2 * r; e < o.num_elems; e += 4) zero = fmaf(o[e], 0.f, fmaf(o[e + 1], 0.f, zero));
  return is_nan(zero);
}

}  // namespace fmha
