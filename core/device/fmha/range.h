// Limits of f32 for a softmax whose exponents are one multiply-add: score * scale - shift, with shift = running
// maximum * scale.
#pragma once
#include <fmha/portable.h>

namespace fmha {

// The shift is a rounded product, which the multiply-add subtracts from an exact one, so P, the sums and O are off by
// up to 2 to the power of half an ulp of the shift. Beyond this the maximum is subtracted from scores before they are
// scaled: in the main loop, or, on Hopper, by recomputing the row when its tile is done: there, a vote in the loop cost
// 4 % with scores that lie far apart.
constexpr float kLargestShift = 4194304.f;  // 2^22: half a last place is 2^-2

// The largest finite f32.
constexpr float kLargestFloat = 3.4028234663852886e38f;

// Factor of sums of `weight * V` that keeps them in f32 however large V is: the largest power of two that is at most
// 1 / (2 row_sum), for a sum of weights that are at most 1. A power of two changes no mantissa bit of a sum that
// stays in f32.
FMHA_DEVICE float headroom(float row_sum) {
  const int32_t exponent = clamp(int32_t(bits_of(row_sum) >> 23), 127, 250);
  return float_of(uint32_t(252 - exponent) << 23);
}

// 1 / x, exact, for an x that is a power of two.
FMHA_DEVICE float inverse_of_power(float x) { return float_of((254u << 23) - bits_of(x)); }

// The power 2^n.
FMHA_DEVICE constexpr float power_of_two(int n) {
  float power = 1.f;
  for (; n > 0; --n) power *= 2.f;
  for (; n < 0; ++n) power /= 2.f;
  return power;
}

// The logarithm n of a power 2^n that is at least 1.
FMHA_DEVICE constexpr int log2_of_power(float power) {
  int log2 = 0;
  for (; power > 1.f; power /= 2.f) ++log2;
  return log2;
}

// A V of bf16 may reach f32's largest number, and a running maximum that is too low lets P reach
// 2^rescale_threshold_log2: a product, or the sum of a few, would leave f32 where O does not. So P is
// scaled down by a power of two, which costs nothing, with room for 32 values of weight 1. Under a
// mask non-finite rows are recomputed, and P is not scaled, since a scaled-down O loses tiny values.
FMHA_DEVICE constexpr int offset_log2_of_bf16_p(bool is_masked, int rescale_threshold_log2) {
  return is_masked ? 0 : -(rescale_threshold_log2 + 5);
}

}  // namespace fmha
