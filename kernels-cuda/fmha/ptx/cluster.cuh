// Clusters: CTAs that reach each other's shared memory.
// PTX ISA, Parallel Synchronization and Communication Instructions: barrier.cluster, mbarrier.arrive
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
#pragma once
#include <fmha/ptx/mbarrier.cuh>

namespace fmha::ptx {

// needs: sm_90. Waits for every thread of the cluster that has not exited. Not the aligned form: lanes of
// the load role come one by one.
// PTX ISA: barrier.cluster.
FMHA_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// needs: sm_90. Arrives at the same barrier of CTA `rank` of the cluster. No semantics are named:
// `.release.cluster` makes ptxas flush to the whole GPU.
// PTX ISA: mapa, mbarrier.arrive.
FMHA_DEVICE void mbarrier_arrive_at_if(Barrier& barrier, uint32_t rank, bool condition) {
  asm volatile(
      "{ .reg .pred p; .reg .b32 remote; setp.ne.b32 p, %2, 0;\n"
      "@p mapa.shared::cluster.u32 remote, %0, %1;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(&barrier)),
      "r"(rank), "r"(int(condition))
      : "memory");
}

}  // namespace fmha::ptx
