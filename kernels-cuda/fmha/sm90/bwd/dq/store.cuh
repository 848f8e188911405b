// The store role: one thread adds each query block's dQ, which the consumers have left in shared memory, to the f32
// sums.
#pragma once
#include <fmha/ptx/bulk.cuh>
#include <fmha/sm90/bwd/dq/semaphore.cuh>

namespace fmha::sm90::bwd {

// For DqStart::Ordered: the store thread's part in the order of additions, whose semaphores other threads poll and
// release (semaphore.cuh). A block's addition is announced as complete only when the next block's dQ has arrived: until
// then the thread hands shared memory back instead of waiting.
template <BwdSpec spec, Sm90BwdTile tile>
struct OrderedStore {
  Smem<spec, tile>& smem;
  bool is_open = false;
  uint32_t phase = 0;

  // Waits until this CTA may add to the block of dQ. Returns true if no CTA has added before, so that this one stores.
  FMHA_DEVICE bool begin() {
    ptx::mbarrier_wait_parity(smem.dq_admitted, phase);
    is_open = true;
    return smem.dq_is_first;
  }
  FMHA_DEVICE void end() {
    if (!is_open) return;
    ptx::cp_async_bulk_wait_group<0>();
    ptx::mbarrier_wait_parity(smem.dq_added_seen, phase ^ 1);  // the addition before
    ptx::mbarrier_arrive_if(smem.dq_added, true);
    is_open = false;
    phase ^= 1;
  }
};

// DqStart::FirstStores: the first CTA at a block stores, and releases the block's semaphore for those that wait to add.
// That is a block later too: as soon as the next one's dQ is there; or, where followers are several blocks behind, when
// its copies have been issued, since a CTA that is ahead of all others of a head is the first at every block, and all
// go at its pace. D 128 causal, S 512, 4k, 8k: 251, 547, 588 and 248, 560, 613 TFLOP/s; D 64 causal, S 512, 1k: 217,
// 318 and 213, 313.
template <BwdSpec spec, Sm90BwdTile tile>
struct FirstStore {
  Smem<spec, tile>& smem;
  static constexpr bool releases_late = tile.block_n > tile.block_m;
  int32_t* stored = nullptr;  // the semaphore of a block whose store is under way
  uint32_t phase = 0;

  FMHA_DEVICE bool begin() {
    // The CTA whose store the polling thread waits for may itself wait for this CTA's store, so a late release must not
    // wait any longer.
    if (stored && !(releases_late && ptx::mbarrier_test_parity(smem.dq_admitted, phase))) end<0>();
    ptx::mbarrier_wait_parity(smem.dq_admitted, phase);
    phase ^= 1;
    return smem.dq_is_first;
  }
  // Ends the last store: waits for its copies, behind which `later` groups have been issued, and releases the
  // semaphore.
  template <int later>
  FMHA_DEVICE void end() {
    if (!stored) return;
    ptx::cp_async_bulk_wait_group<later>();
    ptx::fence_proxy_async_global();
    ptx::red_release_gpu_add(stored, kStored - kStoring);
    stored = nullptr;
  }
};

// Hands shared memory back to consumer `c` and those after it, each as soon as its copy has been read. The last copies
// issued are theirs, in order.
template <int c, int consumers, class Shared>
FMHA_DEVICE void hand_back(Shared& smem) {
  ptx::cp_async_bulk_wait_group_read<consumers - 1 - c>();
  ptx::mbarrier_arrive_if(smem.dq_empty[c], true);
  if constexpr (c + 1 < consumers) hand_back<c + 1, consumers>(smem);
}

template <BwdSpec spec, Sm90BwdTile tile, class Keys>
FMHA_DEVICE void store_dq(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem,
                          const Keys& keys) {
  using S = Shape<spec, tile>;
  constexpr DqStart start = kDqStart<spec, tile>;
  uint32_t phase = 0;
  OrderedStore<spec, tile> ordered{smem};
  FirstStore<spec, tile> first{smem};
  for_each_tile<tile>(schedule, smem, true, [&](int32_t index) {
    const Work work = resolve_work<spec, tile>(p, schedule, index, keys);
    for (auto blocks = query_blocks<spec, tile>(p, schedule, work, keys); blocks.more(); blocks.advance()) {
      const int64_t row = first_row_of<tile>(p, work, blocks);
      float* sums = p.dq_sums + part_of_sums<spec, tile>(p, work.key_block) + row * S::dq_dim;
      bool is_first = start == DqStart::Apart;  // stores, so that preprocess need not write zeros
      if constexpr (start == DqStart::Ordered) {
        ptx::mbarrier_wait_parity(smem.dq_full[S::consumers - 1], phase);
        // Ends the last store before it waits for this block's position: the CTA that holds the position may itself
        // wait for the block before.
        ordered.end();
        is_first = ordered.begin();
      } else if constexpr (start == DqStart::FirstStores) {
        ptx::mbarrier_wait_parity(smem.dq_full[0], phase);
        is_first = first.begin();
      }
#pragma unroll
      for (int c = 0; c < S::consumers; ++c) {
        ptx::mbarrier_wait_parity(smem.dq_full[c], phase);
        const bool is_whole = S::dq_added(c) == S::dq_share;
        float* to = sums + S::share_of(c) * S::dq_share + (is_whole ? 0 : cluster_rank<tile>() * S::dq_added(c));
        const uint32_t from = ptx::shared_address(smem.dq + c * S::dq_share), bytes = S::dq_added(c) * sizeof(float);
        if (is_first) {
          ptx::cp_async_bulk_store(to, from, bytes);
        } else {
          ptx::cp_reduce_async_bulk_add_f32(to, from, bytes);
        }
        ptx::cp_async_bulk_commit_group();
      }
      if constexpr (start == DqStart::FirstStores) {
        if constexpr (FirstStore<spec, tile>::releases_late) first.template end<S::consumers>();
        if (is_first) first.stored = dq_semaphore<tile>(p, row);
      }
      hand_back<0, S::consumers>(smem);
      phase ^= 1;
    }
    if constexpr (start == DqStart::Ordered) ordered.end();
    if constexpr (start == DqStart::FirstStores) first.template end<0>();
    if constexpr (finishes_dq(tile)) {
      ptx::cp_async_bulk_wait_group<0>();
      ptx::fence_proxy_async_global();
      const int32_t head = work.span.i_batch * p.fwd.num_heads_q + first_query_head<spec, tile>(p, schedule, work);
      ptx::red_release_gpu_add(done_key_blocks<spec, tile>(p, schedule, head), 1);
    }
  });
  ptx::cp_async_bulk_wait_group<0>();
}

}  // namespace fmha::sm90::bwd
