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

// The block table's entry of a key of one cache, as it is read: nothing waits for it until it is a row. 0 where the row
// takes none.
FMHA_DEVICE int32_t page_of(const TokenList& list, KvKind layout, int32_t key) {
  if (layout != KvKind::Paged || key < 0 || list.lists.addresses) return 0;
  return list.p.block_table[list.span.i_batch * list.p.block_table_batch + key / list.p.page_size];
}
// The entry of the key at a place. `layout`: of the first cache.
template <KvKind layout>
FMHA_DEVICE int32_t page_with(const TokenList& list, int32_t key, int32_t) {
  if constexpr (layout != KvKind::Paged) return 0;
  return page_of(list, layout, key);
}
template <KvKind layout>
FMHA_DEVICE int32_t page_with(const TwoCaches& both, int32_t key, int32_t place) {
  return both.is_second(place) ? page_of(both.second.list, both.second_layout, key)
                               : page_of(both.first.list, layout, key);
}

// The row of a key that is there, of one cache, whose entry of the block table was loaded.
FMHA_DEVICE KvRow row_of_page(const TokenList& list, KvKind layout, int32_t key, int32_t page) {
  if (layout != KvKind::Paged) return kv_row(list.p, layout, list.span, key);
  const int32_t of_address = key / list.p.page_size;
  const int32_t i_page = list.lists.addresses ? of_address : clamp(page, 0, list.p.num_pages - 1);
  return {i_page, key - of_address * list.p.page_size};
}
// Address of the row of a key that is there, at a place, in K or V, as `view` is of the first cache.
template <class Pointer>
FMHA_DEVICE Pointer address_with(const TokenList& list, KvKind layout, const View& view, int32_t key, int32_t page,
                                 int32_t) {
  return static_cast<Pointer>(view.data) + row_offset(view, row_of_page(list, layout, key, page), list.i_head_kv);
}
template <class Pointer>
FMHA_DEVICE Pointer address_with(const TwoCaches& both, KvKind layout, const View& view, int32_t key, int32_t page,
                                 int32_t place) {
  if (!both.is_second(place)) return address_with<Pointer>(both.first.list, layout, view, key, page, place);
  const TokenList& second = both.second.list;
  const View& other = &view == &both.first.list.p.v ? second.p.v : second.p.k;
  return address_with<Pointer>(second, both.second_layout, other, key, page, place);
}

// Addresses of the row of bytes of a key that is there, at a place; it lies in a page.
template <int bytes>
FMHA_DEVICE BytesOfRow bytes_with(const TokenList& list, int32_t key, int32_t page, int32_t) {
  return list.template bytes_of<bytes>(row_of_page(list, KvKind::Paged, key, page));
}
template <int bytes>
FMHA_DEVICE BytesOfRow bytes_with(const TwoCaches& both, int32_t key, int32_t page, int32_t place) {
  if (both.is_second(place)) return bytes_with<bytes>(both.second.list, key, page, place);
  return bytes_with<bytes>(both.first.list, key, page, place);
}

}  // namespace fmha
