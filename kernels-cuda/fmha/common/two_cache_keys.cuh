// Keys of one token in two caches, for tiled kernels: the first cache's keys come before the second's.
#pragma once
#include <fmha/common/token_keys.cuh>
#include <fmha/two_caches.h>

namespace fmha {

// Loads the list's entry for a place without waiting for it; `key_with` turns it into a key. For a cache without a list
// the entry is the position itself.
FMHA_DEVICE int32_t entry_at(const TokenList& list, int32_t place) { return list.entry(place); }
FMHA_DEVICE int32_t entry_at(const CacheKeys& keys, int32_t place) {
  return keys.list.lists.whole ? keys.positions.begin + place : keys.list.entry(place);
}
FMHA_DEVICE int32_t entry_at(const TwoCaches& both, int32_t place) {
  return both.is_second(place) ? entry_at(both.second, place - both.first.num) : entry_at(both.first, place);
}

// The key at a place whose raw entry was loaded; -1 if it is absent or hidden.
FMHA_DEVICE int32_t key_with(const TokenList& list, int32_t entry, int32_t place) { return list.key_of(entry, place); }
FMHA_DEVICE int32_t key_with(const CacheKeys& keys, int32_t entry, int32_t place) {
  if (keys.list.lists.whole) return entry < 0 ? -1 : keys.key(place);
  return keys.list.key_of(entry, place);
}
FMHA_DEVICE int32_t key_with(const TwoCaches& both, int32_t entry, int32_t place) {
  return both.is_second(place) ? key_with(both.second, entry, place - both.first.num)
                               : key_with(both.first, entry, place);
}

}  // namespace fmha
