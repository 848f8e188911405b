// What the compiler's scheduler may not move. No instruction comes of these.
#pragma once
#include <fmha/isa/lane.h>

namespace fmha {

// needs: gfx90a. SCHED_BARRIER: nothing is scheduled across.
// https://llvm.org/docs/AMDGPUUsage.html#llvm-ir-intrinsics
FMHA_DEVICE void sched_barrier() { __builtin_amdgcn_sched_barrier(0); }

// needs: gfx90a. An empty statement that reads and writes `x`: what comes before is computed before, and
// nothing that follows from `x` is computed ahead.
// https://llvm.org/docs/AMDGPUUsage.html#amdgpu-inline-assembly
template <class T>
FMHA_DEVICE void computed_here(T& x) {
  asm volatile("" : "+v"(x));
}

// needs: gfx90a. What follows from it is computed where it stands: a loop around it keeps no registers of it.
// https://llvm.org/docs/AMDGPUUsage.html#initial-kernel-execution-state
FMHA_DEVICE int thread_idx_here() {
  int thread = thread_idx();
  computed_here(thread);
  return thread;
}

// needs: gfx90a. The same for what is equal in all lanes.
// https://llvm.org/docs/AMDGPUUsage.html#amdgpu-inline-assembly
FMHA_DEVICE void computed_here_once(uint32_t& x) { asm volatile("" : "+s"(x)); }

// needs: gfx90a. The kernel's one argument: what is read through this reference is read here, not kept in registers
// from an earlier time. S_LOAD, not a load of each lane, because it lies in constant memory.
// https://llvm.org/docs/AMDGPUUsage.html#llvm-ir-intrinsics
template <class Params>
FMHA_DEVICE const Params& params_read_anew() {
  auto p = (const Params FMHA_CONSTANT*)__builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(p));
  return *(const Params*)p;
}

}  // namespace fmha
