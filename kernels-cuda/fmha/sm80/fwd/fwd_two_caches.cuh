// The forward kernel over two caches in one softmax: that over lists of keys, whose tile walks the first's keys of its
// token, then the second's.
#pragma once
#include <fmha/common/two_cache_keys.cuh>
#include <fmha/sm80/fwd/fwd_lists.cuh>

namespace fmha::sm80 {

template <FwdSpec spec, Sm80Tile tile>
FMHA_DEVICE void fwd_two_caches(const FwdParams& p, const TileSchedule& schedule, const TwoCachesParams& caches) {
  fwd_of_tokens<spec, tile>(p, schedule, [&](const SeqSpan& span, int32_t i, int32_t i_head_kv) {
    return KeysOfToken<TwoCaches, tile.row_bytes>{TwoCaches::of(p, caches, spec.q_layout, span, i, i_head_kv)};
  });
}

}  // namespace fmha::sm80
