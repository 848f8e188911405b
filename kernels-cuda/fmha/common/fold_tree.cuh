// The merge of fixed parts under a tree mask, whose recomputed rows see the keys of the tree.
#pragma once
#include <fmha/common/fold_parts.cuh>
#include <fmha/common/tree_keys.cuh>

namespace fmha::split {

template <FwdSpec spec, DType stored, int32_t threads, int32_t warps, bool dependent>
FMHA_DEVICE void fold_tree(const FwdParams& p, const KvParts& parts, const TreeMask& tree) {
  fold<spec, stored, threads, warps, dependent>(p, parts, TreeKeys{tree});
}

}  // namespace fmha::split
