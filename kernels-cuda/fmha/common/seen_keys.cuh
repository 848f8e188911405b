// Policies that say which keys of its band a query sees: all of them; fewer (tree_keys.cuh, data_keys.cuh,
// shown_blocks.cuh); or the keys of a token's list (token_keys.cuh).
#pragma once
#include <fmha/seq.h>

namespace fmha {

// Words of masks' bits for a thread's two rows of a block of n keys, where these are whole words.
template <int n>
struct FetchedBits {
  static constexpr bool is_whole = n % 32 == 0;
  uint32_t words[2][is_whole ? n / 32 : 1];
};

struct EveryKey {
  // `has_classes`: a warp can tell whether its rows see all, some or none of a block (`class_of`). `has_tile_list`: a
  // list names the key blocks of a tile.
  static constexpr bool all = true, has_classes = false, has_tile_list = false;
  FMHA_DEVICE bool sees(const SeqSpan&, int32_t, int32_t, int32_t) const { return true; }
};

// Whether keys come from a token's list: key n is the key at place n of the list, and a tile has one query.
template <class Keys>
FMHA_DEVICE constexpr bool are_of_token() {
  if constexpr (requires { Keys::of_token; }) return Keys::of_token;
  else return false;
}

// Bytes of a key's row if a cache has rows of bytes (cache_rows.h), otherwise 0.
template <class Keys>
FMHA_DEVICE constexpr int row_bytes_of() {
  if constexpr (requires { Keys::row_bytes; }) return Keys::row_bytes;
  else return 0;
}

// The sequence's query that query i of a tile stands for.
template <class Keys>
FMHA_DEVICE int32_t query_of_sequence(const Keys& keys, int32_t i) {
  if constexpr (are_of_token<Keys>()) return keys.list.i;
  else return i;
}

// Offset of the row of key j, which must exist, in one head of K or V, for elements of this size.
template <int32_t bytes, class Keys>
FMHA_DEVICE int64_t offset_of_key(const Keys& keys, const FwdParams& p, const View& view, KvKind layout,
                                  const SeqSpan& span, int32_t j, int32_t head) {
  if constexpr (are_of_token<Keys>()) return keys.list.template offset<bytes>(view, keys.list.place(layout, j), head);
  else return row_offset(view, kv_row(p, layout, span, j), head);
}

}  // namespace fmha
