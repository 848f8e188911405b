// Attention forward on Blackwell: a role a warp, or a warpgroup.
//
//   load      TMA brings Q and blocks of K and V                   load.cuh
//   issue     starts S = Q K^T and O += P V in tensor memory       issue.cuh
//   softmax   S to P, a warpgroup a query tile, a thread a row     softmax.cuh
//   correct   rescales O, stores it                                correct.cuh, output.cuh
//   schedule  plans tiles                                          common/scheduler.cuh
//   zero      zeroes what is not the sequence's                    load.cuh
//             brings scales, where elements have some             scales.cuh
//
// Two CTAs may compute as one, of which the first issues every product: pair.cuh.
//
// The schedule of FlashAttention-4 (Zadouri et al., 2026): two query tiles, so that one's products run under the
// other's exponentials; O stays in tensor memory, where a warpgroup of its own corrects it.
#pragma once
#include <fmha/ptx/grid.cuh>
#include <fmha/sm100/fwd/correct.cuh>
#include <fmha/sm100/fwd/load.cuh>
#include <fmha/sm100/fwd/softmax.cuh>

namespace fmha::sm100 {

template <FwdSpec spec, Sm100Tile tile>
FMHA_DEVICE void init_barriers(Smem<spec, tile>& smem) {
  constexpr int q_tiles = num_q_tiles(tile), warps = 4;  // of a softmax group, of the correct role
  constexpr int ctas = tile.cluster;
  for (int q = 0; q < q_tiles; ++q) {
    ptx::mbarrier_init(smem.q_full[q], ctas * num_load_arrivals<tile>());
    ptx::mbarrier_init(smem.q_empty[q], 1);
    ptx::mbarrier_init(smem.o_full[q], 1);
    ptx::mbarrier_init(smem.stats_full[q], warps);
    ptx::mbarrier_init(smem.stats_empty[q], warps);
  }
  for (int i = 0; i < tile.stages; ++i) {
    ptx::mbarrier_init(smem.kv_full[i], ctas * num_load_arrivals<tile>());
    ptx::mbarrier_init(smem.kv_raw[i], 1);
    ptx::mbarrier_init(smem.kv_empty[i], 1);
  }
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(smem.s_full[i], 1);
    ptx::mbarrier_init(smem.p_full[i], ctas * 2 * warps);
    ptx::mbarrier_init(smem.p_last[i], ctas * warps);
  }
  const int issuers = is_leader<tile>() ? 1 : 0;
  for (int i = 0; i < kWorkSlots; ++i) {
    ptx::mbarrier_init(smem.work_full[i], 1);
    ptx::mbarrier_init(smem.work_empty[i], (q_tiles + 1) * warps + num_load_warps(tile) + issuers);
  }
  ptx::mbarrier_init(smem.o_read, ctas * warps);
  if constexpr (is_pair(tile)) {
    ptx::mbarrier_init(smem.claimed_full, 1);
    ptx::mbarrier_init(smem.claimed_empty, 1);
  }
  ptx::mbarrier_init(smem.zero_full, 1);
  ptx::mbarrier_init(smem.zero_empty, 1);
  ptx::fence_mbarrier_init();
}

// Ends a lane that its role does not use. It would otherwise wait at the cluster's barrier before the role's only
// active lane arrives.
template <Sm100Tile tile>
FMHA_DEVICE void leave() {
  if constexpr (is_pair(tile)) ptx::exit_thread();
}

