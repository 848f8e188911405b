// Addresses, predicated stores, proxy fences.
// PTX ISA, Data Movement and Conversion Instructions: st, ld
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
// PTX ISA, Parallel Synchronization and Communication Instructions: membar / fence
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
#pragma once
#include <fmha/portable.h>

namespace fmha::ptx {

// A generic pointer into shared memory as the 32-bit address that instructions take.
// PTX ISA: Generic Addressing.
FMHA_DEVICE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// needs: sm_50. Prefetches the 128-byte line of an address
// to the L1; nothing waits for it. PTX ISA: prefetch.
FMHA_DEVICE void prefetch_l1(const void* address) { asm volatile("prefetch.global.L1 [%0];" ::"l"(address)); }

// Stores if `condition` holds, predicated in the instruction: a divergent last store in a persistent loop can leave
// lanes unconverged at the next aligned wgmma. needs: sm_70. PTX ISA: st.
FMHA_DEVICE void st_global_f32_if(float* address, float value, bool condition) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.f32 [%0], %1; }" ::"l"(address), "f"(value),
               "r"(int(condition))
               : "memory");
}

// needs: sm_70. Stores a word to shared memory; `address` is a multiple of 4. PTX ISA: st.
FMHA_DEVICE void st_shared_b32(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// needs: sm_70. Adds to a number in global memory atomically; concurrent additions happen in any order. PTX ISA: red.
FMHA_DEVICE void red_global_add_f32(float* address, float a) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(a) : "memory");
}

// needs: sm_90. Adds to four numbers, each by itself atomic; `address` is a multiple of 16.
// PTX ISA: red.
FMHA_DEVICE void red_global_add_v4_f32(float* address, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// needs: sm_90. red_global_add_v4_f32 if `condition` holds, predicated in the instruction: a branch before an aligned
// wgmma could leave lanes unconverged.
// PTX ISA: red.
FMHA_DEVICE void red_global_add_v4_f32_if(float* address, float a, float b, float c, float d, bool condition) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0;\n"
      "@p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4}; }" ::"l"(address), "f"(a), "f"(b), "f"(c), "f"(d),
      "r"(int(condition))
      : "memory");
}

// needs: sm_70. Stores four numbers to global memory; `address` is a multiple of 16. PTX ISA: st.
FMHA_DEVICE void st_global_v4_f32(float* address, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// needs: sm_70. Stores two numbers if `condition` holds; `address` is a multiple of 8. PTX ISA: st.
FMHA_DEVICE void st_global_v2_f32_if(float* address, float a, float b, bool condition) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.v2.f32 [%0], {%1, %2}; }" ::"l"(address), "f"(a), "f"(b),
               "r"(int(condition))
               : "memory");
}

// needs: sm_70.
// PTX ISA: st.
FMHA_DEVICE void st_global_u16_if(uint16_t* address, uint16_t value, bool condition) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.u16 [%0], %1; }" ::"l"(address), "h"(value),
               "r"(int(condition))
               : "memory");
}

// needs: sm_70. Stores a word if `condition` holds; `address` is a multiple of 4. PTX ISA: st.
FMHA_DEVICE void st_global_b32_if(void* address, uint32_t value, bool condition) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b32 [%0], %1; }" ::"l"(address), "r"(value),
               "r"(int(condition))
               : "memory");
}

// needs: sm_70. Stores the low byte of `value` if `condition` holds. PTX ISA: st.
FMHA_DEVICE void st_global_u8_if(uint8_t* address, uint16_t value, bool condition) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.u8 [%0], %1; }" ::"l"(address), "h"(value),
               "r"(int(condition))
               : "memory");
}

// needs: sm_70. Stores four words if `condition` holds; `address` is a multiple of 16. PTX ISA: st.
FMHA_DEVICE void st_global_v4_b32_if(void* address, const uint32_t (&v)[4], bool condition) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"l"(address),
               "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(int(condition))
               : "memory");
}

// needs: sm_70.
// PTX ISA: st.
FMHA_DEVICE void st_shared_b32_if(uint32_t address, uint32_t value, bool condition) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.shared.b32 [%0], %1; }" ::"r"(address), "r"(value),
               "r"(int(condition))
               : "memory");
}

// needs: sm_70. Loads 16 bytes that nothing writes while the kernel runs; `from` is a multiple of 16. PTX ISA:
// ld.global.nc.
FMHA_DEVICE void ld_global_v4(uint32_t* v, const void* from) {
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(from));
}

// needs: sm_70. Loads four numbers, at a multiple of 16 bytes; gives zeros where `condition` is false. PTX ISA: ld.
FMHA_DEVICE void ld_global_v4_f32_if(float (&v)[4], const float* from, bool condition) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
      "@p ld.global.v4.f32 {%0, %1, %2, %3}, [%4]; }"
      : "=&f"(v[0]), "=&f"(v[1]), "=&f"(v[2]), "=&f"(v[3])
      : "l"(from), "r"(int(condition))
      : "memory");
}

// needs: sm_70. Loads four numbers, at a multiple of 16 bytes, that this thread may have written. PTX ISA: ld.
FMHA_DEVICE void ld_global_v4_f32(float (&v)[4], const float* from) {
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "l"(from)
               : "memory");
}

// needs: sm_70. Loads a number that nothing writes while the kernel runs; gives 0 where `condition` is false. PTX ISA:
// ld.global.nc.
FMHA_DEVICE float ld_global_f32_if(const void* from, bool condition) {
  float x;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.f32 %0, [%1]; }"
               : "=f"(x)
               : "l"(from), "r"(int(condition)));
  return x;
}

// needs: sm_70. Reads two bytes if `condition` holds;
// otherwise returns 0. PTX ISA: ld.global.nc.
FMHA_DEVICE uint32_t ld_global_u16_if(const void* from, bool condition) {
  uint32_t x;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.u16 %0, [%1]; }"
               : "=r"(x)
               : "l"(from), "r"(int(condition)));
  return x;
}

// needs: sm_70. Reads four bytes at a multiple of 4 if
// `condition` holds; otherwise returns 0. PTX ISA: ld.global.nc.
FMHA_DEVICE uint32_t ld_global_b32_if(const void* from, bool condition) {
  uint32_t x;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.b32 %0, [%1]; }"
               : "=r"(x)
               : "l"(from), "r"(int(condition)));
  return x;
}

// needs: sm_70. Reads eight bytes at a multiple of 8 if `condition` holds; else gives 0.
// PTX ISA: ld.global.nc.
FMHA_DEVICE void ld_global_v2_b32_if(uint32_t (&v)[2], const void* from, bool condition) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; @p ld.global.nc.v2.b32 {%0, %1}, [%2]; }"
      : "=&r"(v[0]), "=&r"(v[1])
      : "l"(from), "r"(int(condition)));
}

// needs: sm_70. Reads sixteen bytes at a multiple of 16 if `condition` holds; else gives 0.
// PTX ISA: ld.global.nc.
FMHA_DEVICE void ld_global_v4_b32_if(uint32_t (&v)[4], const void* from, bool condition) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
      "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
      : "=&r"(v[0]), "=&r"(v[1]), "=&r"(v[2]), "=&r"(v[3])
      : "l"(from), "r"(int(condition)));
}

// needs: sm_70. Stores 16 zero bytes to shared memory; `address` is a multiple of 16. PTX ISA: st.
FMHA_DEVICE void st_shared_v4_zero(uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// needs: sm_90. Orders this thread's ordinary writes to shared memory before the tensor cores' and
// TMA's reads that follow.
// PTX ISA: fence.proxy.async.
FMHA_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace fmha::ptx
