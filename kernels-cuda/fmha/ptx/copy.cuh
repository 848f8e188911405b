// Copies from global to shared memory by ordinary threads.
// PTX ISA, Data Movement and Conversion Instructions: cp.async
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
#pragma once
#include <fmha/ptx/memory.cuh>

namespace fmha::ptx {

// needs: sm_80. Copies `bytes` (4, 8 or 16) between addresses that are multiples of `bytes`. Where `there` is less than
// `bytes`, only the first `there` are read and the rest become zeros. PTX ISA: cp.async.
template <int bytes>
FMHA_DEVICE void cp_async(uint32_t to, const void* from, uint32_t there) {
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(bytes), "r"(there)
                 : "memory");
  }
}

// needs: sm_80. This thread's copies since the last commit become a group.
// PTX ISA: cp.async.commit_group.
FMHA_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// needs: sm_80. Waits until at most `pending` of this thread's groups are unfinished.
// PTX ISA: cp.async.wait_group.
template <int pending>
FMHA_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// needs: sm_70.
// PTX ISA: st.
FMHA_DEVICE void st_shared_v4(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// needs: sm_70.
// PTX ISA: st.
FMHA_DEVICE void st_shared_u16(uint32_t address, uint16_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

// needs: sm_70. Stores the low byte of `value`. PTX ISA: st.
FMHA_DEVICE void st_shared_u8(uint32_t address, uint16_t value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

}  // namespace fmha::ptx
