// The store role: one thread adds each query block's dQ to the f32 sums in memory.
#pragma once
#include <fmha/ptx/bulk.cuh>
#include <fmha/sm90/bwd/keep_turns.cuh>

namespace fmha::sm90::bwd {

// Turns of the storing thread, which others wait for and count (keep_turns.cuh). A turn is over when what it added is there:
// by the time that the next block's dQ is, and this thread does not wait for it while it could hand the shared memory back.
template <BwdSpec spec, Sm90BwdTile tile>
struct StoringTurn {
  Smem<spec, tile>& smem;
  bool is_open = false;
  uint32_t phase = 0;

  // Whether nothing has been added before.
  FMHA_DEVICE bool begin() {
    ptx::mbarrier_wait_parity(smem.turn_come, phase);
    is_open = true;
    return smem.is_first_turn;
  }
  FMHA_DEVICE void end() {
    if (!is_open) return;
    ptx::cp_async_bulk_wait_group<0>();
    ptx::mbarrier_wait_parity(smem.turn_counted, phase ^ 1);  // the turn before
    ptx::mbarrier_arrive_if(smem.turn_over, true);
    is_open = false;
    phase ^= 1;
  }
};

// Without turns: the first one at a block stores, and says so to those who wait to add. That too a block later: as soon as the
// next one's dQ is there, or where those who follow are several blocks behind, when its copies have been issued, since who is
// ahead of all others of a head is the first at every block, and all go at its pace. D 128 causal, S 512, 4k, 8k: 251, 547, 588
// and 248, 560, 613 TFLOP/s; D 64 causal, S 512, 1k: 217, 318 and 213, 313.
template <BwdSpec spec, Sm90BwdTile tile>
struct StoringFirst {
  Smem<spec, tile>& smem;
  static constexpr bool tells_late = tile.block_n > tile.block_m;
  int32_t* stored = nullptr;  // the number of a block whose store is under way
  uint32_t phase = 0;

  FMHA_DEVICE bool begin() {
    // Whom this thread waits for may wait for it.
    if (stored && !(tells_late && ptx::mbarrier_test_parity(smem.turn_come, phase))) end<0>();
    ptx::mbarrier_wait_parity(smem.turn_come, phase);
    phase ^= 1;
    return smem.is_first_turn;
  }
  // With `later` groups of copies issued since.
  template <int later>
  FMHA_DEVICE void end() {
    if (!stored) return;
    ptx::cp_async_bulk_wait_group<later>();
    ptx::fence_proxy_async_global();
    ptx::red_release_gpu_add(stored, kStored - kOneComes);
    stored = nullptr;
  }
};

// To consumers `c` and those after it their shared memory, each as soon as its copy has read it; the last copies are theirs, in order.
template <int c, int consumers, class Shared>
FMHA_DEVICE void hand_back(Shared& smem) {
  ptx::cp_async_bulk_wait_group_read<consumers - 1 - c>();
  ptx::mbarrier_arrive_if(smem.dq_empty[c], true);
  if constexpr (c + 1 < consumers) hand_back<c + 1, consumers>(smem);
}

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void store_dq(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem) {
  using S = Shape<spec, tile>;
  constexpr uint32_t share_bytes = S::dq_share * sizeof(float);
  uint32_t phase = 0;
  StoringTurn<spec, tile> turn{smem};
  StoringFirst<spec, tile> first{smem};
  for_each_tile<tile>(schedule, smem, true, [&](int32_t index) {
    const Work work = resolve_work<spec, tile>(p, schedule, index);
    for (QueryBlocks blocks = query_blocks<spec, tile>(p, schedule, work); blocks.more(); blocks.advance()) {
      const int64_t row = first_row_of<tile>(p, work, blocks);
      float* sums = p.dq_sums + row * S::dim;
      bool is_first = false;  // stores, so that nobody has to put zeros there before
      if constexpr (takes_turns<spec>()) {
        ptx::mbarrier_wait_parity(smem.dq_full[S::consumers - 1], phase);
        // Before this turn is waited for: who has it may wait for that one.
        turn.end();
        is_first = turn.begin();
      } else if constexpr (tile.first_stores) {
        ptx::mbarrier_wait_parity(smem.dq_full[0], phase);
        is_first = first.begin();
      }
#pragma unroll
      for (int c = 0; c < S::consumers; ++c) {
        ptx::mbarrier_wait_parity(smem.dq_full[c], phase);
        float* to = sums + c * S::dq_share;
        if (is_first) {
          ptx::cp_async_bulk_store(to, ptx::shared_address(smem.dq[c]), share_bytes);
        } else {
          ptx::cp_reduce_async_bulk_add_f32(to, ptx::shared_address(smem.dq[c]), share_bytes);
        }
        ptx::cp_async_bulk_commit_group();
      }
      if constexpr (tile.first_stores) {
        if constexpr (StoringFirst<spec, tile>::tells_late) first.template end<S::consumers>();
        if (is_first) first.stored = turns_of_block<tile>(p, row);
      }
      hand_back<0, S::consumers>(smem);
      phase ^= 1;
    }
    if constexpr (takes_turns<spec>()) turn.end();
    if constexpr (tile.first_stores) first.template end<0>();
    if constexpr (tile.finishes_dq) {
      ptx::cp_async_bulk_wait_group<0>();
      ptx::fence_proxy_async_global();
      const int32_t head = work.span.i_batch * p.fwd.num_heads_q + first_query_head<tile>(p, schedule, work);
      ptx::red_release_gpu_add(done_key_blocks<spec, tile>(p, schedule, head), 1);
    }
  });
  ptx::cp_async_bulk_wait_group<0>();
}

}  // namespace fmha::sm90::bwd
