// The merge of a split over two caches: `merge_lists.cuh` with keys of both.
#pragma once
#include <fmha/common/merge_parts.cuh>
#include <fmha/common/two_cache_keys.cuh>

namespace fmha::split {

// The keys of a row that the merge has found.
template <int row_bytes>
struct KeysOfTwoCaches {
  static constexpr bool of_token = true;
  using OfRow = KeysOfToken<TwoCaches, row_bytes>;
  const TwoCachesParams& caches;
  const ListParams& lists;
  QLayout q_layout;
  FMHA_DEVICE OfRow at(const FwdParams& p, const SeqSpan& span, int32_t i, int32_t i_head_kv) const {
    return {TwoCaches::of(p, caches, q_layout, span, i, i_head_kv)};
  }
};

template <FwdSpec spec, DType stored, int32_t threads, int32_t warps, bool dependent, bool in_shares, int row_bytes = 0>
FMHA_DEVICE void merge_two_caches(const FwdParams& p, const KvParts& parts, const TwoCachesParams& caches) {
  static_assert(!in_shares, "keys of two caches have parts of a fixed number");
  const KeysOfTwoCaches<row_bytes> keys = {caches, caches.lists, spec.q_layout};
  merge<spec, stored, threads, warps, dependent, false>(p, parts, keys);
}

}  // namespace fmha::split
