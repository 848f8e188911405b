// The launch that writes lists of blocks for masks as data: each workgroup writes one list (tile_lister.h).
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

}  // namespace fmha
