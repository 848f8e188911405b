// Keys of a token's list, or of two caches, for tiled kernels: the n-th key of the walk is entry n of the list, and it
// may be absent. The rows of a tile are query heads of one token and kv head, which share the list.
#pragma once
#include <fmha/common/output_row.cuh>
#include <fmha/common/seen_keys.cuh>
#include <fmha/num.h>
#include <fmha/ptx/collective.cuh>
#include <fmha/token_list.h>

namespace fmha {

FMHA_DEVICE constexpr FwdSpec without_sink(FwdSpec spec) {
  spec.sink = false;
  return spec;
}

// The end of a row: an infinite sink takes all weight of a
// row with finite scores, and LSE may leave out the sink.
template <FwdSpec spec, class Lists>
FMHA_DEVICE RowEnd finish_listed_row(const FwdParams& p, const Lists& lists, RowMax row_max, float row_sum,
                                     int32_t i_head) {
  RowResult row = finish_row<spec>(p, row_max, row_sum, i_head);
  if constexpr (!spec.sink) {
    return {row, row.lse};
  } else {
    const float of_keys = finish_row<without_sink(spec)>(p, row_max, row_sum, i_head).lse;
    if (scalar_of(p.sink, 0, i_head, 0.f) == infinity() && of_keys < infinity()) row = {0.f, infinity()};
    if (lists.lse_without_sink) row.lse = of_keys;
    return {row, of_keys};
  }
}

// `bytes`: of a row, where caches have rows of bytes.
template <class List, int bytes = 0>
struct KeysOfToken {
  static constexpr bool all = false, has_classes = true, of_token = true;
  static constexpr int row_bytes = bytes;
  List list;

  // Whether key n exists. Callers also ask for places beyond the list's end, which other tests hide.
  FMHA_DEVICE bool sees(const SeqSpan& span, int32_t, int32_t, int32_t n) const {
    return list.key(clamp(n, 0, span.seqlen_k - 1)) >= 0;
  }

  // Whether a non-empty block of the list has all, some or none of its keys. Called by the whole warp.
  FMHA_DEVICE BlockClass class_of(const SeqSpan&, int32_t, Range, Range keys) const {
    bool some = false, every = true;
    for (int32_t first = keys.begin; first < keys.end; first += 32) {
      const int32_t n = first + int32_t(threadIdx.x % 32);
      const bool there = n < keys.end && list.key(n) >= 0;
      some |= ptx::vote_ballot(there) != 0;
      every &= ptx::vote_ballot(n < keys.end && !there) == 0;
    }
    return !some ? BlockClass::Skipped : every ? BlockClass::Inside : BlockClass::Edge;
  }

  template <FwdSpec spec>
  FMHA_DEVICE RowEnd finish(const FwdParams& p, RowMax row_max, float row_sum, int32_t i_head) const {
    return finish_listed_row<spec>(p, list.lists, row_max, row_sum, i_head);
  }
};

}  // namespace fmha
