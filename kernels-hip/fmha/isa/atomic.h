// Read-modify-write operations.
#pragma once
#include <fmha/isa/hip.h>

namespace fmha {

// needs: gfx90a. DS_ADD_U32, CDNA3 ISA 12.12: adds to a word of LDS. No order is kept between lanes and waves.
FMHA_DEVICE void ds_add_u32(int32_t FMHA_LDS* to, int32_t x) {
  __hip_atomic_fetch_add(to, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

// needs: gfx90a. GLOBAL_ATOMIC_ADD_F32, CDNA3 ISA 12.15: adds to a number in memory. No order is kept between lanes and
// workgroups.
FMHA_DEVICE void global_atomic_add_f32(float* to, float x) {
  asm volatile("global_atomic_add_f32 %0, %1, off" ::"v"(to), "v"(x) : "memory");
}

}  // namespace fmha