// The forward kernel. `seen` says which keys queries see (fwd_masked.cuh passes masks). `scales` are scales of elements
// (fwd_scaled.cuh).
template <FwdSpec spec, Sm100Tile tile, class SeenKeys = EveryKey, class Scales = NoScales>
FMHA_DEVICE void fwd(const FwdParams& p, const Maps& maps, const TileSchedule& schedule, const SeenKeys& seen = {},
                     const Scales& scales = {}) {
  using Tmem = TmemPlan<spec, tile>;
  static_assert(num_q_tiles(tile) * regs(tile).softmax + regs(tile).correct + regs(tile).others <=
                    (num_q_tiles(tile) + 2) * (65536 / num_threads(tile) / 8 * 8),
                "sm100: registers of all threads, within those of the launch");
  static_assert(!spec.write_keep_mask, "sm100: it does not write the keep mask");
  static_assert(!is_pair(tile) || (tile.copy_bytes == 0 && tile.split_keys == 0),
                "sm100: a pair loads by TMA, and sees all keys");
  static_assert(!whole_groups<tile>() || num_q_tiles(tile) == 1, "sm100: whole groups fill one query tile");
  static_assert(!loads_pages(tile) || (spec.kv_layout == KvKind::Paged && tile.copy_bytes == 0 && !is_pair(tile)),
                "sm100: pages by TMA, of a CTA by itself");
  static_assert(spec.kv_layout != KvKind::Paged || loads_pages(tile) || tile.copy_bytes > 0,
                "sm100: pages come by boxes of their own, or by copies");
  static_assert(!is_scaled(tile) || (!is_pair(tile) && tile.split_keys == 0 && spec.dtype_qk == spec.dtype_v),
                "sm100: scales are of one FP8 type, a CTA's by itself, which sees all keys");
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<spec, tile>& smem = *reinterpret_cast<Smem<spec, tile>*>(raw);
  const int32_t warp = ptx::uniform(threadIdx.x / 32);
  const Role role = role_of<tile>(warp);
  if (threadIdx.x == 0) init_barriers(smem);
  if constexpr (whole_groups<tile>() && tile.copy_bytes == 0) {
    // Rows of a tile that no TMA box loads are set to zero, since the products read them.
    zero_rows(smem.q[0], rows_of_tile<tile>(p), threadIdx.x, num_threads(tile));
    ptx::fence_proxy_async();
  }
  if (role == Role::Issue) {
    ptx::tcgen05_alloc<tile.cluster>(ptx::shared_address(&smem.tmem), Tmem::columns);
    ptx::tcgen05_relinquish_alloc_permit<tile.cluster>();
  }
  ptx::tcgen05_fence_before_thread_sync();  // behind the allocation
  if constexpr (is_pair(tile)) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  ptx::tcgen05_fence_after_thread_sync();  // behind the allocation
  // Every thread waits: what it stores must not come before the last reads of the grid before. The next grid may
  // start at once: its CTAs find no room before these end, and it waits for all of them.
  if constexpr (tile.dependent_launch) {
    ptx::launch_dependents();
    ptx::wait_for_grids_before();
  }

  const uint32_t tmem = smem.tmem, lanes = tmem + (uint32_t(warp % 4 * 32) << 16);
  if (role == Role::Softmax) {
    softmax<spec, tile>(p, smem, seen, lanes, warp / 4);
  } else if (role == Role::Correct) {
    correct<spec, tile>(p, smem, seen, scales, lanes);
  } else {
    ptx::setmaxnreg_dec<regs(tile).others>();
    if (role == Role::Issue) {
      if (is_leader<tile>()) {
        Issuer<spec, tile, SeenKeys> issuer{p, smem, tmem};
        issuer.run();
      }
      // Waits until each O has been read, in either CTA: every product is complete then.
      ptx::mbarrier_wait_parity(smem.o_read, 0);
      ptx::tcgen05_fence_after_thread_sync();  // before the return
      ptx::tcgen05_dealloc<tile.cluster>(tmem, Tmem::columns);
    } else if (role == Role::Load || (role == Role::Zero && tile.copy_bytes > 0)) {
      if (threadIdx.x % 32 == 0 || tile.copy_bytes > 0 || loads_pages(tile)) {
        Loader<spec, tile, SeenKeys, Scales> loader{p, maps, smem, seen, scales, role == Role::Load};
        loader.run();
      } else {
        leave<tile>();
      }
    } else if (role == Role::Schedule) {
      if constexpr (in_shares<tile>()) {
        schedule_shares<spec, tile>(p, schedule, smem);
      } else if (threadIdx.x % 32 == 0) {
        schedule_tiles<spec, tile>(p, schedule, smem, seen);
      } else {
        leave<tile>();
      }
    } else if constexpr (has_scale_role(tile)) {
      constexpr int blocks_ahead = Issuer<spec, tile, SeenKeys>::blocks_ahead;
      ScaleRole<spec, tile, SeenKeys, blocks_ahead> bringer{smem, {p, scales.of, seen}};
      bringer.run();
    } else if constexpr (tile.copy_bytes == 0) {
      zero_values<spec, tile>(smem);
    }
  }
  // A CTA of a pair waits here until the other's arrivals have come and the products have read its shared memory.
  if constexpr (is_pair(tile)) ptx::cluster_sync();
}

}  // namespace fmha::sm100
