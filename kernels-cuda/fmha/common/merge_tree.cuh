// The merge of split keys under a tree mask, whose recomputed rows see the keys of the tree.
#pragma once
#include <fmha/common/merge_parts.cuh>
#include <fmha/common/tree_keys.cuh>

namespace fmha::split {

template <FwdSpec spec, DType stored, int32_t threads, int32_t warps, bool dependent, bool in_shares>
FMHA_DEVICE void merge_tree(const FwdParams& p, const KvParts& parts, const TreeMask& tree) {
  merge<spec, stored, threads, warps, dependent, in_shares>(p, parts, TreeKeys{tree});
}

}  // namespace fmha::split
