// Wide heads on Hopper, whose O takes the registers of two warpgroups: rows of Q and K of up to 576 elements and of V
// of up to 512; among them latent attention (DeepSeek's MLA, absorbed), whose values are the first 512 elements of
// its keys, of few kv heads, in most models one, with 16 to 128 query heads each.
//
// A CTA has 64 rows, (query, head) pairs, and one part of the keys, which are read into shared memory once. That two
// warpgroups share the rows, and each computes every second block's scores for both, is the idea of FlashMLA
// (DeepSeek, 2025): consume.cuh.
#pragma once
#include <fmha/ptx/grid.cuh>
#include <fmha/sm90/mla/epilogue.cuh>
#include <fmha/sm90/mla/load.cuh>

namespace fmha::mla {

template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE void consume(const FwdParams& p, const Work& work, Smem<spec, tile>& smem) {
  ptx::setmaxnreg_inc<regs(tile).consume>();
  if (ptx::uniform(threadIdx.x / kWarpgroup) == 1) {
    Consumer<spec, tile, 0> consumer{p, work, smem};
    consumer.run();
    store(consumer, EveryKey{});
  } else {
    Consumer<spec, tile, 1> consumer{p, work, smem};
    consumer.run();
    store(consumer, EveryKey{});
  }
}

// L2 policy for K and V: keys that no other cluster reads need not stay in the L2.
template <Sm90MlaTile tile>
FMHA_DEVICE ptx::CacheHint hint_of(const MlaSchedule& schedule) {
  return schedule.num_m_blocks > tile.cluster ? ptx::CacheHint::EvictLast : ptx::CacheHint::EvictFirst;
}

// Initialises the CTA's barriers.
template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE Smem<spec, tile>& begin(const Maps& maps) {
  static_assert(spec.head_dim_qk <= 576 && spec.head_dim_v <= 512, "sm90_mla: rows of 576 elements, values of 512");
  static_assert(spec.dtype_qk == spec.dtype_v && size_bytes(spec.dtype_qk) == 2 && !is_fp8(spec.dtype_qk),
                "sm90_mla: one 16-bit type");
  static_assert(!is_fp8(spec.dtype_o) && !spec.dropout && !spec.sink_columns && spec.v_layout == VLayout::RowMajor,
                "sm90_mla: O of 16 or 32 bits, no dropout, no sink columns, rows of V");
  static_assert(regs(tile).load + 2 * regs(tile).consume <= 3 * kLaunchRegs, "sm90_mla: registers of all threads");
  using Shared = Smem<spec, tile>;
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& smem = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    if constexpr (tile.by_tma) {
      ptx::prefetch_tensormap(maps.k);
      if constexpr (!tile.v_in_k) ptx::prefetch_tensormap(maps.v);
    }
    ptx::mbarrier_init(smem.q_full, kWarpgroup);
    for (int part = 0; part < Shared::P::parts; ++part) {
      ptx::mbarrier_init(smem.full[part], kWarpgroup);
      ptx::mbarrier_init(smem.empty[part], tile.cluster * kWarpgroup / 32);
    }
    if constexpr (tile.listed) {
      for (Barrier& told : smem.list.told) ptx::mbarrier_init(told, kWarpgroup / 32);
    }
    if constexpr (counts_turns(tile)) ptx::mbarrier_init(smem.q_empty(), 2 * kWarpgroup / 32);
    ptx::fence_mbarrier_init();
  }
  if constexpr (ctas_of_cluster(tile) > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  // Lets the merge's grid start: its CTAs find no room before these end, and wait for all of them.
  if constexpr (tile.split_keys > 0) ptx::launch_dependents();
  return smem;
}

// Writes the next part of a share, and the rest of the share behind it, to shared memory for the load role and then for
// the consumers. They have released Q of the part before, so nobody reads this memory any more.
template <class Shared>
FMHA_DEVICE const PartOfShare& put_part(Shared& smem, const PartOfShare& next) {
  const uint32_t turn = next.work.turns.tile();
  ptx::mbarrier_wait_parity(smem.q_empty(), turn ^ 1);
  // All warps of the load role must have read the last part before it is overwritten.
  ptx::bar_sync<kWarpgroup>(kLoaders);
  if (threadIdx.x == 0) {
    smem.share.parts[turn] = next;
    smem.share.turn = turn;
  }
  ptx::bar_sync<kWarpgroup>(kLoaders);
  return smem.share.parts[turn];
}

// The load role of a CTA that walks a share. All its warps find the parts; the first one of the last CTA leaves for the
// merge how shares were dealt. While a part is loaded no register holds where that is, or what is left of the share.
template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE void load_share(const FwdParams& p, const Maps& maps, const MlaSchedule& schedule, Smem<spec, tile>& smem,
                            ptx::CacheHint hint) {
  PartOfShare next;
  next.left = share_of_cta<spec, tile>(p, schedule, threadIdx.x < 32);
#pragma unroll 1
  for (;;) {
    next.work.has_rows = false;
    while (next.left.num_blocks > 0 && !next.work.has_rows) take_part<spec, tile>(p, schedule, next);
    const PartOfShare& part = put_part(smem, next);
    if (!ptx::uniform(part.work.has_rows)) break;
    Loader<spec, tile> loader{p, maps, part.work, smem, hint};
    loader.run();
    const PartOfShare& loaded = smem.share.parts[smem.share.turn];
    next.left = loaded.left;
    next.work.turns = loaded.work.turns;
    next.work.turns.add(loaded.work.num_blocks);
  }
  ptx::bar_arrive<kNumThreads>(kTileTold);
  if constexpr (!is_fp8(tile.stored)) Loader<spec, tile>::end_gathers();
}
template <FwdSpec spec, Sm90MlaTile tile, int group>
FMHA_DEVICE void consume_share(const FwdParams& p, Smem<spec, tile>& smem) {
  uint32_t turn = 0;
#pragma unroll 1
  for (;; turn ^= 1) {
    ptx::bar_sync<kNumThreads>(kTileTold);
    const Work& work = smem.share.parts[turn].work;
    if (!ptx::uniform(work.has_rows)) return;
    Consumer<spec, tile, group> consumer{p, work, smem};
    consumer.run();
    store(consumer, EveryKey{});
  }
}

// The kernel in equal shares: a CTA walks parts of tiles one after another, and the next one's Q and keys arrive while
// the results of one are stored.
template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE void fwd_shares(const FwdParams& p, const Maps& maps, const MlaSchedule& schedule) {
  static_assert(!tile.listed && tile.split_keys > 0 && ctas_of_cluster(tile) == 1 && spec.dtype_o == DType::F32,
                "sm90_mla: shares are parts of keys, of a CTA by itself");
  Smem<spec, tile>& smem = begin<spec, tile>(maps);
  const int32_t role = ptx::uniform(threadIdx.x / kWarpgroup);
  if (role == 0) {
    ptx::setmaxnreg_dec<regs(tile).load>();
    load_share<spec, tile>(p, maps, schedule, smem, hint_of<tile>(schedule));
    return;
  }
  ptx::setmaxnreg_inc<regs(tile).consume>();
  if (role == 1) {
    consume_share<spec, tile, 0>(p, smem);
  } else {
    consume_share<spec, tile, 1>(p, smem);
  }
}

template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE void fwd(const FwdParams& p, const Maps& maps, const MlaSchedule& schedule) {
  Smem<spec, tile>& smem = begin<spec, tile>(maps);
  const Work work = resolve<spec, tile>(p, schedule, blockIdx.x);
  if (!work.has_rows) return;
  if (ptx::uniform(threadIdx.x / kWarpgroup) == 0) {
    ptx::setmaxnreg_dec<regs(tile).load>();
    Loader<spec, tile> loader{p, maps, work, smem, hint_of<tile>(schedule)};
    loader.run();
    if constexpr (tile.fold_parts > 1) meet_as_loader();
  } else {
    consume<spec, tile>(p, work, smem);
  }
  // A CTA stays until the other has received what it loads for it, and it what the other loads for it.
  if constexpr (tile.cluster > 1) ptx::cluster_sync();
}

// Keys of the list of a tile's token.
template <Sm90MlaTile tile, bool two = tile.two_caches>
struct KeysOfTileType {
  using Type = KeysOfToken<TokenList, tile.row_bytes>;
};
template <Sm90MlaTile tile>
struct KeysOfTileType<tile, true> {
  using Type = KeysOfToken<TwoCaches, tile.row_bytes>;
};
template <Sm90MlaTile tile>
using KeysOfTile = typename KeysOfTileType<tile>::Type;

// The load role over lists: the CTA's tile, or each of those that it walks. Returns its blocks.
template <FwdSpec spec, Sm90MlaTile tile, class Lists>
FMHA_DEVICE int32_t load_tile(const FwdParams& p, const Maps& maps, const Lists& lists, Smem<spec, tile>& smem,
                              const Work& work, int32_t index) {
  using Keys = KeysOfTile<tile>;
  Loader<spec, tile, Keys> loader{p, maps, work, smem, ptx::CacheHint::EvictFirst,
                                  keys_of_token<spec, tile.row_bytes>(p, lists, work)};
  loader.run(index);
  return loader.work.num_blocks;
}
template <FwdSpec spec, Sm90MlaTile tile, class Lists>
FMHA_DEVICE void load_lists(const FwdParams& p, const Maps& maps, const MlaSchedule& schedule, const Lists& lists,
                            Smem<spec, tile>& smem) {
  if constexpr (walks_tiles(spec, tile)) {
    Turns turns;
#pragma unroll 1
    for (int32_t index = blockIdx.x; index < schedule.num_tiles; index += gridDim.x) {
      Work work = resolve_token<spec, tile>(p, schedule, lists, index);
      if (!work.has_rows) continue;
      work.turns = turns;
      turns.add(load_tile<spec, tile>(p, maps, lists, smem, work, index));
    }
    ptx::mbarrier_wait_parity(smem.q_empty(), turns.tile() ^ 1);
    tell_tile(smem, -1, 0, turns);
  } else {
    const Work work = resolve_token<spec, tile>(p, schedule, lists, blockIdx.x);
    if (!work.has_rows) return;
    load_tile<spec, tile>(p, maps, lists, smem, work, 0);
  }
  if constexpr (gathers(tile)) Loader<spec, tile, KeysOfTile<tile>>::end_gathers();
}

template <FwdSpec spec, Sm90MlaTile tile, int group, class Lists>
FMHA_DEVICE void consume_tile(const FwdParams& p, const Lists& lists, const Work& work, Smem<spec, tile>& smem) {
  Consumer<spec, tile, group> consumer{p, work, smem};
  consumer.run();
  store(consumer, keys_of_token<spec, tile.row_bytes>(p, lists, work));
}
template <FwdSpec spec, Sm90MlaTile tile, int group, class Lists>
FMHA_DEVICE void consume_lists(const FwdParams& p, const MlaSchedule& schedule, const Lists& lists,
                               Smem<spec, tile>& smem) {
  if constexpr (walks_tiles(spec, tile)) {
#pragma unroll 1
    for (;;) {
      ptx::bar_sync<kNumThreads>(kTileTold);
      const int32_t index = ptx::uniform(smem.list.tile);
      if (index < 0) return;
      Work work = resolve_token<spec, tile>(p, schedule, lists, index);
      work.turns = {smem.list.turns};
      consume_tile<spec, tile, group>(p, lists, work, smem);
    }
  } else {
    const Work work = resolve_token<spec, tile>(p, schedule, lists, blockIdx.x);
    if (work.has_rows) consume_tile<spec, tile, group>(p, lists, work, smem);
  }
}

// The kernel over lists of keys: a tile has up to 64 query heads of one token and kv head, and gathers the rows that
// the token's list names, or those of two caches. Where CTAs walk tiles, the next one's Q and rows arrive while the
// results of one are stored.
template <FwdSpec spec, Sm90MlaTile tile, class Lists>
FMHA_DEVICE void fwd_lists(const FwdParams& p, const Maps& maps, const MlaSchedule& schedule, const Lists& lists) {
  static_assert(!tile.two_caches || !is_fp8(tile.stored) || tile.row_bytes > 0,
                "sm90_mla: two caches are of 16 bits or of rows of bytes");
  static_assert(tile.row_bytes == 0 || tile.v_in_k, "sm90_mla: V lies in rows of bytes");
  static_assert(tile.listed && !tile.by_tma && tile.cluster == 1, "sm90_mla: rows of a list are gathered one by one");
  static_assert(spec.mask == MaskKind::Full, "sm90_mla: lists hide keys by their places");
  static_assert(spec.bias == BiasKind::None, "sm90_mla: a place in a list is not a position");
  Smem<spec, tile>& smem = begin<spec, tile>(maps);
  const int32_t role = ptx::uniform(threadIdx.x / kWarpgroup);
  if (role == 0) {
    ptx::setmaxnreg_dec<regs(tile).load>();
    load_lists<spec, tile>(p, maps, schedule, lists, smem);
    return;
  }
  ptx::setmaxnreg_inc<regs(tile).consume>();
  if (role == 1) {
    consume_lists<spec, tile, 0>(p, schedule, lists, smem);
  } else {
    consume_lists<spec, tile, 1>(p, schedule, lists, smem);
  }
}

}  // namespace fmha::mla
