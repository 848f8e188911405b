// The launch that makes lists of tiles: a workgroup a list (tile_lister.h).
#pragma once
#include <fmha/amd/mask_lanes.h>
#include <fmha/isa/sync.h>
#include <fmha/tile_lister.h>

namespace fmha {

struct TileListGroup : MaskLanes {
  static constexpr int32_t threads = 256;
  static constexpr bool has_a_block_of_none = false, has_atomics = false;
  static FMHA_DEVICE int32_t thread() { return thread_idx(); }
  static FMHA_DEVICE int32_t group_index() { return workgroup_idx(); }
  static FMHA_DEVICE void barrier() { s_barrier(); }
  static FMHA_DEVICE void reconverge() {}
  static FMHA_DEVICE int32_t bits_in(uint64_t bits) { return __builtin_popcountll(bits); }
};

template <FwdSpec spec, int32_t block_m, int32_t block_n, bool of_keys, bool has_function>
FMHA_DEVICE void list_tiles(const FwdParams& p, const MaskDataParams& masks, const TileList& list) {
  using Lister = TileLister<TileListGroup, has_function>;
  __shared__ typename Lister::Shared shared;
  const Lister lister{p, {DataMasks{masks}}, list};
  lister.template run<of_keys>(shared, spec.q_layout, spec.kv_layout, block_m, block_n);
}

}  // namespace fmha
