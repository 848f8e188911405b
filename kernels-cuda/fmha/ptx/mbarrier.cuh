// mbarrier: a barrier in shared memory, completed phase after phase by arrivals of threads and bytes of TMA.
// PTX ISA, Parallel Synchronization and Communication Instructions: mbarrier
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
#pragma once
#include <fmha/ptx/memory.cuh>

namespace fmha::ptx {

struct alignas(8) Barrier {
  uint64_t state;
};

// needs: sm_80. Initialises a barrier whose phases complete after `arrivals` arrivals. PTX ISA: mbarrier.init.
FMHA_DEVICE void mbarrier_init(Barrier& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals));
}

// needs: sm_90. Makes this thread's earlier barrier initialisations visible to the cluster and to TMA. PTX ISA:
// fence.mbarrier_init.
FMHA_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// needs: sm_90. Arrives, and announces `bytes` that TMA will deliver in this phase.
// PTX ISA: mbarrier.arrive, expect-tx operation.
FMHA_DEVICE void mbarrier_arrive_expect_tx(Barrier& barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// needs: sm_90. Arrives if `condition` holds, predicated in the instruction: a branch before an aligned wgmma could
// leave lanes unconverged.
// PTX ISA: mbarrier.arrive.
FMHA_DEVICE void mbarrier_arrive_if(Barrier& barrier, bool condition) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(shared_address(&barrier)),
      "r"(int(condition))
      : "memory");
}

// needs: sm_80. Makes the barrier count an arrival of this thread once all copies that the thread has begun by cp.async
// have landed. PTX ISA: cp.async.mbarrier.arrive.
FMHA_DEVICE void cp_async_mbarrier_arrive(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// needs: sm_90. Whether the phase of this parity is complete.
// PTX ISA: mbarrier.test_wait.
FMHA_DEVICE bool mbarrier_test_parity(Barrier& barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{ .reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p; }"
      : "=r"(complete)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return complete;
}

// needs: sm_90. Waits until the phase of this parity is complete.
// PTX ISA: mbarrier.try_wait.
FMHA_DEVICE void mbarrier_wait_parity(Barrier& barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "wait_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra wait_%=; }" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace fmha::ptx
