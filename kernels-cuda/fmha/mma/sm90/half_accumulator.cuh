// An accumulator of f16: half the registers of f32, and eleven bits. Fragments as in mma/sm90.cuh,
// two neighbouring columns to a register.
// PTX ISA, Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async, Register Fragments
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-register-fragment-wgmma-64n16
#pragma once
#include <fmha/mma/sm90.cuh>

namespace fmha::mma::sm90 {

template <int n>
struct HalfAccumulator {
  static constexpr int columns = n, num_pairs = n / 4;
  uint32_t elems[num_pairs];

  FMHA_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < num_pairs; ++i) elems[i] = 0;
  }
  // Rows times their factor, which is rounded to f16 first.
  FMHA_DEVICE void scale(const float (&factor)[2]) {
    const uint32_t pair[2] = {ptx::cvt_rn_x2<DType::F16>(factor[0], factor[0]),
                              ptx::cvt_rn_x2<DType::F16>(factor[1], factor[1])};
#pragma unroll
    for (int i = 0; i < num_pairs; ++i) elems[i] = ptx::mul_f16x2(elems[i], pair[Accumulator<n>::row(2 * i)]);
  }
};

template <int n, bool half>
struct AccumulatorChoice {
  using Type = Accumulator<n>;
};
template <int n>
struct AccumulatorChoice<n, true> {
  using Type = HalfAccumulator<n>;
};
template <int n, bool half>
using AccumulatorOf = typename AccumulatorChoice<n, half>::Type;

// What a product left, in f32.
template <int n>
FMHA_DEVICE Accumulator<n>& in_f32(Accumulator<n>& x) {
  return x;
}
template <int n>
FMHA_DEVICE Accumulator<n> in_f32(HalfAccumulator<n>& x) {
  Accumulator<n> y;
#pragma unroll
  for (int i = 0; i < x.num_pairs; ++i) ptx::unpack_f16x2(x.elems[i], y[2 * i], y[2 * i + 1]);
  return y;
}

}  // namespace fmha::mma::sm90
