// The tile scheduler: it gives a CTA its next tile. One thread, at the request of the load role, resolves order,
// sequence and mask for all.
//
// Order: L2 head groups, heads whose K and V stay in the L2 together; in a group the row blocks with the most keys
// first, every head's in turn.
//
// `Shared` is a kernel's shared memory. It has the members work, work_full and work_empty, and in clusters claimed,
// claimed_full and claimed_empty for the tile index.
#pragma once
#include <fmha/common/pipeline.cuh>
#include <fmha/common/seen_keys.cuh>
#include <fmha/common/shares.cuh>
#include <fmha/common/work.cuh>
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/cluster.cuh>

namespace fmha {

// Visits tiles in their order, for one CTA (or one cluster).
template <FwdSpec spec, auto tile, class Shared>
struct Scheduler {
  Shared& smem;
  int32_t round = 0;
  uint32_t claimed_phase = 0;

  FMHA_DEVICE int32_t num_workers() const { return gridDim.x / tile.cluster; }

  FMHA_DEVICE int32_t static_index() const {
    const int32_t worker = blockIdx.x / tile.cluster, first = round * num_workers();
    // With a mask, tiles differ in length. Every second round runs backwards, so that the CTA with the longest tile of
    // one round has the shortest of the next.
    const bool backwards = spec.mask != MaskKind::Full && (round & 1);
    return first + (backwards ? num_workers() - 1 - worker : worker);
  }

  // The counter in the workspace is 0 before each launch.
  FMHA_DEVICE int32_t claim(const FwdParams& p) const {
    return num_workers() + atomicAdd(static_cast<int32_t*>(p.workspace), 1);
  }

  // The first CTA of a cluster takes the tile index from the counter for both CTAs.
  FMHA_DEVICE int32_t claim_together(const FwdParams& p) {
    int32_t index;
    if (cluster_rank<tile>() == 0) {
      index = claim(p);
      ptx::mbarrier_wait_parity_cluster(smem.claimed_empty, claimed_phase ^ 1);
      ptx::st_shared_at(smem.claimed, 1, index);
      ptx::mbarrier_arrive_release_at(smem.claimed_full, 1);
    } else {
      ptx::mbarrier_wait_parity_cluster(smem.claimed_full, claimed_phase);
      index = smem.claimed;
      ptx::mbarrier_arrive_release_at(smem.claimed_empty, 0);
    }
    claimed_phase ^= 1;
    return index;
  }

  FMHA_DEVICE int32_t next_index(const FwdParams& p, const TileSchedule& schedule) {
    const bool first = round == 0;
    const int32_t index = static_index();
    ++round;
    if (first || tile.order == TileOrder::Static) return index;
    // All tiles were given out in the first round, so the workspace has no counter (TileSchedule::counter_bytes).
    if (tile.order == TileOrder::Single || schedule.num_tiles <= num_workers()) return schedule.num_tiles;
    if constexpr (tile.cluster > 1) return claim_together(p);
    return claim(p);
  }

  // The next tile that has rows; num_blocks is 0 if there is none.
  FMHA_DEVICE Work next(const FwdParams& p, const TileSchedule& schedule) {
    while (true) {
      const int32_t index = next_index(p, schedule);
      if (index >= schedule.num_tiles) break;
      const Work work = resolve_tile<spec, tile>(p, schedule, index);
      if (work.num_blocks > 0) return work;
    }
    Work none;
    none.num_blocks = 0;
    return none;
  }
};

// Named barrier at which the load role asks for the next tile. An mbarrier would make the scheduling warp poll for a
// whole tile's time.
constexpr int kWorkWanted = 7;

// Finds the next tile and its key blocks, for all roles of a CTA. `keys` says which keys queries see; if it has lists,
// the tile's blocks come from its list.
template <FwdSpec spec, auto tile, class Shared, class Keys = EveryKey>
FMHA_DEVICE void schedule_tiles(const FwdParams& p, const TileSchedule& schedule, Shared& smem, const Keys& keys = {}) {
  Scheduler<spec, tile, Shared> scheduler{smem};
  Slot<kWorkSlots> slot;
  bool more = true;
  while (more) {
    ptx::barrier_sync<kWorkWanted, 64>();
    Work work = scheduler.next(p, schedule);
    if constexpr (Keys::has_tile_list) {
      if (work.num_blocks > 0) keys.template take<spec, tile>(p, work);
    }
    ptx::mbarrier_wait_parity(smem.work_empty[slot.index], slot.phase ^ 1);
    smem.work[slot.index] = work;
    ptx::mbarrier_arrive_if(smem.work_full[slot.index], true);
    slot.advance();
    more = work.num_blocks > 0;
  }
}

// Schedules a CTA's equal share of all tiles' key blocks (shares.cuh). A whole warp runs it.
template <FwdSpec spec, auto tile, class Shared>
FMHA_DEVICE void schedule_shares(const FwdParams& p, const TileSchedule& schedule, Shared& smem) {
  Share<spec, tile> share{p, schedule, true};
  Slot<kWorkSlots> slot;
  bool more = true;
  while (more) {
    ptx::barrier_sync<kWorkWanted, 64>();
    Work work;
    work.num_blocks = 0;
    while (work.num_blocks == 0 && !share.is_over()) work = share.next();
    ptx::mbarrier_wait_parity(smem.work_empty[slot.index], slot.phase ^ 1);
    if (share.lane == 0) smem.work[slot.index] = work;
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.work_full[slot.index], share.lane == 0);
    slot.advance();
    more = work.num_blocks > 0;
  }
}

}  // namespace fmha
