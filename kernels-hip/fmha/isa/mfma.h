// Matrix instructions: D = A B + C over a wave. Register layouts are in mma/cdna.h.
#pragma once
#include <fmha/isa/hip.h>

namespace fmha {

// needs: gfx90a. V_MFMA_F32_32X32X8_F16, CDNA3 ISA 7.1.
FMHA_DEVICE f32x16 v_mfma_f32_32x32x8_f16(f16x4 a, f16x4 b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, c, 0, 0, 0);
}

// needs: gfx90a. V_MFMA_F32_32X32X8_BF16 (gfx90a: _1K), CDNA3 ISA 7.1.
FMHA_DEVICE f32x16 v_mfma_f32_32x32x8_bf16(s16x4 a, s16x4 b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, b, c, 0, 0, 0);
}

#if defined(__gfx942__) || defined(__gfx950__)
// needs: gfx942. V_MFMA_F32_32X32X16_FP8_FP8, CDNA3 ISA 7.1: FNUZ on gfx942, OCP on gfx950.
FMHA_DEVICE f32x16 v_mfma_f32_32x32x16_fp8_fp8(long a, long b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(a, b, c, 0, 0, 0);
}

// needs: gfx942. V_MFMA_F32_32X32X16_BF8_BF8, CDNA3 ISA 7.1: FNUZ on gfx942, OCP on gfx950.
FMHA_DEVICE f32x16 v_mfma_f32_32x32x16_bf8_bf8(long a, long b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x16_bf8_bf8(a, b, c, 0, 0, 0);
}
#endif

#if defined(__gfx950__)
// needs: gfx950. V_MFMA_F32_32X32X16_F16, CDNA4 ISA 7.1.
FMHA_DEVICE f32x16 v_mfma_f32_32x32x16_f16(f16x8 a, f16x8 b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x16_f16(a, b, c, 0, 0, 0);
}

// needs: gfx950. V_MFMA_F32_32X32X16_BF16, CDNA4 ISA 7.1.
FMHA_DEVICE f32x16 v_mfma_f32_32x32x16_bf16(bf16x8 a, bf16x8 b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x16_bf16(a, b, c, 0, 0, 0);
}

// Operand format of V_MFMA_*_F8F6F4.
enum class F8f6f4 { Fp8 = 0, Bf8 = 1 };

// needs: gfx950. V_MFMA_F32_32X32X64_F8F6F4, CDNA4 ISA 7.1, without block scales.
template <F8f6f4 type>
FMHA_DEVICE f32x16 v_mfma_f32_32x32x64_f8f6f4(s32x8 a, s32x8 b, f32x16 c) {
  return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, b, c, int(type), int(type), 0, 0, 0, 0);
}
#endif

}  // namespace fmha
