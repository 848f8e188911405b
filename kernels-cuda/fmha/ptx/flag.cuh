// Numbers in global memory by which CTAs announce their progress.
// PTX ISA, Data Movement and Conversion Instructions: ld
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
// PTX ISA, Parallel Synchronization and Communication Instructions: red, membar / fence
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
#pragma once
#include <fmha/portable.h>

namespace fmha::ptx {

// needs: sm_70. Reads a value; memory that was written before the releases of that value is then visible to this
// thread.
// PTX ISA: ld.
FMHA_DEVICE int32_t ld_acquire_gpu(const int32_t* address) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// needs: sm_70. Reads a value as ld_acquire_gpu does, also after releases by other devices and by the host's streams.
// PTX ISA: ld.
FMHA_DEVICE uint32_t ld_acquire_sys(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// needs: sm_70. Nanoseconds of the device's clock, which some devices advance by a microsecond at a time.
// PTX ISA, Special Registers: %globaltimer
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-globaltimer
FMHA_DEVICE uint64_t globaltimer() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

// needs: sm_70. Lets other warps run for about so many nanoseconds.
// PTX ISA, Miscellaneous Instructions: nanosleep
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-nanosleep
FMHA_DEVICE void nanosleep(uint32_t nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }

// needs: sm_70. Adds to a value; memory that this thread wrote before is visible to a thread that acquires the value.
// PTX ISA: red.
FMHA_DEVICE void red_release_gpu_add(int32_t* address, int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// needs: sm_90. Orders bulk copies and ordinary accesses of global memory, either way.
// PTX ISA: fence.proxy.async.
FMHA_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace fmha::ptx
