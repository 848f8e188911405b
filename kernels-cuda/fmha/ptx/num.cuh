// Conversions and the special functions.
// PTX ISA, Floating Point Instructions: ex2, lg2, rcp
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
// PTX ISA, Data Movement and Conversion Instructions: cvt
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
#pragma once
#include <fmha/spec.h>

namespace fmha::ptx {

// needs: sm_50. 2 to the power x, with a relative error of 2^-22; 0 below 2^-126. PTX ISA: ex2.
FMHA_DEVICE float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// needs: sm_50.
// PTX ISA: lg2.
FMHA_DEVICE float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// needs: sm_50.
// PTX ISA: rcp.
FMHA_DEVICE float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// needs: sm_80. The larger of two numbers; NaN if either is NaN. PTX ISA: max.
FMHA_DEVICE float max_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// needs: sm_100. The largest of three numbers; NaN if any is NaN. PTX ISA: max.
FMHA_DEVICE float max3_nan(float a, float b, float c) {
#if __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 9
  return max_nan(max_nan(a, b), c);  // CUDA 12.8's ptxas has no such form for sm_100a
#else
  float d;
  asm("max.NaN.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
#endif
}

// needs: sm_50. The product, rounded up.
// PTX ISA: mul.
FMHA_DEVICE float mul_rp(float x, float y) {
  float z;
  asm("mul.rp.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// needs: sm_50. x * y + z, rounded up.
// PTX ISA: fma.
FMHA_DEVICE float fma_rp(float x, float y, float z) {
  float w;
  asm("fma.rp.f32 %0, %1, %2, %3;" : "=f"(w) : "f"(x), "f"(y), "f"(z));
  return w;
}

// needs: sm_50. The sum of two numbers. Subnormal numbers become zeros, as `red.add.f32` does in global memory. PTX
// ISA: add.
FMHA_DEVICE float add_rn_ftz(float x, float y) {
  float z;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// needs: sm_50. The sum, rounded down.
// PTX ISA: add.
FMHA_DEVICE float add_rm_ftz(float x, float y) {
  float z;
  asm("add.rm.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// needs: sm_50. Adds `y` to `x` where a >= b.
// PTX ISA: setp, add.
FMHA_DEVICE void add_if_ge(float& x, float y, uint32_t a, uint32_t b) {
  asm("{ .reg .pred p; setp.ge.u32 p, %1, %2; @p add.rn.f32 %0, %0, %3; }" : "+f"(x) : "r"(a), "r"(b), "f"(y));
}

// needs: sm_50. `word` rotated to the left.
// PTX ISA: shf.
FMHA_DEVICE uint32_t rotate_left(uint32_t word, uint32_t bits) {
  uint32_t rotated;
  asm("shf.l.wrap.b32 %0, %1, %1, %2;" : "=r"(rotated) : "r"(word), "r"(bits));
  return rotated;
}

// needs: sm_90. Rounds two numbers to nearest even and packs them, `low` in the low half. PTX ISA: cvt.
template <DType dtype>
FMHA_DEVICE uint32_t cvt_rn_x2(float low, float high) {
  static_assert(dtype == DType::F16 || dtype == DType::Bf16, "cvt_rn_x2 packs 16-bit types");
  uint32_t packed;
  if constexpr (dtype == DType::F16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// needs: sm_53. The f32 values of a packed pair of f16.
// PTX ISA: cvt.
FMHA_DEVICE void unpack_f16x2(uint32_t packed, float& low, float& high) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(low), "=f"(high)
      : "r"(packed));
}

// needs: sm_50. The f32 values of a packed pair of 16-bit numbers.
// PTX ISA: cvt (f16), prmt (bf16, the upper half of an f32).
template <DType dtype>
FMHA_DEVICE void unpack_x2(uint32_t packed, float& low, float& high) {
  static_assert(dtype == DType::F16 || dtype == DType::Bf16, "unpack_x2 takes 16-bit types");
  if constexpr (dtype == DType::F16) {
    unpack_f16x2(packed, low, high);
  } else {
    low = float_of(packed << 16);
    high = float_of(packed & 0xffff0000u);
  }
}

}  // namespace fmha::ptx
