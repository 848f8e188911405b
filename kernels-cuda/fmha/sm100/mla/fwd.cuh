// Wide heads on Blackwell, whose O takes the tensor memory of a pair of CTAs: rows of Q and K of up to 576 elements and
// of V of up to 512; among them latent attention (DeepSeek's MLA, absorbed), whose values are the first 512 elements of
// its keys, of few kv heads, in most models one, with 16 to 128 query heads each.
//
// A pair of CTAs computes as one (cta_group::2) on 128 rows, (query, head) pairs: each has 64 of them, half of every
// block of keys for the scores, and half of V's columns for the output. So a pair reads K and V once.
//
// Over lists of keys a tile's rows are heads of one token.
//
//   load      K and V by TMA, or copies       load.cuh
//   issue     starts every product            issue.cuh
//   softmax   S to P                          softmax.cuh
//   correct   rescales O, stores it           correct.cuh
#pragma once
#include <fmha/ptx/grid.cuh>
#include <fmha/sm100/mla/correct.cuh>
#include <fmha/sm100/mla/issue.cuh>
#include <fmha/sm100/mla/load.cuh>
#include <fmha/sm100/mla/softmax.cuh>

namespace fmha::sm100::mla {

template <class Shared>
FMHA_DEVICE void init_barriers(Shared& smem) {
  ptx::mbarrier_init(smem.q_full, kCtas * kWarps);
  for (int i = 0; i < kStages; ++i) {
    ptx::mbarrier_init(smem.kv_full[i], kCtas * kWarps);
    ptx::mbarrier_init(smem.kv_empty[i], 1);
  }
  for (int i = 0; i < 2; ++i) ptx::mbarrier_init(smem.s_full[i], 1);
  ptx::mbarrier_init(smem.p_full, kCtas * 2 * kWarps);
  ptx::mbarrier_init(smem.o_full, 1);
  ptx::mbarrier_init(smem.stats_full, kWarps);
  ptx::mbarrier_init(smem.stats_empty, kWarps);
  if constexpr (requires { smem.list.told; }) {
    for (Barrier& told : smem.list.told) ptx::mbarrier_init(told, kWarps);
  }
  ptx::fence_mbarrier_init();
}

// The work of a pair, over the keys that its rows see. `shared`: other pairs read these too.
template <FwdSpec spec, Sm100MlaTile tile, class Keys>
FMHA_DEVICE void compute(const FwdParams& p, const Maps& maps, const GatheredRows& gathered, Work& work,
                         const Keys& keys, bool shared) {
  static_assert(spec.head_dim_qk <= 576 && spec.head_dim_v <= 512, "sm100_mla: rows of 576 elements, values of 512");
  static_assert(spec.dtype_qk == spec.dtype_v && size_bytes(spec.dtype_qk) == 2, "sm100_mla: one 16-bit type");
  static_assert(!is_fp8(spec.dtype_o) && !spec.dropout && !spec.sink_columns && spec.v_layout == VLayout::RowMajor,
                "sm100_mla: O of 16 or 32 bits, no dropout, no sink columns, rows of V");
  extern __shared__ __align__(1024) unsigned char raw[];
  using Shared = Smem<spec, tile.listed>;
  Shared& smem = *reinterpret_cast<Shared*>(raw);
  const int32_t warp = ptx::uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    init_barriers(smem);
    if constexpr (tile.by_tma) {
      ptx::prefetch_tensormap(maps.k);
      ptx::prefetch_tensormap(maps.v);
    }
  }
  if (warp == kIssueWarp) {
    ptx::tcgen05_alloc<kCtas>(ptx::shared_address(&smem.tmem), TmemPlan<spec>::columns);
    ptx::tcgen05_relinquish_alloc_permit<kCtas>();
  }
  if constexpr (tile.listed) leave_out_absent(work, keys.list);
  ptx::tcgen05_fence_before_thread_sync();  // behind the allocation
  ptx::cluster_sync();
  ptx::tcgen05_fence_after_thread_sync();  // behind the allocation
  // The merge's CTAs find no room before these end, and wait for all of them.
  if constexpr (tile.split_keys > 0) ptx::launch_dependents();

  const uint32_t tmem = smem.tmem, lanes = tmem + (uint32_t(warp % 4 * 32) << 16);
  if (warp < kCorrectWarp) {
    SoftmaxRole<spec, tile> role{p, work, smem, lanes};
    role.run();
  } else if (warp < kLoadWarp) {
    CorrectRole<spec, tile, Keys> role{p, work, smem, lanes, keys};
    role.run();
  } else if (warp < kIssueWarp) {
    // Keys that no other pair reads need not stay in the L2 once their values have been read.
    const ptx::CacheHint hint = shared ? ptx::CacheHint::EvictLast : ptx::CacheHint::EvictFirst;
    Loader<spec, tile, Keys> loader{p, maps, work, smem, hint, keys, gathered};
    loader.run();
  } else if (rank_in_pair() == kLeader) {
    Issuer<spec, Shared> issuer{smem, tmem};
    issuer.run(work.num_blocks);
  }
  // A CTA stays until the other's arrivals have come, and the products have read what it holds.
  ptx::tcgen05_fence_before_thread_sync();
  ptx::cluster_sync();
  if (warp == kIssueWarp) {
    ptx::tcgen05_fence_after_thread_sync();
    ptx::tcgen05_dealloc<kCtas>(tmem, TmemPlan<spec>::columns);
  }
  ptx::cluster_sync();
}

template <FwdSpec spec, Sm100MlaTile tile>
FMHA_DEVICE void fwd(const FwdParams& p, const Maps& maps, const MlaSchedule& schedule) {
  Work work = resolve<spec, tile>(p, schedule, blockIdx.x / kCtas);
  // Both CTAs of a pair.
  if (!work.has_rows) return;
  compute<spec, tile>(p, maps, {}, work, EveryKey{}, schedule.num_m_blocks > 1);
}

// The kernel over lists of keys: a tile has up to 128 query heads of one token and kv head, and gathers the rows that
// the token's list names, or those of two caches.
// `lists`: a list's parameters, or those of two caches.
template <FwdSpec spec, Sm100MlaTile tile, class Lists>
FMHA_DEVICE void fwd_lists(const FwdParams& p, const Maps& maps, const MlaSchedule& schedule, const Lists& lists,
                           const GatheredRows& gathered) {
  static_assert(tile.listed && spec.mask == MaskKind::Full, "sm100_mla: lists hide keys by their places");
  static_assert(spec.bias == BiasKind::None, "sm100_mla: a place in a list is not a position");
  static_assert(!is_fp8(tile.stored) || !tile.by_tma, "sm100_mla: threads widen what they have copied");
  static_assert(!tile.two_caches || !tile.by_tma, "sm100_mla: rows of two caches are none of one matrix");
  static_assert(!tile.two_caches || !is_fp8(tile.stored) || tile.row_bytes > 0,
                "sm100_mla: two caches are of 16 bits or of rows of bytes");
  Work work = resolve_token<spec, tile>(p, schedule, lists, blockIdx.x / kCtas);
  if (!work.has_rows) return;
  const auto keys = keys_of_token<spec, tile.row_bytes>(p, lists, work);
  compute<spec, tile>(p, maps, gathered, work, keys, schedule.num_m_blocks > 1);
}

}  // namespace fmha::sm100::mla
