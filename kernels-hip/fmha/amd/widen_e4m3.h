// Converts E4M3 (OCP) to 16 bits by a product in f16, for matrix units that do not support the type. f16 and bf16 hold
// E4M3 exactly.
#pragma once
#include <fmha/isa/num.h>
#include <fmha/num.h>

namespace fmha {

// Converts two codes, in the high bytes of the halves of `codes`, to f16. `no_number`: 0x7f00 where a code is NaN. A
// code's bits one place lower are an f16 number with an exponent too small by the two types' difference of bias, and so
// are those of a subnormal code.
FMHA_DEVICE uint32_t f16_of_e4m3(uint32_t codes, uint32_t no_number) {
  const f16 two_to_eighth = f16(256.f);
  const uint32_t small = (codes & 0x80008000u) | (codes & 0x7f007f00u) >> 1;
  const auto pair = __builtin_bit_cast(Vec<f16, 2>, small);
  return __builtin_bit_cast(uint32_t, pair * two_to_eighth) | no_number;
}

// Converts eight codes to f16 or bf16.
template <DType dtype>
FMHA_DEVICE u32x4 widen_e4m3(u32x2 codes) {
  static_assert(dtype == DType::F16 || dtype == DType::Bf16, "E4M3 is widened to 16 bits");
  constexpr uint32_t kFirst = 0x050c040cu, kSecond = 0x070c060cu;  // bytes 0 and 1, then 2 and 3, above zeros
  u32x4 wide;
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    // In each byte, bit 7 becomes 1 if the code is NaN of either sign; the other bits are the code's low seven.
    const uint32_t top = ((codes[w] & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u, no_number = top - (top >> 7);
    wide[2 * w] = f16_of_e4m3(v_perm_b32(codes[w], 0, kFirst), v_perm_b32(no_number, 0, kFirst));
    wide[2 * w + 1] = f16_of_e4m3(v_perm_b32(codes[w], 0, kSecond), v_perm_b32(no_number, 0, kSecond));
  }
  if constexpr (dtype == DType::Bf16) {
    constexpr uint32_t kHighHalves = 0x07060302;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const auto pair = __builtin_bit_cast(Vec<f16, 2>, uint32_t(wide[w]));
      // The lower half of each f32 number is 0.
      wide[w] = v_perm_b32(bits_of(float(pair[1])), bits_of(float(pair[0])), kHighHalves);
    }
  }
  return wide;
}

}  // namespace fmha
