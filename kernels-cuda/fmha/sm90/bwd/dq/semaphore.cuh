// Warps that poll dQ's semaphores in global memory on behalf of the store warp or of the consumers, which then wait on
// an mbarrier alone: a poll and a release's fence take some 700 clocks each. One thread of each warp does the work.
#pragma once
#include <fmha/ptx/flag.cuh>
#include <fmha/ptx/mbarrier.cuh>
#include <fmha/sm90/bwd/order.cuh>

namespace fmha::sm90::bwd {

// Calls `visit` for each query block that this CTA adds to, with the block's semaphore and the number of CTAs that must
// add before.
template <BwdSpec spec, Sm90BwdTile tile, class Keys, class Visit>
FMHA_DEVICE void for_each_addition(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem,
                                   const Keys& keys, Visit visit) {
  for_each_tile<tile>(schedule, smem, true, [&](int32_t index) {
    const Work work = resolve_work<spec, tile>(p, schedule, index, keys);
    for (auto blocks = query_blocks<spec, tile>(p, schedule, work, keys); blocks.more(); blocks.advance()) {
      int32_t position;
      if constexpr (Keys::has_tile_list) position = blocks.position();
      else position = position_at<spec, tile>(p, schedule, work, blocks.current);
      visit(dq_semaphore<tile>(p, first_row_of<tile>(p, work, blocks)), position);
    }
  });
}

// Waits until `position` key blocks have added to a query block.
template <Sm90BwdTile tile>
FMHA_DEVICE void wait_for_position(const int32_t* semaphore, int32_t position) {
  // Each CTA of a cluster counts by itself, so the semaphore counts CTAs.
  while (ptx::ld_acquire_gpu(semaphore) < cluster_size(tile) * position) {
  }
}

// For DqStart::FirstStores: returns whether this CTA is the first at a block. If not, it waits until the first CTA's
// store is complete.
FMHA_DEVICE bool comes_first(int32_t* semaphore) {
  if (ptx::ld_acquire_gpu(semaphore) == kStored) return false;
  if (atomicCAS(semaphore, kUntouched, kStoring) == kUntouched) return true;
  while (ptx::ld_acquire_gpu(semaphore) != kStored) {
  }
  return false;
}

// For DqStart::FirstStores: polls the semaphore of the store warp's next block while the store warp processes the
// current one.
template <BwdSpec spec, Sm90BwdTile tile, class Keys>
FMHA_DEVICE void poll_first_stores(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem,
                                   const Keys& keys) {
  uint32_t phase = 0;
  for_each_tile<tile>(schedule, smem, true, [&](int32_t index) {
    const Work work = resolve_work<spec, tile>(p, schedule, index, keys);
    for (auto blocks = query_blocks<spec, tile>(p, schedule, work, keys); blocks.more(); blocks.advance()) {
      const bool is_first = comes_first(dq_semaphore<tile>(p, first_row_of<tile>(p, work, blocks)));
      ptx::fence_proxy_async_global();
      ptx::mbarrier_wait_parity(smem.dq_empty[0], phase ^ 1);  // the block before is under way
      smem.dq_is_first = is_first;
      ptx::mbarrier_arrive_if(smem.dq_admitted, true);
      phase ^= 1;
    }
  });
}

// For DqStart::Ordered with consumers that add from their registers: waits for a block's position, lets the consumers
// add, and releases the semaphore when all of them have added.
template <BwdSpec spec, Sm90BwdTile tile, class Keys>
FMHA_DEVICE void poll_order_for_consumers(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem,
                                          const Keys& keys) {
  uint32_t phase = 0;
  for_each_addition(p, schedule, smem, keys, [&](int32_t* semaphore, int32_t position) {
    wait_for_position<tile>(semaphore, position);
    smem.dq_is_first = position == 0;
    ptx::mbarrier_arrive_if(smem.dq_empty[0], true);
#pragma unroll
    for (int c = 0; c < num_consumers(tile); ++c) ptx::mbarrier_wait_parity(smem.dq_full[c], phase);
    ptx::red_release_gpu_add(semaphore, 1);
    phase ^= 1;
  });
}

// For DqStart::Ordered: one thread polls the semaphore of the store warp's next block while the store warp processes
// the current one, and another thread releases the semaphores of blocks whose copies are complete.
template <BwdSpec spec, Sm90BwdTile tile, class Keys>
FMHA_DEVICE void poll_order(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem,
                            const Keys& keys) {
  uint32_t phase = 0;
  for_each_addition(p, schedule, smem, keys, [&](int32_t* semaphore, int32_t position) {
    wait_for_position<tile>(semaphore, position);
    ptx::fence_proxy_async_global();
    ptx::mbarrier_wait_parity(smem.dq_empty[0], phase ^ 1);  // the addition before is under way
    smem.dq_is_first = position == 0;
    ptx::mbarrier_arrive_if(smem.dq_admitted, true);
    phase ^= 1;
  });
}
template <BwdSpec spec, Sm90BwdTile tile, class Keys>
FMHA_DEVICE void release_order(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem,
                               const Keys& keys) {
  uint32_t phase = 0;
  for_each_addition(p, schedule, smem, keys, [&](int32_t* semaphore, int32_t) {
    ptx::mbarrier_wait_parity(smem.dq_added, phase);
    ptx::mbarrier_arrive_if(smem.dq_added_seen, true);
    ptx::fence_proxy_async_global();
    ptx::red_release_gpu_add(semaphore, 1);
    phase ^= 1;
  });
}

}  // namespace fmha::sm90::bwd
