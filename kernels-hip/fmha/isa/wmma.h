// RDNA's matrix instructions: D = A B + C, 16 x 16 x 16, over a wave of 32. Register layouts are in mma/rdna.h.
#pragma once
#include <fmha/isa/hip.h>

namespace fmha {

using f32x8 = Vec<float, 8>;
using u32x8 = Vec<uint32_t, 8>;
using f16x16 = Vec<f16, 16>;
using s16x8 = Vec<short, 8>;
using s16x16 = Vec<short, 16>;
using s32x2 = Vec<int, 2>;

#if defined(__gfx1100__)
// needs: gfx1100. V_WMMA_F32_16X16X16_F16, RDNA3 ISA 7.9; lanes 16 to 31 of A and B repeat lanes 0 to 15.
FMHA_DEVICE f32x8 v_wmma_f32_16x16x16_f16(f16x16 a, f16x16 b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c);
}

// needs: gfx1100. V_WMMA_F32_16X16X16_BF16, RDNA3 ISA 7.9; lanes 16 to 31 of A and B repeat lanes 0 to 15.
FMHA_DEVICE f32x8 v_wmma_f32_16x16x16_bf16(s16x16 a, s16x16 b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c);
}
#elif defined(__gfx1201__)
// needs: gfx1201. V_WMMA_F32_16X16X16_F16, RDNA4 ISA 7.12.
FMHA_DEVICE f32x8 v_wmma_f32_16x16x16_f16(f16x8 a, f16x8 b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c);
}

// needs: gfx1201. V_WMMA_F32_16X16X16_BF16, RDNA4 ISA 7.12.
FMHA_DEVICE f32x8 v_wmma_f32_16x16x16_bf16(s16x8 a, s16x8 b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(a, b, c);
}

// needs: gfx1201. V_WMMA_F32_16X16X16_FP8_FP8, RDNA4 ISA 7.12: OCP.
FMHA_DEVICE f32x8 v_wmma_f32_16x16x16_fp8_fp8(s32x2 a, s32x2 b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(a, b, c);
}

// needs: gfx1201. V_WMMA_F32_16X16X16_BF8_BF8, RDNA4 ISA 7.12: OCP.
FMHA_DEVICE f32x8 v_wmma_f32_16x16x16_bf8_bf8(s32x2 a, s32x2 b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_bf8_bf8_w32_gfx12(a, b, c);
}
#endif

#if defined(__gfx1100__) || defined(__gfx1201__)
// needs: gfx1100. V_PERMLANEX16_B32, RDNA3 ISA 16.11: the value of the same lane in the wave's other half.
FMHA_DEVICE uint32_t v_permlanex16_b32(uint32_t x) {
  return __builtin_amdgcn_permlanex16(x, x, 0x76543210, 0xfedcba98, false, false);
}
#endif

}  // namespace fmha
