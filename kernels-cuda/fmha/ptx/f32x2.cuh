// Two f32 numbers in one instruction.
// PTX ISA, Floating Point Instructions: add, mul, fma (.f32x2)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-fma
#pragma once
#include <fmha/portable.h>

namespace fmha::ptx {

struct F32x2 {
  float low, high;
};

// needs: sm_100. Computes a * b + c of two f32 pairs. PTX ISA: fma.
FMHA_DEVICE F32x2 fma_f32x2(F32x2 a, F32x2 b, F32x2 c) {
  F32x2 d;
  asm("{ .reg .b64 a, b, c, d;\n"
      "mov.b64 a, {%2, %3}; mov.b64 b, {%4, %5}; mov.b64 c, {%6, %7};\n"
      "fma.rn.ftz.f32x2 d, a, b, c; mov.b64 {%0, %1}, d; }"
      : "=f"(d.low), "=f"(d.high)
      : "f"(a.low), "f"(a.high), "f"(b.low), "f"(b.high), "f"(c.low), "f"(c.high));
  return d;
}

// needs: sm_100. Adds two pairs of f32. PTX ISA: add.
FMHA_DEVICE F32x2 add_f32x2(F32x2 a, F32x2 b) {
  F32x2 d;
  asm("{ .reg .b64 a, b, d;\n"
      "mov.b64 a, {%2, %3}; mov.b64 b, {%4, %5};\n"
      "add.rn.ftz.f32x2 d, a, b; mov.b64 {%0, %1}, d; }"
      : "=f"(d.low), "=f"(d.high)
      : "f"(a.low), "f"(a.high), "f"(b.low), "f"(b.high));
  return d;
}

// needs: sm_100. The sums, rounded down. PTX ISA: add.
FMHA_DEVICE F32x2 add_rm_f32x2(F32x2 a, F32x2 b) {
  F32x2 d;
  asm("{ .reg .b64 a, b, d;\n"
      "mov.b64 a, {%2, %3}; mov.b64 b, {%4, %5};\n"
      "add.rm.ftz.f32x2 d, a, b; mov.b64 {%0, %1}, d; }"
      : "=f"(d.low), "=f"(d.high)
      : "f"(a.low), "f"(a.high), "f"(b.low), "f"(b.high));
  return d;
}

// needs: sm_100. Multiplies two pairs of f32. PTX ISA: mul.
FMHA_DEVICE F32x2 mul_f32x2(F32x2 a, F32x2 b) {
  F32x2 d;
  asm("{ .reg .b64 a, b, d;\n"
      "mov.b64 a, {%2, %3}; mov.b64 b, {%4, %5};\n"
      "mul.rn.ftz.f32x2 d, a, b; mov.b64 {%0, %1}, d; }"
      : "=f"(d.low), "=f"(d.high)
      : "f"(a.low), "f"(a.high), "f"(b.low), "f"(b.high));
  return d;
}

}  // namespace fmha::ptx
