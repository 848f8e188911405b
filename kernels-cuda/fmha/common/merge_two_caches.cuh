// The merge of a split over two caches: `merge_lists.cuh` with keys of both.
#pragma once
#include <fmha/common/merge_parts.cuh>
#include <fmha/common/two_cache_keys.cuh>

namespace fmha::split {

// The keys of a row that the merge has found.
struct KeysOfTwoCaches {
  static constexpr bool of_token = true;
  using OfRow = TwoCacheKeys;
  const TwoCachesParams& caches;
  const ListParams& lists;
  QLayout q_layout;
  FMHA_DEVICE TwoCacheKeys at(const FwdParams& p, const SeqSpan& span, int32_t i, int32_t i_head_kv) const {
    return {TwoCaches::of(p, caches, q_layout, span, i, i_head_kv)};
  }
};

template <FwdSpec spec, DType stored, int32_t threads, int32_t warps, bool dependent, bool in_shares>
FMHA_DEVICE void merge_two_caches(const FwdParams& p, const KvParts& parts, const TwoCachesParams& caches) {
  static_assert(!in_shares, "keys of two caches have parts of a fixed number");
  merge<spec, stored, threads, warps, dependent, false>(p, parts, KeysOfTwoCaches{caches, caches.lists, spec.q_layout});
}

}  // namespace fmha::split
