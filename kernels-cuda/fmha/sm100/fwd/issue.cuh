// The issue role: one warp starts every product.
//
//   two query tiles, a block:     O0 += P0 V(i)   S0 = Q0 K(i+1)^T   O1 += P1 V(i)   S1 = Q1 K(i+1)^T
//   a lone query tile, a block:   O += P V(i)     S = Q K(i+2)^T
//
// The scores run a block (two blocks) ahead of the output, over a tile's end into the next, so that the tensor cores
// have work while a softmax has a tile's last scores.
//
// The products of one thread are computed in the order in which it issues them. So S may be written where P was read
// by the product issued before, and nobody has to announce that a score slot is free.
#pragma once
#include <fmha/ptx/elect.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm100/fwd/config.cuh>

namespace fmha::sm100 {

template <FwdSpec spec, Sm100Tile tile>
struct Issuer {
  using Shared = Smem<spec, tile>;
  using Tmem = TmemPlan<spec, tile>;
  using Instruction = mma::sm100::Instruction;
  static constexpr int q_tiles = Shared::q_tiles, blocks_ahead = 2 / q_tiles;
  static constexpr Instruction scores_instruction = {spec.dtype_qk, kRows, tile.block_n, spec.negative_scale, false};
  static constexpr Instruction output_instruction = {spec.dtype_v, kRows, Shared::dim_v, false, !Shared::v_columns};

  Shared& smem;
  const uint32_t tmem;
  const bool issues = ptx::elect_one();
  Slot<tile.stages> ring;
  Slot<kWorkSlots> scores_work, output_work;
  // Blocks that are left of the tile whose scores, or output, come next.
  int32_t scores_left = 0, output_left = 0;
  bool scores_first = false, output_first = false, more_scores = true;
  uint32_t q_phase = 1;
  ScoreSlot<q_tiles> output_slot;
  int32_t scores_slot = 0;  // of a lone query tile

  // The next block of scores is there; false: there are no more.
  FMHA_DEVICE bool begin_scores() {
    if (scores_left > 0 || !more_scores) return more_scores;
    ptx::mbarrier_wait_parity(smem.work_full[scores_work.index], scores_work.phase);
    scores_left = ptx::uniform(smem.work[scores_work.index].num_blocks);
    scores_work.advance();
    scores_first = true;
    q_phase ^= 1;
    more_scores = scores_left > 0;
    return more_scores;
  }

  // S of query tile `q`, K in ring slot `k`.
  FMHA_DEVICE void start_scores(int q, int32_t k, uint32_t k_phase) {
    if (q == 0) ptx::mbarrier_wait_parity(smem.kv_full[k], k_phase);
    if (scores_first) ptx::mbarrier_wait_parity(smem.q_full[q], q_phase);
    const int32_t slot = q_tiles == 2 ? q : scores_slot;
    const bool last_tile = q == q_tiles - 1;
    if (issues) {
      mma::sm100::start_product_abt<scores_instruction>(tmem + Tmem::s(slot), smem.q[q], smem.kv[k].k());
      ptx::tcgen05_commit(smem.s_full[slot]);
      if (scores_left == 1) ptx::tcgen05_commit(smem.q_empty[q]);
      if (last_tile) ptx::tcgen05_commit(smem.kv_empty[k]);
    }
    if (last_tile) {
      scores_slot ^= 1;
      scores_first = false;
      --scores_left;
    }
  }

  // O of query tile `q`, V in ring slot `v`.
  FMHA_DEVICE void start_output(int q, int32_t v) {
    const int32_t slot = q_tiles == 2 ? q : output_slot.index;
    const uint32_t d = tmem + Tmem::o(q), a = tmem + Tmem::p(slot);
    constexpr int steps = tile.block_n / mma::sm100::depth_of(spec.dtype_v);
    constexpr int first_steps = first_part<spec, tile>() / mma::sm100::depth_of(spec.dtype_v);
    const auto& values = smem.kv[v].v();
    ptx::mbarrier_wait_parity(smem.p_full[slot], output_slot.phase);
    ptx::tcgen05_fence_after_thread_sync();
    if (issues) {
      mma::sm100::start_product_tmem<output_instruction, 0, first_steps>(d, a, values, !output_first);
    }
    ptx::mbarrier_wait_parity(smem.p_last[slot], output_slot.phase);
    ptx::tcgen05_fence_after_thread_sync();
    if (issues) {
      mma::sm100::start_product_tmem<output_instruction, first_steps, steps>(d, a, values, true);
      if (q == q_tiles - 1) ptx::tcgen05_commit(smem.kv_empty[v]);
      if (q_tiles == 1 || output_left == 1) ptx::tcgen05_commit(smem.o_full[q]);
    }
  }

  // The next block of scores beside nothing.
  FMHA_DEVICE void scores_alone() {
    if (!begin_scores()) return;
    const Slot<tile.stages> k = ring;
    ring.advance();
#pragma unroll
    for (int q = 0; q < q_tiles; ++q) start_scores(q, k.index, k.phase);
  }

  FMHA_DEVICE bool begin_output() {
    ptx::mbarrier_wait_parity(smem.work_full[output_work.index], output_work.phase);
    output_left = ptx::uniform(smem.work[output_work.index].num_blocks);
    output_first = true;
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.work_empty[output_work.index], issues);
    output_work.advance();
    return output_left > 0;
  }

  FMHA_DEVICE void run() {
#pragma unroll 1
    for (int i = 0; i < blocks_ahead; ++i) scores_alone();
    while (begin_output()) {
#pragma unroll 1
      for (; output_left > 0; --output_left) {
        const Slot<tile.stages> v = ring;
        ring.advance();
        const Slot<tile.stages> k = ring;
        const bool scores = begin_scores();
        if (scores) ring.advance();
        ptx::mbarrier_wait_parity(smem.kv_full[v.index], v.phase);
#pragma unroll
        for (int q = 0; q < q_tiles; ++q) {
          start_output(q, v.index);
          if (scores) start_scores(q, k.index, k.phase);
        }
        output_slot.advance();
        output_first = false;
      }
    }
  }
};

}  // namespace fmha::sm100
