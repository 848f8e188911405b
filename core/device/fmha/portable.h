// Names that every device compiler and the host's C++ compiler share: fixed-width types, bit casts, the few
// mathematical functions. No header is included, so that it compiles where no system header is found.
#pragma once

#if defined(__HIP__)
// Attributes spelt out, since a bare clang has no header with their macros.
#define FMHA_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define FMHA_GLOBAL __attribute__((address_space(1)))
#elif defined(__CUDACC__)
#define FMHA_DEVICE __device__ __forceinline__
#define FMHA_GLOBAL
#else
#define FMHA_DEVICE inline
#define FMHA_GLOBAL
#endif

namespace fmha {

using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

template <class T, int n>
struct Array {
  T elems[n];
  FMHA_DEVICE constexpr T& operator[](int i) { return elems[i]; }
  FMHA_DEVICE constexpr const T& operator[](int i) const { return elems[i]; }
};

template <class T>
FMHA_DEVICE constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
FMHA_DEVICE constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
FMHA_DEVICE constexpr T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
FMHA_DEVICE constexpr int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }
FMHA_DEVICE constexpr int32_t round_up(int32_t a, int32_t b) { return ceil_div(a, b) * b; }

FMHA_DEVICE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
FMHA_DEVICE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

FMHA_DEVICE float infinity() { return float_of(0x7f800000u); }
FMHA_DEVICE bool is_nan(float x) { return x != x; }

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// NVRTC has these functions built in under their C names, the other compilers as builtins.
#if defined(__CUDACC_RTC__)
FMHA_DEVICE float exp2_of(float x) { return ::exp2f(x); }
FMHA_DEVICE float log2_of(float x) { return ::log2f(x); }
FMHA_DEVICE float abs_of(float x) { return ::fabsf(x); }
#else
FMHA_DEVICE float exp2_of(float x) { return __builtin_exp2f(x); }
FMHA_DEVICE float log2_of(float x) { return __builtin_log2f(x); }
FMHA_DEVICE float abs_of(float x) { return __builtin_fabsf(x); }
#endif

// Hyperbolic tangent with an absolute error of about 1e-7. The system's tanhf is not used, since some device compilers
// lack it.
FMHA_DEVICE float tanh_of(float x) {
  const float a = abs_of(x);
  // Below 1/16 the quotient would lose digits; x - x^3/3 + 2x^5/15 is exact to f32 there.
  if (a < 0.0625f) return x + x * x * x * (-1.f / 3.f + x * x * (2.f / 15.f));
  const float t = 1.f - 2.f / (1.f + exp2_of(2.f * kLog2E * a));
  return x < 0.f ? -t : t;  // a NaN has gone through t
}

}  // namespace fmha
