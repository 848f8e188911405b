// P of 8 bits: from an accumulator to the A operand of the next product.
//
// A thread's accumulator of 32 keys holds keys 8 g + 2 q and 8 g + 2 q + 1 of each 8-column group g, where q is the
// thread's lane in the quad. An A operand of 8-bit elements needs keys 16 h + 4 q to 16 h + 4 q + 3 of each half h. A
// thread packs its own four keys of a half as they are, so places 16 h + 4 q .. + 3 hold the keys 16 h + {2 q, 2 q + 1,
// 8 + 2 q, 9 + 2 q}. The product is right if B has its keys in that order too (`KeyOrder::OfAccumulator`: a V that the
// kernel transposes itself), which costs nothing, or if the quad's lanes exchange keys first (`KeyOrder::OfMemory`: a
// column-major V, as TMA brings it), one shuffle per register.
#pragma once
#include <fmha/mma/fragment.cuh>
#include <fmha/ptx/collective.cuh>
#include <fmha/ptx/fp8.cuh>

namespace fmha::mma {

enum class KeyOrder { OfMemory, OfAccumulator };

// The key, of sixteen, that stands at place `at` of an operand in the accumulator's order.
FMHA_DEVICE constexpr int key_at(int at) { return 8 * (at / 2 % 2) + at / 4 * 2 + at % 2; }

// Two registers of four keys, of two rows, from the accumulator's order to memory's. Lane q is to have the keys 4 q ..
// 4 q + 3 of sixteen: of 8-column group q / 2 the pairs of lanes 2 (q % 2) and the next. Each lane sends either group's
// pair of both rows once: even lanes first the lower group's, odd lanes first the upper one's, so that no lane receives
// both at once.
FMHA_DEVICE void exchange_keys(uint32_t& upper_row, uint32_t& lower_row) {
  const uint32_t q = threadIdx.x % 4, first_lane = threadIdx.x % 32 - q;
  const uint32_t low_group = ptx::prmt(upper_row, lower_row, 0x5410), high_group = ptx::prmt(upper_row, lower_row, 0x7632);
  const bool odd = q & 1, high = q & 2;
  const uint32_t source = first_lane + q % 2 * 2;
  const uint32_t a = ptx::shfl_idx(odd ? high_group : low_group, source + (high ? 1 : 0));
  const uint32_t b = ptx::shfl_idx(odd ? low_group : high_group, source + (high ? 0 : 1));
  upper_row = ptx::prmt(a, b, high ? 0x1054 : 0x5410);
  lower_row = ptx::prmt(a, b, high ? 0x3276 : 0x7632);
}

// An A operand from an accumulator, rounded to `dtype`. Columns that the accumulator lacks become `zero`, which is no
// compile-time constant (mma/sm90.cuh says why).
template <DType dtype, KeyOrder order, int depth, int n>
FMHA_DEVICE void pack_operand(RegisterTile<uint8_t, depth>& a, const Accumulator<n>& x, uint32_t zero) {
  static_assert(n <= depth && n % 16 == 0, "whole registers, and no more than the operand has");
#pragma unroll
  for (int half = 0; half < depth / 16; ++half) {
    uint32_t* words = &a.elems[half / 2][half % 2 * 2];  // of the upper row, and of the lower
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int e = 8 * half + 2 * r;
      words[r] = half < n / 16 ? ptx::cvt_rn_satfinite_x4<dtype>(x[e], x[e + 1], x[e + 4], x[e + 5]) : zero;
    }
    if (order == KeyOrder::OfMemory && half < n / 16) exchange_keys(words[0], words[1]);
  }
}

}  // namespace fmha::mma
