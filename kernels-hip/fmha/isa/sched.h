// What the compiler's scheduler may not move. No instruction comes of these.
#pragma once
#include <fmha/isa/hip.h>

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

// needs: gfx90a. The same for what is equal in all lanes.
// https://llvm.org/docs/AMDGPUUsage.html#amdgpu-inline-assembly
FMHA_DEVICE void computed_here_once(uint32_t& x) { asm volatile("" : "+s"(x)); }

}  // namespace fmha
