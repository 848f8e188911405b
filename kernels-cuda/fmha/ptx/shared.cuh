// Loads of shared memory, and stores of matrix fragments into it.
// PTX ISA, Data Movement and Conversion Instructions: ld
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
// PTX ISA, Warp Level Matrix Multiply-Accumulate Instructions: stmatrix
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
#pragma once
#include <fmha/ptx/memory.cuh>

namespace fmha::ptx {

// needs: sm_70. Loads two f32 numbers from shared memory; `address` is a multiple of 8. PTX ISA: ld.
FMHA_DEVICE void ld_shared_v2_f32(float (&v)[2], uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(address) : "memory");
}

// needs: sm_70. Loads two words from shared memory; `address` is a multiple of 8. PTX ISA: ld.
FMHA_DEVICE void ld_shared_v2_b32(uint32_t (&v)[2], uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(address) : "memory");
}

// needs: sm_70.
// PTX ISA: ld.
FMHA_DEVICE uint32_t ld_shared_u8(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// needs: sm_70. Loads a word from shared memory; `address` is a multiple of 4. PTX ISA: ld.
FMHA_DEVICE uint32_t ld_shared_b32(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// needs: sm_70. Loads 16 bits from shared memory; `address` is a multiple of 2. PTX ISA: ld.
FMHA_DEVICE uint32_t ld_shared_u16(uint32_t address) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}

// needs: sm_70. Loads four words from shared memory; `address` is a multiple of 16. PTX ISA: ld.
FMHA_DEVICE void ld_shared_v4_b32(uint32_t (&v)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}

// needs: sm_70. Loads four f32 numbers from shared memory; `address` is a multiple of 16. PTX ISA: ld.
FMHA_DEVICE void ld_shared_v4_f32(float (&v)[4], uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(address)
               : "memory");
}

// needs: sm_70. Stores four f32 numbers to shared memory; `address` is a multiple of 16. PTX ISA: st.
FMHA_DEVICE void st_shared_v4_f32(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// needs: sm_90. Stores four 8 x 8 matrices of 16-bit elements to shared memory; lanes 8 j .. 8 j + 7 give where the
// rows of the j-th go, 16 bytes each. Lane l has of each row l / 4, columns 2 (l % 4) and the next. PTX ISA: stmatrix.
FMHA_DEVICE void stmatrix_x4(uint32_t row_address, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(v[0]),
               "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// needs: sm_90. Stores as stmatrix_x4 does, each matrix transposed; lanes 8 j .. 8 j + 7 have the addresses of the j-th
// matrix's rows. Lane l has column l / 4 of each, rows 2 (l % 4) and the next. PTX ISA: stmatrix.
FMHA_DEVICE void stmatrix_x4_trans(uint32_t row_address, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(v[0]),
               "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

}  // namespace fmha::ptx
