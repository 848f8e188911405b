// The issue role: one warp of the leader starts every product of both CTAs.
//
//   step i:   S(i) = Q K(i)^T   O += P(i - 1) V(i - 1)
//
// Scores run a block ahead, so that the tensor cores have work while the softmax has the last ones. A score slot is
// written again two blocks later, behind P of the block that it had, whose softmax has read it.
#pragma once
#include <fmha/ptx/cluster.cuh>
#include <fmha/ptx/elect.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/sm100/mla/work.cuh>

namespace fmha::sm100::mla {

template <FwdSpec spec, class Shared>
struct Issuer {
  using P = Plan<spec>;
  using Tmem = TmemPlan<spec>;
  using Instruction = mma::sm100::Instruction;
  static constexpr Instruction scores = {.dtype = spec.dtype_qk, .m = kPairRows, .n = kKeys,
                                         .negate_a = spec.negative_scale, .pair_of_64 = true};
  static constexpr Instruction output = {.dtype = spec.dtype_v, .m = kPairRows, .n = kGroup, .b_across_rows = true,
                                         .pair_of_64 = true};
  static constexpr uint16_t kBoth = (1 << kCtas) - 1;

  Shared& smem;
  const uint32_t tmem;
  const bool issues = ptx::elect_one();
  Slot<kStages> ring;

  FMHA_DEVICE void wait_full() const { ptx::mbarrier_wait_parity_cluster(smem.kv_full[ring.index], ring.phase); }
  FMHA_DEVICE void release() {
    if (issues) ptx::tcgen05_commit_pair(smem.kv_empty[ring.index], kBoth);
    ring.advance();
  }

  FMHA_DEVICE void start_scores(int32_t i) {
    const uint32_t d = tmem + Tmem::s(i % 2);
#pragma unroll
    for (int slot = 0; slot < P::slots_k; ++slot) {
      wait_full();
      const Chunk& q = smem.q[2 * slot];
      const Chunk& k = smem.kv[ring.index].chunks[0];
      if (issues) {
        if constexpr (P::chunks_k % 2 == 0) {
          mma::sm100::start_product<scores, 2 * kSpan>(d, wide(q), wide(k), slot > 0);
        } else if (slot + 1 < P::slots_k) {
          mma::sm100::start_product<scores, 2 * kSpan>(d, wide(q), wide(k), slot > 0);
        } else {
          mma::sm100::start_product<scores, kSpan>(d, q, k, slot > 0);
        }
      }
      release();
    }
    if (issues) ptx::tcgen05_commit_pair(smem.s_full[i % 2], kBoth);
  }

  // P of the i-th block times its V.
  FMHA_DEVICE void start_output(int32_t i) {
    ptx::mbarrier_wait_parity_cluster(smem.p_full, i % 2);
    ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
    for (int half = 0; half < kCtas; ++half) {
#pragma unroll
      for (int group = 0; group < P::groups_v; ++group) {
        wait_full();
        if (issues)
          mma::sm100::start_product<output, kHalf>(tmem + Tmem::o(group), smem.p[half],
                                                   wide(smem.kv[ring.index].chunks[0]), half > 0 || i > 0);
        release();
      }
    }
    if (issues) ptx::tcgen05_commit_pair(smem.o_full, kBoth);
  }

  FMHA_DEVICE void run(int32_t num_blocks) {
    if (num_blocks == 0) return;
    ptx::mbarrier_wait_parity_cluster(smem.q_full, 0);
#pragma unroll 1
    for (int32_t i = 0; i <= num_blocks; ++i) {
      if (i < num_blocks) start_scores(i);
      if (i > 0) start_output(i - 1);
    }
    __syncwarp();
  }
};

}  // namespace fmha::sm100::mla
