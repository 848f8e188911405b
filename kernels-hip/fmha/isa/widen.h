// FP8 to f32.
#pragma once
#include <fmha/isa/hip.h>

namespace fmha {

#if defined(__gfx942__) || defined(__gfx950__) || defined(__gfx1201__)
// needs: gfx942. V_CVT_F32_FP8, CDNA3 ISA 12.8: byte `at` of a word. FNUZ on gfx942, OCP on gfx950 and gfx1201.
template <int at>
FMHA_DEVICE float v_cvt_f32_fp8(uint32_t word) {
  return __builtin_amdgcn_cvt_f32_fp8(int(word), at);
}

// needs: gfx942. V_CVT_F32_BF8, CDNA3 ISA 12.8: as V_CVT_F32_FP8, for E5M2.
template <int at>
FMHA_DEVICE float v_cvt_f32_bf8(uint32_t word) {
  return __builtin_amdgcn_cvt_f32_bf8(int(word), at);
}
#endif

}  // namespace fmha
