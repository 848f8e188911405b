// The list of keys of one query token and kv head: number of entries, the keys that they name, and their places.
#pragma once
#include <fmha/cache_rows.h>
#include <fmha/lists.h>
#include <fmha/mask.h>
#include <fmha/seq.h>

namespace fmha {

struct TokenList {
  const FwdParams& p;
  const ListParams& lists;
  SeqSpan span;  // of the sequence
  MaskBand band;
  int32_t i, i_head_kv;

  // Number of the token's row of Q and O in the tensor's batch.
  FMHA_DEVICE int64_t token() const { return int64_t(span.q_row) + i; }

  // Number of keys that the list's entries in use may name, absent ones included.
  FMHA_DEVICE int32_t count() const {
    int32_t used = lists.topk;
    if (lists.topk_length) {
      const int64_t at =
          lists.length_per_token ? int64_t(span.storage_batch) * p.seqlen_q + token() : int64_t(span.i_batch);
      used = clamp(((const int32_t FMHA_GLOBAL*)lists.topk_length)[at], 0, lists.topk);
    }
    return used * lists.block;
  }

  // The key at a place of the list; -1 if it is absent or hidden.
  FMHA_DEVICE int32_t key(int32_t at) const { return key_of(entry(at), at); }

  // The raw entry with the key at a place, as loaded: converting it to a key later lets the load overlap other work.
  FMHA_DEVICE int32_t entry(int32_t at) const {
    const int64_t list = span.storage_batch * lists.batch + token() * lists.row + i_head_kv * lists.head;
    return ((const int32_t FMHA_GLOBAL*)lists.indices)[list + entry_at(at)];
  }
  FMHA_DEVICE int32_t entry_at(int32_t at) const { return lists.block == 1 ? at : at / lists.block; }

  // The key at a place whose raw entry was loaded.
  FMHA_DEVICE int32_t key_of(int32_t entry, int32_t at) const {
    const int64_t j = int64_t(entry) * lists.block + (at - entry_at(at) * lists.block);
    const int64_t end = lists.addresses ? int64_t(p.num_pages) * p.page_size : int64_t(span.seqlen_k);
    if (entry < 0 || j >= end) return -1;
    // An address has no position, so no band hides it.
    return lists.addresses || visible(band, i, int32_t(j)) ? int32_t(j) : -1;
  }

  FMHA_DEVICE KvRow row_of(KvKind layout, int32_t j) const {
    if (lists.addresses) return {j / p.page_size, j % p.page_size};
    return kv_row(p, layout, span, j);
  }

  // Place in memory of the key at a place of the list: batch -1 if it is absent.
  FMHA_DEVICE KvRow place(KvKind layout, int32_t at) const {
    const int32_t j = key(at);
    return j < 0 ? KvRow{-1, 0} : row_of(layout, j);
  }

  // Offset of a place's row in K or V, of one head.
  template <int32_t bytes>
  FMHA_DEVICE int64_t offset(const View& view, KvRow at, int32_t head) const {
    return row_offset(view, at, head);
  }

  // Addresses of the row at a place, in a cache of rows of bytes.
  template <int bytes>
  FMHA_DEVICE BytesOfRow bytes_of(KvRow at) const { return bytes_of_row<bytes>(p.k, p.page_size, at); }
};

}  // namespace fmha
