// One matrix instruction a kernel: lane l loads its operands from a[l], b[l], c[l] and stores d[l].
typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x8 __attribute__((ext_vector_type(8)));
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));
typedef int i32x4 __attribute__((ext_vector_type(4)));
typedef int i32x8 __attribute__((ext_vector_type(8)));
typedef int i32x16 __attribute__((ext_vector_type(16)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef float f32x32 __attribute__((ext_vector_type(32)));

#define MFMA(name, AB, CD, call)                                                                                  \
  extern "C" __attribute__((global)) void name(const AB *pa, const AB *pb, const CD *pc, CD *pd) {                \
    int l = __builtin_amdgcn_workitem_id_x();                                                                     \
    AB a = pa[l], b = pb[l];                                                                                      \
    CD c = pc[l];                                                                                                 \
    pd[l] = call;                                                                                                 \
  }

MFMA(f32_32x32x2_f32, float, f32x16, __builtin_amdgcn_mfma_f32_32x32x2f32(a, b, c, 0, 0, 0))
MFMA(f32_16x16x4_f32, float, f32x4, __builtin_amdgcn_mfma_f32_16x16x4f32(a, b, c, 0, 0, 0))
MFMA(f32_32x32x8_f16, f16x4, f32x16, __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, c, 0, 0, 0))
MFMA(f32_16x16x16_f16, f16x4, f32x4, __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0))
MFMA(f32_32x32x4_f16, f16x4, f32x32, __builtin_amdgcn_mfma_f32_32x32x4f16(a, b, c, 0, 0, 0))
MFMA(f32_4x4x4_f16, f16x4, f32x4, __builtin_amdgcn_mfma_f32_4x4x4f16(a, b, c, 0, 0, 0))
MFMA(f32_32x32x8_bf16, s16x4, f32x16, __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, b, c, 0, 0, 0))
MFMA(f32_16x16x16_bf16, s16x4, f32x4, __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0))

#ifndef __gfx90a__
MFMA(f32_32x32x16_fp8_fp8, long, f32x16, __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(a, b, c, 0, 0, 0))
MFMA(f32_32x32x16_fp8_bf8, long, f32x16, __builtin_amdgcn_mfma_f32_32x32x16_fp8_bf8(a, b, c, 0, 0, 0))
MFMA(f32_16x16x32_fp8_fp8, long, f32x4, __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(a, b, c, 0, 0, 0))
MFMA(f32_16x16x32_bf8_bf8, long, f32x4, __builtin_amdgcn_mfma_f32_16x16x32_bf8_bf8(a, b, c, 0, 0, 0))
MFMA(i32_32x32x16_i8, long, i32x16, __builtin_amdgcn_mfma_i32_32x32x16_i8(a, b, c, 0, 0, 0))
MFMA(i32_16x16x32_i8, long, i32x4, __builtin_amdgcn_mfma_i32_16x16x32_i8(a, b, c, 0, 0, 0))
#endif
#ifdef __gfx950__
MFMA(f32_32x32x16_f16, f16x8, f32x16, __builtin_amdgcn_mfma_f32_32x32x16_f16(a, b, c, 0, 0, 0))
MFMA(f32_16x16x32_f16, f16x8, f32x4, __builtin_amdgcn_mfma_f32_16x16x32_f16(a, b, c, 0, 0, 0))
MFMA(f32_32x32x16_bf16, bf16x8, f32x16, __builtin_amdgcn_mfma_f32_32x32x16_bf16(a, b, c, 0, 0, 0))
MFMA(f32_16x16x32_bf16, bf16x8, f32x4, __builtin_amdgcn_mfma_f32_16x16x32_bf16(a, b, c, 0, 0, 0))
// Scales 2^1 for A and 2^-2 for B: E8M0 bytes 128 and 125, in the lowest byte.
MFMA(f32_32x32x64_f8f6f4, i32x8, f32x16, __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, b, c, 0, 0, 0, 128, 0, 125))
MFMA(f32_16x16x128_f8f6f4, i32x8, f32x4, __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, c, 0, 0, 0, 128, 0, 125))
#endif
