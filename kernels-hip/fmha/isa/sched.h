// Barriers for the compiler's optimiser and scheduler. They emit no instruction.
#pragma once
#include <fmha/isa/lane.h>

namespace fmha {

// needs: gfx90a. SCHED_BARRIER: the compiler moves no instruction across it.
// https://llvm.org/docs/AMDGPUUsage.html#llvm-ir-intrinsics
FMHA_DEVICE void sched_barrier() { __builtin_amdgcn_sched_barrier(0); }

// needs: gfx90a. An empty asm that reads and writes `x` in a VGPR: the value becomes opaque to the optimiser. What it
// is made of is computed before this point, and nothing that depends on it is hoisted above.
// https://llvm.org/docs/AMDGPUUsage.html#amdgpu-inline-assembly
template <class T>
FMHA_DEVICE void opaque_in_vgpr(T& x) {
  asm volatile("" : "+v"(x));
}

// needs: gfx90a. The thread's index, opaque: what depends on it is recomputed at each use instead of being kept in
// registers across a loop.
// https://llvm.org/docs/AMDGPUUsage.html#initial-kernel-execution-state
FMHA_DEVICE int opaque_thread_idx() {
  int thread = thread_idx();
  opaque_in_vgpr(thread);
  return thread;
}

// needs: gfx90a. Makes a wave-uniform value in an SGPR opaque, as opaque_in_vgpr does for a VGPR. Clang does not see
// that every such value is uniform, and then cannot copy it.
// https://llvm.org/docs/AMDGPUUsage.html#amdgpu-inline-assembly
FMHA_DEVICE void opaque_in_sgpr(uint32_t& x) {
  x = uint32_t(v_readfirstlane_b32(int(x)));
  asm volatile("" : "+s"(x));
}

// needs: gfx90a. Returns the kernel's argument struct behind an opaque pointer. Its fields are loaded again (by S_LOAD,
// from constant memory) and not kept in registers from earlier loads.
// https://llvm.org/docs/AMDGPUUsage.html#llvm-ir-intrinsics
template <class Params>
FMHA_DEVICE const Params& reload_params() {
  auto p = (const Params FMHA_CONSTANT*)__builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(p));
  return *(const Params*)p;
}

}  // namespace fmha
