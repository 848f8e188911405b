// Which keys of its band a query sees: all of them, or fewer (tree_keys.cuh, data_keys.cuh, shown_blocks.cuh), or those
// of a token's list (token_keys.cuh).
#pragma once
#include <fmha/seq.h>

namespace fmha {

struct EveryKey {
  // `has_classes`: a warp asks what its rows see of a block (`class_of`). `has_tile_list`: a list has a tile's blocks.
  static constexpr bool all = true, has_classes = false, has_tile_list = false;
  FMHA_DEVICE bool sees(const SeqSpan&, int32_t, int32_t, int32_t) const { return true; }
};

// Whether keys are those of a token's list: key n is the one that stands there, and a tile has one query.
template <class Keys>
FMHA_DEVICE constexpr bool are_of_token() {
  if constexpr (requires { Keys::of_token; }) return Keys::of_token;
  else return false;
}

// The sequence's query that a tile's query i is.
template <class Keys>
FMHA_DEVICE int32_t query_of_sequence(const Keys& keys, int32_t i) {
  if constexpr (are_of_token<Keys>()) return keys.list.i;
  else return i;
}

// Place of key j, which is there.
template <class Keys>
FMHA_DEVICE KvRow place_of_key(const Keys& keys, const FwdParams& p, KvKind layout, const SeqSpan& span, int32_t j) {
  if constexpr (are_of_token<Keys>()) return keys.list.row_of(layout, keys.list.key(j));
  else return kv_row(p, layout, span, j);
}

}  // namespace fmha
