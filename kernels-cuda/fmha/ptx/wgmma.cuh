// Warpgroup matrix products: ordering. The products themselves are rendered for the shapes that an
// entry uses.
// PTX ISA, Asynchronous Warpgroup Level Matrix Instructions: wgmma.fence, wgmma.commit_group, wgmma.wait_group
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-fence
#pragma once
#include <fmha/ptx/wgmma_shapes.cuh>

namespace fmha::ptx {

// needs: sm_90a. Orders this thread's register accesses before the products that follow.
// PTX ISA: wgmma.fence.
FMHA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// needs: sm_90a. The products since the last commit become a group.
// PTX ISA: wgmma.commit_group.
FMHA_DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// needs: sm_90a. Waits until at most `pending` groups are unfinished.
// PTX ISA: wgmma.wait_group.
template <int pending>
FMHA_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// needs: sm_90a. Emits no instruction. The compiler treats these registers as written here, so it moves no read of them
// before the wait that this call follows. PTX ISA: wgmma.wait_group.
template <int n>
FMHA_DEVICE void written_here(float (&accumulators)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}

}  // namespace fmha::ptx
