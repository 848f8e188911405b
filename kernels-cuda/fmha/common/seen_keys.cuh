// Which keys of its band a query sees: all of them, or fewer (tree_keys.cuh, data_keys.cuh, shown_blocks.cuh).
#pragma once
#include <fmha/seq.h>

namespace fmha {

struct EveryKey {
  // `has_classes`: a warp asks what its rows see of a block (`class_of`). `has_tile_list`: a list has a tile's blocks.
  static constexpr bool all = true, has_classes = false, has_tile_list = false;
  FMHA_DEVICE bool sees(const SeqSpan&, int32_t, int32_t, int32_t) const { return true; }
};

}  // namespace fmha
