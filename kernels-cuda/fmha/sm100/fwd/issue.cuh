// The issue role: one warp starts every product.
//
//   two query tiles, a block:     O0 += P0 V(i)   S0 = Q0 K(i+1)^T   O1 += P1 V(i)   S1 = Q1 K(i+1)^T
//   a lone query tile, a block:   O += P V(i)     S = Q K(i+2)^T
//
// The scores run a block (two blocks) ahead of the output, over a tile's end into the next, so that the tensor cores
// have work while a softmax has a tile's last scores.
//
// The products of one thread are computed in the order in which it issues them. So S may be written where P was read
// by the product issued before, and no barrier has to announce that a score slot is free.
//
// In a pair of CTAs the leader issues all products, for the query tiles of both.
//
// Scales come to tensor memory by copies before the first product that reads them. A buffer is written again two blocks
// later, behind a wait for a score slot that was announced after the products which read it.
#pragma once
#include <fmha/ptx/elect.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm100/fwd/pair.cuh>

namespace fmha::sm100 {

template <FwdSpec spec, Sm100Tile tile, class SeenKeys>
struct Issuer {
  using Shared = Smem<spec, tile>;
  using Tmem = TmemPlan<spec, tile>;
  using Instruction = mma::sm100::Instruction;
  static constexpr int q_tiles = Shared::q_tiles, blocks_ahead = 2 / q_tiles;
  static constexpr Instruction scores_instruction = {spec.dtype_qk, kRows * tile.cluster, tile.block_n, spec.negative_scale,
                                                    false};
  static constexpr Instruction output_instruction = {spec.dtype_v, kRows * tile.cluster, Shared::dim_v, false,
                                                    !Shared::v_columns};

  // Iterates over the key blocks of the current tile.
  struct Blocks {
    Slot<kWorkSlots> work;
    int32_t next = 0, count = 0;
    BlockRange of[q_tiles];

    FMHA_DEVICE bool is_first(int q) const { return next == of[q].begin; }
    FMHA_DEVICE bool is_last(int q) const { return next + 1 == of[q].end; }
  };

  const FwdParams& p;
  Shared& smem;
  const uint32_t tmem;
  const bool issues = ptx::elect_one();
  Slot<tile.stages> ring;
  Blocks scores, output;
  bool more_scores = true;
  uint32_t q_phase = 1;
  ScoreSlot<q_tiles> output_slot[q_tiles] = {};
  int32_t scores_slot = 0;  // of a lone query tile
  // Which buffer of scales in tensor memory is used next, and whether V's block has a buffer of its own.
  int32_t k_buffer = 0, v_buffer = 0;
  bool has_v_scales = false;

  // Begins the next tile's blocks; returns false if there is no tile.
  FMHA_DEVICE bool begin_tile(Blocks& blocks) const {
    ptx::mbarrier_wait_parity(smem.work_full[blocks.work.index], blocks.work.phase);
    const Work& work = smem.work[blocks.work.index];
    blocks.next = 0;
    blocks.count = ptx::uniform(work.num_blocks);
#pragma unroll
    for (int q = 0; q < q_tiles; ++q) {
      const BlockRange range = blocks_of<spec, tile, SeenKeys>(p, work, q);
      blocks.of[q] = {ptx::uniform(range.begin), ptx::uniform(range.end)};
    }
    return blocks.count > 0;
  }

  // Whether there is another block whose scores are to be started.
  FMHA_DEVICE bool has_scores() {
    if (scores.next < scores.count || !more_scores) return more_scores;
    more_scores = begin_tile(scores);
    scores.work.advance();
    q_phase ^= 1;
    return more_scores;
  }

  // Starts the product S of query tile `q` with the block of K in ring slot `k`.
  FMHA_DEVICE void start_scores(int q, const Slot<tile.stages>& k) {
    const bool last_tile = q == q_tiles - 1;
    if (q == 0) {
      wait_for_pair<tile>(smem.kv_full[k.index], k.phase);
      if constexpr (is_scaled(tile)) {
        if (issues) start_copies<Tmem::Tiles::qk>(tmem + Tmem::k_scales(k_buffer), smem.kv_scales[k.index]);
      }
    }
    if (scores.of[q].has(scores.next)) {
      if (scores.is_first(q)) wait_for_pair<tile>(smem.q_full[q], q_phase);
      const int32_t slot = q_tiles == 2 ? q : scores_slot;
      if (issues) {
        if constexpr (is_scaled(tile)) {
          const uint32_t of_q = tmem + Tmem::q_scales(q), of_k = tmem + Tmem::k_scales(k_buffer);
          if (scores.is_first(q)) start_copies<Tmem::Tiles::qk>(of_q, smem.q_scales[q]);
          if constexpr (has_pairs(tile)) {
            mma::sm100::start_pairs_product_abt<scores_instruction>(tmem + Tmem::s(slot), smem.q[q],
                                                                    smem.kv[k.index].k(), of_q, of_k);
          } else {
            mma::sm100::start_scaled_product_abt<scores_instruction>(tmem + Tmem::s(slot), smem.q[q],
                                                                     smem.kv[k.index].k(), of_q, of_k);
          }
        } else {
          mma::sm100::start_product_abt<scores_instruction>(tmem + Tmem::s(slot), smem.q[q], smem.kv[k.index].k());
        }
        commit<tile>(smem.s_full[slot]);
        if (scores.is_last(q)) commit<tile>(smem.q_empty[q]);
      }
    }
    if (last_tile) {
      if (issues) commit<tile>(smem.kv_empty[k.index]);
      scores_slot ^= 1;
      k_buffer ^= 1;
      ++scores.next;
    }
  }

