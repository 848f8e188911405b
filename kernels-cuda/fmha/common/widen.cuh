// Converts elements of an FP8 cache to 16 bits and multiplies them by their descale.
#pragma once
#include <fmha/num.h>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/num.cuh>

namespace fmha {

// Converts two FP8 numbers, the first in the low byte, to f32. `converts`: the device has instructions that convert
// e4m3.
template <DType stored, bool converts>
FMHA_DEVICE void unpack_fp8x2(uint32_t pair, float& low, float& high) {
  static_assert(stored == DType::E4m3Fn || stored == DType::E5m2, "caches are of OCP FP8");
  if constexpr (stored == DType::E5m2) {
    // The two bytes become the upper halves of two f16 numbers, which are then converted to f32.
    ptx::unpack_f16x2(ptx::prmt(pair, 0, 0x1404), low, high);
  } else if constexpr (converts) {
    ptx::unpack_f16x2(ptx::cvt_rn_f16x2_e4m3x2(pair), low, high);
  } else {
    // f16 numbers with the FP8 number's exponent and mantissa. The f16 exponent's bias is 8 larger, which a factor
    // corrects; the largest bit pattern is NaN.
    const uint32_t first = pair & 0x7fu, second = pair & 0x7f00u;
    ptx::unpack_f16x2(first << 7 | (pair & 0x80u) << 8 | second << 15 | (pair & 0x8000u) << 16, low, high);
    low = first == 0x7fu ? float_of(0x7fffffffu) : low * 256.f;
    high = second == 0x7f00u ? float_of(0x7fffffffu) : high * 256.f;
  }
}

// Converts two FP8 numbers, the first in the low byte, to 16 bits. Each is multiplied by `descale` in f32 and rounded
// once, as in a cache that was widened before. `unit`: the factor is 1, and nothing is multiplied.
template <DType stored, DType wide, bool converts, bool unit = false>
FMHA_DEVICE uint32_t widen_pair(uint32_t pair, float descale) {
  if constexpr (unit && wide == DType::F16 && stored == DType::E5m2) return ptx::prmt(pair, 0, 0x1404);
  if constexpr (unit && wide == DType::F16 && stored == DType::E4m3Fn && converts) return ptx::cvt_rn_f16x2_e4m3x2(pair);
  float low, high;
  unpack_fp8x2<stored, converts>(pair, low, high);
  if constexpr (unit) return ptx::cvt_rn_x2<wide>(low, high);
  return ptx::cvt_rn_x2<wide>(low * descale, high * descale);
}
// Converts eight elements from type `stored` to type `wide`.
template <DType stored, DType wide, bool converts, bool unit = false>
FMHA_DEVICE void widen_word(const uint32_t (&bytes)[2], float descale, uint32_t (&packed)[4]) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
    packed[pair] = widen_pair<stored, wide, converts, unit>(bytes[pair / 2] >> 16 * (pair % 2) & 0xffffu, descale);
}

}  // namespace fmha
