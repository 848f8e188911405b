// Which keys of its band a query sees: all of them, or fewer (tree_keys.cuh, data_keys.cuh, listed_keys.cuh).
#pragma once
#include <fmha/seq.h>

namespace fmha {

struct EveryKey {
  // `has_classes`: a warp asks what its rows see of a block (`class_of`). `listed`: a list has each tile's blocks.
  static constexpr bool all = true, has_classes = false, listed = false;
  FMHA_DEVICE bool sees(const SeqSpan&, int32_t, int32_t, int32_t) const { return true; }
};

}  // namespace fmha
