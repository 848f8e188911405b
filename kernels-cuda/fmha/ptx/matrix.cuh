// Matrix fragments of one warp.
// PTX ISA, Warp Level Matrix Multiply-Accumulate Instructions: ldmatrix
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
// PTX ISA, Warp Level Matrix Multiply-Accumulate Instructions: mma
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
#pragma once
#include <fmha/spec.h>

namespace fmha::ptx {

// needs: sm_75. Four 8 x 8 matrices of 16-bit elements; lanes 8 j .. 8 j + 7 give the rows of the
// j-th, 16 bytes each. Lane l receives of each row l / 4, columns 2 (l % 4) and the next.
// PTX ISA: ldmatrix.
FMHA_DEVICE void ldmatrix_x4(uint32_t (&v)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(row_address)
               : "memory");
}

// needs: sm_75. ldmatrix_x4 with each matrix transposed: lane l receives
// column l / 4 of each, rows 2 (l % 4) and the next. PTX ISA: ldmatrix.
FMHA_DEVICE void ldmatrix_x4_trans(uint32_t (&v)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(row_address)
               : "memory");
}

// needs: sm_80. d += A B of 16 x 16 and 16 x 8, f32 sums. Lane l has of A rows l / 4 (a[0], a[2]) and that + 8,
// columns 2 (l % 4) and the next (a[0], a[1]) and those + 8; of B column l / 4, rows likewise; of D rows as of
// A, columns 2 (l % 4) and the next.
// PTX ISA: mma.m16n8k16.
template <DType dtype>
FMHA_DEVICE void mma_m16n8k16(float* d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(dtype == DType::F16 || dtype == DType::Bf16, "mma_m16n8k16 takes 16-bit types");
  if constexpr (dtype == DType::F16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// needs: sm_89. d += A B of 16 x 32 and 32 x 8 in OCP FP8, f32 sums. Lane l has of A rows l / 4 (a[0], a[2]) and that
// + 8, columns 4 (l % 4) and the three after (a[0], a[1]) and those + 16; of B column l / 4, rows likewise; of D as
// of the 16-bit product.
// PTX ISA: mma.m16n8k32.
template <DType dtype>
FMHA_DEVICE void mma_m16n8k32(float* d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(dtype == DType::E4m3Fn || dtype == DType::E5m2, "mma_m16n8k32 takes OCP types");
  if constexpr (dtype == DType::E4m3Fn) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

}  // namespace fmha::ptx
