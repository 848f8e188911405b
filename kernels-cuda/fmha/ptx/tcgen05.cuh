// Tensor memory and the products whose accumulators lie in it.
// PTX ISA, TensorCore 5th Generation Family Instructions
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tensorcore-5th-generation-instructions
#pragma once
#include <fmha/ptx/mbarrier.cuh>

namespace fmha::ptx {

// The operands' element type: 16 or 8 bits.
enum class MmaKind { F16, F8f6f4 };

// needs: sm_100a. Allocates `columns` columns of tensor memory, a power of two from 32 to 512, of all 128 lanes, and
// writes their address to shared memory at `to`. One warp calls it; in a pair of CTAs (`cta_group` 2) one warp of each.
// PTX ISA: tcgen05.alloc.
template <int cta_group>
FMHA_DEVICE void tcgen05_alloc(uint32_t to, uint32_t columns) {
  asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "r"(columns),
               "n"(cta_group)
               : "memory");
}

// needs: sm_100a. Announces that this CTA allocates no more tensor memory.
// PTX ISA: tcgen05.relinquish_alloc_permit.
template <int cta_group>
FMHA_DEVICE void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" ::"n"(cta_group));
}

// needs: sm_100a. Frees tensor memory, by the warp that allocated it.
// PTX ISA: tcgen05.dealloc.
template <int cta_group>
FMHA_DEVICE void tcgen05_dealloc(uint32_t address, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns), "n"(cta_group));
}

// needs: sm_100a. Orders this thread's accesses to tensor memory before those of other threads after an arrival or a
// barrier that follows.
// PTX ISA: tcgen05.fence::before_thread_sync.
FMHA_DEVICE void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// needs: sm_100a. Orders this thread's accesses to tensor memory after those of other threads before the preceding
// wait. PTX ISA: tcgen05.fence::after_thread_sync.
FMHA_DEVICE void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// needs: sm_100a. Makes the hardware arrive at `barrier` once all products that this thread has issued are complete.
// PTX ISA: tcgen05.commit.
FMHA_DEVICE void tcgen05_commit(Barrier& barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   shared_address(&barrier))
               : "memory");
}

// needs: sm_100a. Does what tcgen05_commit does for products of a pair of CTAs: the arrival is at this barrier in every
// CTA whose bit is in `ctas`. PTX ISA: tcgen05.commit, .multicast::cluster.
FMHA_DEVICE void tcgen05_commit_pair(Barrier& barrier, uint16_t ctas) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
          shared_address(&barrier)),
      "h"(ctas)
      : "memory");
}

// needs: sm_100a. Starts D (+)= A B of one CTA, or of a pair (`cta_group` 2), where each CTA has its rows of A and D
// and half of B's columns. A and B are given by shared-memory descriptors. PTX ISA: tcgen05.mma.
template <int cta_group, MmaKind kind>
FMHA_DEVICE void tcgen05_mma_ss(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate) {
  if constexpr (kind == MmaKind::F16) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::%5.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(int(accumulate)), "n"(cta_group)
        : "memory");
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::%5.kind::f8f6f4 [%0], %1, %2, %3, p; }" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(int(accumulate)), "n"(cta_group)
        : "memory");
  }
}

// needs: sm_100a. tcgen05_mma_ss with A in tensor memory,
// packed along the columns. PTX ISA: tcgen05.mma.
template <int cta_group, MmaKind kind>
FMHA_DEVICE void tcgen05_mma_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, bool accumulate) {
  if constexpr (kind == MmaKind::F16) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::%5.kind::f16 [%0], [%1], %2, %3, p; }" ::"r"(d),
        "r"(a), "l"(b), "r"(instruction), "r"(int(accumulate)), "n"(cta_group)
        : "memory");
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::%5.kind::f8f6f4 [%0], [%1], %2, %3, p; }" ::"r"(d),
        "r"(a), "l"(b), "r"(instruction), "r"(int(accumulate)), "n"(cta_group)
        : "memory");
  }
}

// needs: sm_100a. Copies 32 rows of 16 bytes of shared memory to four columns from `to` on, of each warp's part.
// PTX ISA: tcgen05.cp, .32x128b.warpx4.
FMHA_DEVICE void tcgen05_cp_32x128b_warpx4(uint32_t to, uint64_t from) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from) : "memory");
}

// needs: sm_100f. Starts D (+)= A B of FP8 elements. Each 32 elements along a row of A and down a column of B share a
// power of two, in tensor memory at `scales_a` and `scales_b`. A is given by a shared-memory descriptor. PTX ISA:
// tcgen05.mma, .block_scale.
FMHA_DEVICE void tcgen05_mma_block32_ss(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t scales_a,
                                        uint32_t scales_b, bool accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], p; }" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(scales_a), "r"(scales_b), "r"(int(accumulate))
      : "memory");
}

// needs: sm_100f. tcgen05_mma_block32_ss with A in tensor memory,
// packed along the columns. PTX ISA: tcgen05.mma, .block_scale.
FMHA_DEVICE void tcgen05_mma_block32_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, uint32_t scales_a,
                                        uint32_t scales_b, bool accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 [%0], [%1], %2, %3, [%4], [%5], p; }" ::"r"(d),
      "r"(a), "l"(b), "r"(instruction), "r"(scales_a), "r"(scales_b), "r"(int(accumulate))
      : "memory");
}

// needs: sm_100a. Starts D (+)= A B of E2M1 elements, packed in pairs. Each 16 elements along a row of A and down a
// column of B share an unsigned E4M3 scale in tensor memory. A is given by a shared-memory descriptor. PTX ISA:
// tcgen05.mma, .block_scale.
FMHA_DEVICE void tcgen05_mma_block16_ss(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t scales_a,
                                        uint32_t scales_b, bool accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], p; }" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(scales_a), "r"(scales_b), "r"(int(accumulate))
      : "memory");
}

// needs: sm_100a. tcgen05_mma_block16_ss with A in tensor memory, packed along the columns. PTX ISA: tcgen05.mma,
// .block_scale.
FMHA_DEVICE void tcgen05_mma_block16_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, uint32_t scales_a,
                                        uint32_t scales_b, bool accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%0], [%1], %2, %3, [%4], [%5], p; }" ::"r"(d),
      "r"(a), "l"(b), "r"(instruction), "r"(scales_a), "r"(scales_b), "r"(int(accumulate))
      : "memory");
}

}  // namespace fmha::ptx
