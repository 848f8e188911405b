// FP8 to f32.
#pragma once
#include <fmha/isa/hip.h>
#include <fmha/num.h>

namespace fmha {

#if defined(__gfx942__) || defined(__gfx950__)
// needs: gfx942. V_CVT_F32_FP8, CDNA3 ISA 12.8: byte `at` of a word. FNUZ on gfx942, OCP on gfx950.
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

// Byte `at` of a word, by the instruction where the architecture has the type, else by its bits.
template <DType dtype, int at>
FMHA_DEVICE float widened(uint32_t word) {
  static_assert(is_fp8(dtype), "wider types have no bytes to widen");
#if defined(__gfx942__)
  if constexpr (dtype == DType::E4m3Fnuz) return v_cvt_f32_fp8<at>(word);
  if constexpr (dtype == DType::E5m2Fnuz) return v_cvt_f32_bf8<at>(word);
#elif defined(__gfx950__)
  if constexpr (dtype == DType::E4m3Fn) return v_cvt_f32_fp8<at>(word);
  if constexpr (dtype == DType::E5m2) return v_cvt_f32_bf8<at>(word);
#endif
  return decode(format_of(dtype), word >> (8 * at) & 0xff);
}

}  // namespace fmha
