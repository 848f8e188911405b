// Matrix fragments of one warp.
// PTX ISA, Warp Level Matrix Multiply-Accumulate Instructions: ldmatrix
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
#pragma once
#include <fmha/portable.h>

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

}  // namespace fmha::ptx
