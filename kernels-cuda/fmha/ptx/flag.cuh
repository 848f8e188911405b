// Numbers in global memory by which CTAs tell each other how far they are.
// PTX ISA, Data Movement and Conversion Instructions: ld
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
// PTX ISA, Parallel Synchronization and Communication Instructions: red, membar / fence
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
#pragma once
#include <fmha/portable.h>

namespace fmha::ptx {

// needs: sm_70. What came before the releases that gave this value is seen by this thread.
// PTX ISA: ld.
FMHA_DEVICE int32_t ld_acquire_gpu(const int32_t* address) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// needs: sm_70. What this thread has done before is seen by who acquires.
// PTX ISA: red.
FMHA_DEVICE void red_release_gpu_add(int32_t* address, int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// needs: sm_90. Orders bulk copies and ordinary accesses of global memory, either way.
// PTX ISA: fence.proxy.async.
FMHA_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace fmha::ptx
