// The merge of a split over lists of keys: every part of every token has
// written its LSE. A recomputed row sees the keys of its token's list.
#pragma once
#include <fmha/common/token_keys.cuh>
#include <fmha/common/merge_parts.cuh>

namespace fmha::split {

// The keys of a row that the merge has found.
template <int row_bytes>
struct KeysOfLists {
  static constexpr bool of_token = true;
  using OfRow = KeysOfToken<TokenList, row_bytes>;
  const ListParams& lists;
  FMHA_DEVICE OfRow at(const FwdParams& p, const SeqSpan& span, int32_t i, int32_t i_head_kv) const {
    return {{p, lists, span, resolve_band(p.mask, span.seqlen_q, span.seqlen_k), i, i_head_kv}};
  }
};

template <FwdSpec spec, DType stored, int32_t threads, int32_t warps, bool dependent, bool in_shares, int row_bytes = 0>
FMHA_DEVICE void merge_lists(const FwdParams& p, const KvParts& parts, const ListParams& lists) {
  static_assert(!in_shares, "lists have parts of a fixed number of entries");
  merge<spec, stored, threads, warps, dependent, false>(p, parts, KeysOfLists<row_bytes>{lists});
}

}  // namespace fmha::split