  // Copies tiles of scales to tensor memory.
  template <int tiles, class Slots>
  FMHA_DEVICE void start_copies(uint32_t to, const Slots& from) const {
#pragma unroll
    for (int i = 0; i < tiles; ++i) mma::sm100::start_copy(to + i * Tmem::tile_columns, from[i]);
  }

  // Starts the steps [first, end) of a block's product with V.
  template <int first, int end, class Values>
  FMHA_DEVICE void start_output_steps(int q, int32_t slot, uint32_t d, uint32_t a, const Values& values,
                                      bool accumulate) const {
    if constexpr (has_pairs(tile)) {
      // P's scales arrived together with P.
      const uint32_t of_p = tmem + Tmem::p_scales(slot);
#pragma unroll
      for (int i = first; i < end; ++i) mma::sm100::start_copy(of_p + i * Tmem::tile_columns, smem.p_scales[slot][i]);
      mma::sm100::start_pairs_product_tmem<output_instruction, first, end, Tmem::Tiles::columns * Tmem::tile_columns>(
          d, a, values, of_p, tmem + Tmem::v_scales(v_buffer), accumulate);
    } else if constexpr (is_scaled(tile)) {
      mma::sm100::start_scaled_product_tmem<output_instruction, first, end>(
          d, a, values, tmem + Tmem::p_scales(q), tmem + Tmem::v_scales(v_buffer), accumulate);
    } else {
      mma::sm100::start_product_tmem<output_instruction, first, end>(d, a, values, accumulate);
    }
  }

  // Starts the product that adds to O of query tile `q`, with the block of V in ring slot `v`.
  FMHA_DEVICE void start_output(int q, const Slot<tile.stages>& v) {
    const bool last_tile = q == q_tiles - 1, taken = output.of[q].has(output.next);
    if (taken) {
      ScoreSlot<q_tiles>& at = output_slot[q];
      const int32_t slot = q_tiles == 2 ? q : at.index;
      const uint32_t d = tmem + Tmem::o(q), a = tmem + Tmem::p(slot);
      constexpr int depth = mma::sm100::depth_of(spec.dtype_v) * (has_pairs(tile) ? 2 : 1);
      constexpr int steps = tile.block_n / depth, first_steps = first_part<spec, tile>() / depth;
      const auto& values = smem.kv[v.index].v();
      wait_for_pair<tile>(smem.p_full[slot], at.phase);
      ptx::tcgen05_fence_after_thread_sync();
      if (issues) {
        if constexpr (is_scaled(tile)) {
          if (!has_v_scales) start_copies<Tmem::Tiles::v>(tmem + Tmem::v_scales(v_buffer), smem.kv_scales[v.index]);
        }
        start_output_steps<0, first_steps>(q, slot, d, a, values, !output.is_first(q));
      }
      has_v_scales = true;
      wait_for_pair<tile>(smem.p_last[slot], at.phase);
      ptx::tcgen05_fence_after_thread_sync();
      if (issues) start_output_steps<first_steps, steps>(q, slot, d, a, values, true);
      at.advance();
    }
    if (last_tile) {
      v_buffer ^= 1;
      has_v_scales = false;
    }
    if (issues) {
      if (last_tile) commit<tile>(smem.kv_empty[v.index]);
      if (taken && (q_tiles == 1 || output.is_last(q))) commit<tile>(smem.o_full[q]);
    }
  }

  FMHA_DEVICE bool begin_output() {
    const bool more = begin_tile(output);
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.work_empty[output.work.index], issues);
    output.work.advance();
    return more;
  }

  FMHA_DEVICE Slot<tile.stages> take_slot() {
    const Slot<tile.stages> slot = ring;
    ring.advance();
    return slot;
  }

  FMHA_DEVICE void run() {
#pragma unroll 1
    for (int i = 0; i < blocks_ahead && has_scores(); ++i) {
      const Slot<tile.stages> k = take_slot();
#pragma unroll
      for (int q = 0; q < q_tiles; ++q) start_scores(q, k);
    }
    while (begin_output()) {
#pragma unroll 1
      for (; output.next < output.count; ++output.next) {
        const Slot<tile.stages> v = take_slot();
        const bool with_scores = has_scores();
        Slot<tile.stages> k = v;
        if (with_scores) k = take_slot();
        wait_for_pair<tile>(smem.kv_full[v.index], v.phase);
#pragma unroll
        for (int q = 0; q < q_tiles; ++q) {
          start_output(q, v);
          if (with_scores) start_scores(q, k);
        }
      }
    }
  }
};

}  // namespace fmha::sm100
