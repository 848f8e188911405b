// A pair of CTAs whose tensor cores compute as one (cta_group::2): each has its own query tiles, and half of every
// block of keys. So a block crosses each CTA's shared memory by halves.
//
// One CTA, the leader, issues the products of both. The leader's barriers announce what a product waits for,
// whichever CTA has made it ready; both CTAs' barriers announce what a product has done. With one CTA the same calls
// use its own barriers.
#pragma once
#include <fmha/ptx/cluster.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/ptx/tma.cuh>
#include <fmha/sm100/fwd/config.cuh>

namespace fmha::sm100 {

constexpr uint32_t kLeader = 0;  // its rank

template <Sm100Tile tile>
FMHA_DEVICE bool is_leader() { return !is_pair(tile) || cluster_rank<tile>() == kLeader; }

// Arrives at the leader's barrier if `condition` holds.
template <Sm100Tile tile>
FMHA_DEVICE void arrive_at_leader_if(Barrier& barrier, bool condition) {
  if constexpr (is_pair(tile)) {
    ptx::mbarrier_arrive_at_if(barrier, kLeader, condition);
  } else {
    ptx::mbarrier_arrive_if(barrier, condition);
  }
}

// Arrives at the leader's barrier with release semantics, after writes to shared memory that the products read.
template <Sm100Tile tile>
FMHA_DEVICE void arrive_release_at_leader_if(Barrier& barrier, bool condition) {
  if constexpr (is_pair(tile)) {
    if (condition) ptx::mbarrier_arrive_release_at(barrier, kLeader);
  } else {
    ptx::mbarrier_arrive_if(barrier, condition);
  }
}

// Waits, in the leader, until both CTAs have arrived.
template <Sm100Tile tile>
FMHA_DEVICE void wait_for_pair(Barrier& barrier, uint32_t parity) {
  if constexpr (is_pair(tile)) {
    ptx::mbarrier_wait_parity_cluster(barrier, parity);
  } else {
    ptx::mbarrier_wait_parity(barrier, parity);
  }
}

// Makes the hardware arrive at each CTA's barrier once the products issued so far are complete.
template <Sm100Tile tile>
FMHA_DEVICE void commit(Barrier& barrier) {
  if constexpr (is_pair(tile)) {
    ptx::tcgen05_commit_pair(barrier, 0b11);
  } else {
    ptx::tcgen05_commit(barrier);
  }
}

// Barrier at which TMA announces a tile: this CTA's own, or the leader's.
template <Sm100Tile tile, bool at_leader>
struct LoadBarrier {
  static constexpr bool pair = is_pair(tile) && at_leader;
  Barrier& own;
  uint32_t address = 0;

  FMHA_DEVICE explicit LoadBarrier(Barrier& barrier) : own(barrier) {
    if constexpr (pair) address = ptx::address_at(barrier, kLeader);
  }
  FMHA_DEVICE void arrive_expect_tx(uint32_t bytes) const {
    if constexpr (pair) {
      ptx::mbarrier_arrive_expect_tx_at(address, bytes);
    } else {
      ptx::mbarrier_arrive_expect_tx(own, bytes);
    }
  }
  FMHA_DEVICE void load(uint32_t to, const TensorMap& map, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                        ptx::CacheHint hint) const {
    if constexpr (pair) {
      ptx::cp_async_bulk_tensor_4d_pair(to, map, address, c0, c1, c2, c3, hint);
    } else {
      ptx::cp_async_bulk_tensor_4d(to, map, own, c0, c1, c2, c3, hint);
    }
  }
  FMHA_DEVICE void load(uint32_t to, const TensorMap& map, int32_t c0, int32_t c1, int32_t c2, int32_t c3, int32_t c4,
                        ptx::CacheHint hint) const {
    if constexpr (pair) {
      ptx::cp_async_bulk_tensor_5d_pair(to, map, address, c0, c1, c2, c3, c4, hint);
    } else {
      ptx::cp_async_bulk_tensor_5d(to, map, own, c0, c1, c2, c3, c4, hint);
    }
  }
};

}  // namespace fmha::sm100
