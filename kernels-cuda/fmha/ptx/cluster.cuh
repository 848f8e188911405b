// Clusters: CTAs that reach each other's shared memory.
// PTX ISA, Parallel Synchronization and Communication Instructions: barrier.cluster, mbarrier.arrive
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
#pragma once
#include <fmha/ptx/mbarrier.cuh>

namespace fmha::ptx {

// needs: sm_90. Emits no instruction. It makes the compiler treat `address` as a new value, so that nothing derived
// from it is kept in registers across loops. In a cluster an address of shared memory is no constant. PTX ISA: mapa.
FMHA_DEVICE uint32_t made_here(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

// needs: sm_90. Waits for every thread of the cluster that has not exited. The aligned form is not used, since lanes of
// the load role arrive one by one. PTX ISA: barrier.cluster.
FMHA_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// needs: sm_90. The first half of `cluster_sync`: arrives.
// PTX ISA: barrier.cluster.
FMHA_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
// needs: sm_90. The second half of `cluster_sync`: waits for every thread of the cluster to have arrived.
// PTX ISA: barrier.cluster.
FMHA_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// needs: sm_90. Arrives at the same barrier of CTA `rank` of the cluster. No memory order is named, since
// `.release.cluster` makes ptxas emit a flush for the whole GPU. PTX ISA: mapa, mbarrier.arrive.
FMHA_DEVICE void mbarrier_arrive_at_if(Barrier& barrier, uint32_t rank, bool condition) {
  asm volatile(
      "{ .reg .pred p; .reg .b32 remote; setp.ne.b32 p, %2, 0;\n"
      "@p mapa.shared::cluster.u32 remote, %0, %1;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(&barrier)),
      "r"(rank), "r"(int(condition))
      : "memory");
}

// needs: sm_90. Copies from this CTA's shared memory to that of CTA `rank`; `to` and the barrier that counts the
// bytes are addresses of this CTA. `bytes` and both addresses are multiples of 16.
// PTX ISA: mapa, cp.async.bulk.
FMHA_DEVICE void cp_async_bulk_at(uint32_t to, uint32_t rank, uint32_t from, uint32_t bytes, Barrier& barrier) {
  asm volatile(
      "{ .reg .b32 remote, bar;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mapa.shared::cluster.u32 bar, %4, %1;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [remote], [%2], %3, [bar]; }" ::"r"(to),
      "r"(rank), "r"(from), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

// needs: sm_90. Arrives at a barrier of any CTA of the cluster, by its address there, and announces `bytes` that TMA
// will deliver for it in this phase.
// PTX ISA: mbarrier.arrive, expect-tx operation.
FMHA_DEVICE void mbarrier_arrive_expect_tx_at(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// needs: sm_90. Arrives at the same barrier of CTA `rank`; a thread of that CTA that waits with
// mbarrier_wait_parity_cluster sees what this thread has written before. PTX ISA: mapa, mbarrier.arrive.
FMHA_DEVICE void mbarrier_arrive_release_at(Barrier& barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(&barrier)),
      "r"(rank)
      : "memory");
}

// needs: sm_90. Waits until the phase of this parity is complete. Memory that any CTA of the cluster wrote before its
// arrival is then visible.
// PTX ISA: mbarrier.try_wait.
FMHA_DEVICE void mbarrier_wait_parity_cluster(Barrier& barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "wait_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra wait_%=; }" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// needs: sm_90. Stores to the same variable of CTA `rank`.
// PTX ISA: mapa, st.
FMHA_DEVICE void st_shared_at(int32_t& variable, uint32_t rank, int32_t value) {
  asm volatile(
      "{ .reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.b32 [remote], %2; }" ::"r"(shared_address(&variable)),
      "r"(rank), "r"(value)
      : "memory");
}

// needs: sm_90. Maps an address of this CTA's shared memory to the address of the corresponding bytes in CTA `rank`.
// PTX ISA: mapa.
FMHA_DEVICE uint32_t shared_address_at(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// needs: sm_90. The address of the same barrier of CTA `rank` of the cluster.
// PTX ISA: mapa.
FMHA_DEVICE uint32_t address_at(Barrier& barrier, uint32_t rank) {
  return shared_address_at(shared_address(&barrier), rank);
}

// needs: sm_90. Stores to shared memory of any CTA of the cluster, by its address there.
// PTX ISA: st.
FMHA_DEVICE void st_shared_cluster_b32(uint32_t address, uint32_t value) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// needs: sm_90. Stores 16 bytes to shared memory of any CTA of the cluster; `address`, in the cluster's window, is a
// multiple of 16. PTX ISA: st.
FMHA_DEVICE void st_shared_cluster_v4_f32(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// needs: sm_90. Starts a store of 16 bytes to shared memory of any CTA of the cluster, whose barrier, by its address
// there, counts them as they land; `address` is a multiple of 16.
// PTX ISA: st.async.
FMHA_DEVICE void st_async_v4_f32(uint32_t address, float a, float b, float c, float d, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
               "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
               : "memory");
}

// needs: sm_90. This CTA's rank in its cluster.
// PTX ISA: %cluster_ctarank.
FMHA_DEVICE uint32_t cluster_ctarank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// needs: sm_90. Loads the same variable of CTA `rank`.
// PTX ISA: mapa, ld.
FMHA_DEVICE uint32_t ld_shared_at(const uint32_t& variable, uint32_t rank) {
  uint32_t value;
  asm volatile(
      "{ .reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.b32 %0, [remote]; }"
      : "=r"(value)
      : "r"(shared_address(&variable)), "r"(rank)
      : "memory");
  return value;
}

}  // namespace fmha::ptx
