// The forward kernel over two caches in one softmax. It is the kernel over lists of keys: a tile walks its token's keys
// of the first cache, then those of the second.
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
