// The forward kernel under a tree mask. The band has no upper end: in the blocks that contain some of the sequence's
// last keys, the tree hides single keys.
#pragma once
#include <fmha/common/tree_keys.cuh>
#include <fmha/sm80/fwd/fwd.cuh>

namespace fmha::sm80 {

template <FwdSpec spec, Sm80Tile tile>
FMHA_DEVICE void fwd_tree(const FwdParams& p, const TileSchedule& schedule, const TreeMask& tree) {
  fwd<spec, tile>(p, schedule, TreeKeys{tree});
}

}  // namespace fmha::sm80
