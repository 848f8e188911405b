// Conversions to the OCP FP8 types, and bytes of registers.
// PTX ISA, Data Movement and Conversion Instructions: cvt, prmt
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
#pragma once
#include <fmha/spec.h>

namespace fmha::ptx {

// needs: sm_89. Rounds four numbers to nearest even and packs them, the first in the low byte; numbers beyond the
// largest become the largest. PTX ISA: cvt.
template <DType dtype>
FMHA_DEVICE uint32_t cvt_rn_satfinite_x4(float a, float b, float c, float d) {
  static_assert(dtype == DType::E4m3Fn || dtype == DType::E5m2, "cvt_rn_satfinite_x4 packs OCP types");
  uint32_t packed;
  if constexpr (dtype == DType::E4m3Fn) {
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high}; }"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  } else {
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, %2, %1; cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high}; }"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  }
  return packed;
}

// needs: sm_100a. Rounds eight numbers to E2M1, to nearest even, and packs them, the first in the lowest four bits;
// numbers beyond 6 become 6. PTX ISA: cvt.
FMHA_DEVICE uint32_t cvt_rn_satfinite_e2m1_x8(const float* x) {
  uint32_t packed;
  asm("{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, %2, %1; cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5; cvt.rn.satfinite.e2m1x2.f32 d, %8, %7; mov.b32 %0, {a, b, c, d}; }"
      : "=r"(packed)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return packed;
}

// needs: sm_89. Converts the two E4M3 numbers in the low half to f16, which holds them exactly; the first goes to the
// low half. PTX ISA: cvt.
FMHA_DEVICE uint32_t cvt_rn_f16x2_e4m3x2(uint32_t pair) {
  uint32_t wide;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(uint16_t(pair)));
  return wide;
}

// needs: sm_50. Selects four bytes of two registers: digit i of the selector (hexadecimal, from the right) names the
// byte that becomes byte i; those of `b` are 4 to 7.
// PTX ISA: prmt.
FMHA_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}

}  // namespace fmha::ptx
