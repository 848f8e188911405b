// The functions of <cmath> that printed expressions call, in f32, for compilers without a mathematical library: clang
// for AMD, and the host's, which tests them. NVRTC has all of them built in except one.
//
// Errors: those of the builtins, and a few units of the last place; tanhf 3e-7 absolute.
#pragma once
#include <fmha/portable.h>

#if defined(__CUDACC_RTC__)
namespace fmha {

// NVRTC's own tanhf has a branch, whose two sides the lanes of a warp would execute one after the other.
FMHA_DEVICE float tanhf(float x) {
  const float a = abs_of(x), square = x * x;
  const float far = 1.f - __fdividef(2.f, 1.f + exp2_of(2.f * kLog2E * a));
  // The quotient loses digits near 0, so up to 9/16 a minimax polynomial x (1 + x^2 p(x^2)) is used; its error is 0.8
  // units in the last place.
  const float behind = -0.0538374306f + square * (0.0210074605f - square * 0.00617981196f);
  const float p = -0.333333139f + square * (0.133324523f + square * behind);
  return a < 0.5625f ? x + x * square * p : x < 0.f ? -far : far;
}

}  // namespace fmha
#else
namespace fmha {

FMHA_DEVICE float fabsf(float x) { return __builtin_fabsf(x); }
FMHA_DEVICE float floorf(float x) { return __builtin_floorf(x); }
FMHA_DEVICE float ceilf(float x) { return __builtin_ceilf(x); }
FMHA_DEVICE float rintf(float x) { return __builtin_rintf(x); }
FMHA_DEVICE float sqrtf(float x) { return __builtin_sqrtf(x); }
FMHA_DEVICE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FMHA_DEVICE float expf(float x) { return __builtin_expf(x); }
FMHA_DEVICE float exp2f(float x) { return __builtin_exp2f(x); }
FMHA_DEVICE float logf(float x) { return __builtin_logf(x); }
FMHA_DEVICE float log2f(float x) { return __builtin_log2f(x); }
FMHA_DEVICE float tanhf(float x) { return tanh_of(x); }

// Remainder of a division that rounds toward 0, exact: long division of the mantissas, 32 bits at a time.
FMHA_DEVICE float fmodf(float a, float b) {
  const uint32_t x = bits_of(a) & 0x7fffffffu, y = bits_of(b) & 0x7fffffffu, sign = bits_of(a) & 0x80000000u;
  if (x >= 0x7f800000u || y > 0x7f800000u || y == 0) return float_of(0x7fc00000u);
  if (x < y) return a;
  const int32_t exponent_x = max<int32_t>(int32_t(x >> 23), 1), exponent_y = max<int32_t>(int32_t(y >> 23), 1);
  const uint32_t divisor = y >> 23 ? (y & 0x7fffffu) | 0x800000u : y;
  uint32_t rest = (x >> 23 ? (x & 0x7fffffu) | 0x800000u : x) % divisor;
  for (int32_t left = exponent_x - exponent_y; left > 0; left -= 32)
    rest = uint32_t((uint64_t(rest) << min(left, 32)) % divisor);
  if (rest == 0) return float_of(sign);
  int32_t exponent = exponent_y;
  while (rest < 0x800000u && exponent > 1) {
    rest <<= 1;
    --exponent;
  }
  return float_of(sign | (rest < 0x800000u ? rest : uint32_t(exponent) << 23 | (rest & 0x7fffffu)));
}

// x less the nearest multiple of pi / 2, and that multiple modulo 4. Payne and Hanek, "Radian Reduction for
// Trigonometric Functions", 1983: only those bits of 2 / pi are multiplied that change the result.
struct Quadrant {
  float rest;
  int32_t of_four;
};
// Word i of the binary expansion of 2 / pi; 0 outside. Computed, since a table would lie in memory.
FMHA_DEVICE uint32_t two_over_pi(int32_t i) {
  const auto one = [i](int32_t at, uint32_t word) { return word & (0u - uint32_t(i == at)); };
  return one(0, 0xa2f9836eu) | one(1, 0x4e441529u) | one(2, 0xfc2757d1u) | one(3, 0xf534ddc0u) | one(4, 0xdb629599u) |
         one(5, 0x3c439041u) | one(6, 0xfe5163abu);
}
FMHA_DEVICE Quadrant quadrant(float x) {
  const float a = abs_of(x);
  const uint32_t mantissa = (bits_of(a) & 0x7fffffu) | 0x800000u;
  // a = mantissa * 2^exponent. Bits of 2 / pi before `skip` give multiples of 4, which do not matter.
  const int32_t exponent = int32_t(bits_of(a) >> 23) - 150;
  if (exponent < -40) return {x, 0};  // below 2^-16: the rest of a number that small is the number
  const int32_t skip = exponent - 2, word = (skip + 64) / 32 - 2, shift = (skip + 64) % 32;
  uint32_t window[3];
#pragma unroll
  for (int32_t i = 0; i < 3; ++i) {
    const uint32_t high = two_over_pi(word + i), low = two_over_pi(word + i + 1);
    window[i] = uint32_t(((uint64_t(high) << 32 | low) << shift) >> 32);
  }
  const uint64_t low = uint64_t(mantissa) * window[2];
  const uint64_t middle = uint64_t(mantissa) * window[1] + (low >> 32);
  const uint32_t high = uint32_t(mantissa * window[0]) + uint32_t(middle >> 32);
  // The top two bits are the quadrant, the rest is its fraction.
  const uint64_t top = uint64_t(high) << 32 | uint32_t(middle);
  const uint64_t fraction = top << 2 | uint32_t(low) >> 30;
  const int32_t of_four = int32_t(high >> 30) + int32_t(fraction >> 63);
  const bool below = fraction >> 63;
  const float rest = float(below ? 0 - fraction : fraction) * (1.5707963267948966f * 0x1p-64f);
  const bool negative = x < 0.f;
  return {below != negative ? -rest : rest, negative ? -of_four & 3 : of_four & 3};
}
FMHA_DEVICE float sin_of_rest(float x) {
  const float s = x * x;
  return x + x * s * (-1.f / 6.f + s * (1.f / 120.f + s * (-1.f / 5040.f + s * (1.f / 362880.f))));
}
FMHA_DEVICE float cos_of_rest(float x) {
  const float s = x * x;
  return 1.f + s * (-0.5f + s * (1.f / 24.f + s * (-1.f / 720.f + s * (1.f / 40320.f + s * (-1.f / 3628800.f)))));
}
FMHA_DEVICE float sine(float x, int32_t quarter_turns) {
  // The test is a comparison and no difference: for a difference of products the compiler would use an FMA, which
  // yields the rounding error.
  if (!(abs_of(x) < infinity())) return float_of(0x7fc00000u);
  const Quadrant at = quadrant(x);
  const int32_t of_four = (at.of_four + quarter_turns) & 3;
  const float value = of_four & 1 ? cos_of_rest(at.rest) : sin_of_rest(at.rest);
  return of_four & 2 ? -value : value;
}
FMHA_DEVICE float sinf(float x) { return sine(x, 0); }
FMHA_DEVICE float cosf(float x) { return sine(x, 1); }

// Computes erf(x) = 2 / sqrt(pi) e^(-x^2) sum over n of 2^n x^(2 n + 1) / (1 3 5 .. (2 n + 1)): no term cancels
// another.
FMHA_DEVICE float erff(float x) {
  const float a = abs_of(x), square = x * x;
  if (is_nan(x)) return x;
  if (a >= 4.f) return x < 0.f ? -1.f : 1.f;
  float term = a, sum = a;
#pragma unroll 1
  for (float odd = 3.f; odd < 120.f && term > sum * 1e-8f; odd += 2.f) {
    term *= 2.f * square / odd;
    sum += term;
  }
  const float value = min(1.1283791670955126f * expf(-square) * sum, 1.f);
  return x < 0.f ? -value : value;
}

// Computes the logarithm in double precision, and the power in the next function: an error of log2 is multiplied by the
// exponent.
FMHA_DEVICE double log2_of_positive(double x) {
  const uint64_t bits = __builtin_bit_cast(uint64_t, x);
  int32_t exponent = int32_t(bits >> 52) - 1023;
  double m = __builtin_bit_cast(double, (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  // The quotient is f32's inverse improved by two of Newton's steps: a division of doubles takes forty instructions.
  double inverse = double(1.f / float(m + 1.0));
  inverse *= 2.0 - (m + 1.0) * inverse;
  inverse *= 2.0 - (m + 1.0) * inverse;
  const double t = (m - 1.0) * inverse, square = t * t;
  double sum = 1.0 / 19.0;
#pragma unroll
  for (int32_t odd = 17; odd >= 1; odd -= 2) sum = sum * square + 1.0 / double(odd);
  return double(exponent) + 2.8853900817779268 * t * sum;
}
FMHA_DEVICE float powf(float a, float b) {
  if (b == 0.f || a == 1.f) return 1.f;
  if (is_nan(a) || is_nan(b)) return float_of(0x7fc00000u);
  const float size = abs_of(b), magnitude = abs_of(a);
  const bool whole = size >= 8388608.f || __builtin_floorf(b) == b;
  const bool odd = whole && size < 16777216.f && (int32_t(size) & 1);
  const bool negative = bits_of(a) >> 31;
  if (magnitude == 1.f && size == infinity()) return 1.f;
  if (negative && !whole && magnitude != 0.f && magnitude != infinity()) return float_of(0x7fc00000u);
  float value;
  if (magnitude == 0.f || magnitude == infinity() || size == infinity()) {
    const bool grows = size == infinity() ? (magnitude > 1.f) == (b > 0.f) : (magnitude == infinity()) == (b > 0.f);
    value = grows ? infinity() : 0.f;
  } else {
    const double exponent = double(b) * log2_of_positive(double(magnitude));
    if (exponent >= 128.0) {
      value = infinity();
    } else if (exponent <= -151.0) {
      value = 0.f;
    } else {
      // Computes 2^exponent: the integer part goes into the number's exponent, the rest into the series of e^(x ln 2).
      const int32_t turns = int32_t(exponent + (exponent < 0.0 ? -0.5 : 0.5));
      const double x = (exponent - double(turns)) * 0.6931471805599453;
      double sum = 1.0;
#pragma unroll
      for (int32_t n = 11; n >= 1; --n) sum = sum * x * (1.0 / double(n)) + 1.0;
      value = float(sum * __builtin_bit_cast(double, uint64_t(turns + 1023) << 52));
    }
  }
  return negative && odd ? -value : value;
}

}  // namespace fmha
#endif
