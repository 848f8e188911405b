// Arithmetic and conversion instructions.
#pragma once
#include <fmha/isa/hip.h>

namespace fmha {

// needs: gfx90a. V_EXP_F32, CDNA3 ISA 12.8: 2^x, 1 ulp; subnormal results are 0.
FMHA_DEVICE float v_exp_f32(float x) { return __builtin_amdgcn_exp2f(x); }

// needs: gfx90a. V_LOG_F32, CDNA3 ISA 12.8: log2(x), 1 ulp; -infinity for subnormal x.
FMHA_DEVICE float v_log_f32(float x) { return __builtin_amdgcn_logf(x); }

// needs: gfx90a. V_RCP_F32, CDNA3 ISA 12.8: 1 / x, 1 ulp.
FMHA_DEVICE float v_rcp_f32(float x) { return __builtin_amdgcn_rcpf(x); }

// needs: gfx90a. V_MAX_F32, CDNA3 ISA 12.7: the larger number; a NaN is ignored if the other operand is a number.
FMHA_DEVICE float v_max_f32(float a, float b) { return __builtin_fmaxf(a, b); }

// needs: gfx90a. V_MAX3_F32, CDNA3 ISA 12.11: the largest of three; NaNs are ignored as by V_MAX_F32.
FMHA_DEVICE float v_max3_f32(float a, float b, float c) { return v_max_f32(v_max_f32(a, b), c); }

// needs: gfx90a. V_PK_FMA_F32, CDNA3 ISA 12.10: a * b + c for two pairs at a time.
FMHA_DEVICE f32x2 v_pk_fma_f32(f32x2 a, f32x2 b, f32x2 c) { return __builtin_elementwise_fma(a, b, c); }

// needs: gfx90a. V_FMA_F32, CDNA3 ISA 12.11.
FMHA_DEVICE float v_fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// needs: gfx90a. V_PERM_B32, CDNA3 ISA 12.11: byte i of the result is byte `selector[i]` of {low, high}.
FMHA_DEVICE uint32_t v_perm_b32(uint32_t high, uint32_t low, uint32_t selector) {
  return __builtin_amdgcn_perm(high, low, selector);
}

#if defined(__gfx942__) || defined(__gfx950__) || defined(__gfx1201__)
// needs: gfx942. V_CVT_PK_FP8_F32, CDNA3 ISA 12.11: two values into the word's low or high half, to
// nearest even; overflow gives NaN, so clamp first. FNUZ on gfx942, OCP on gfx950 and gfx1201.
template <bool high>
FMHA_DEVICE uint32_t v_cvt_pk_fp8_f32(float a, float b, uint32_t word) {
  return __builtin_amdgcn_cvt_pk_fp8_f32(a, b, word, high);
}

// needs: gfx942. V_CVT_PK_BF8_F32, CDNA3 ISA 12.11: as V_CVT_PK_FP8_F32, for E5M2.
template <bool high>
FMHA_DEVICE uint32_t v_cvt_pk_bf8_f32(float a, float b, uint32_t word) {
  return __builtin_amdgcn_cvt_pk_bf8_f32(a, b, word, high);
}
#endif

}  // namespace fmha
