// Keys of one query token and kv head in two caches of one softmax: those of the first, then those
// of the second. A list selects each cache's keys, or intervals and (in the first cache) the band.
#pragma once
#include <fmha/mask_data.h>
#include <fmha/token_list.h>
#include <fmha/two_caches_params.h>

namespace fmha {

// The keys of one cache that a query sees.
struct CacheKeys {
  TokenList list;
  const MaskDataParams& masks;
  Range positions;  // those that are walked where there is no list
  int32_t num;

  FMHA_DEVICE static CacheKeys of(const TokenList& list, const MaskDataParams& masks) {
    CacheKeys keys = {list, masks, {0, 0}, 0};
    if (list.lists.whole) {
      keys.positions = keys.walked();
      keys.num = max(keys.positions.end - keys.positions.begin, 0);
    } else {
      keys.num = list.count();
    }
    return keys;
  }

  // Range of positions that the band and the intervals show. Sink columns lie before the band.
  FMHA_DEVICE Range walked() const {
    Range range = row_range(list.band, list.i, list.span.seqlen_k);
    if (list.band.sink_columns > 0) range.begin = 0;
    if (masks.intervals.data) {
      const int32_t head = list.i_head_kv * list.p.gqa_ratio / masks.intervals_ratio, row = list.span.q_row + list.i;
      int32_t end = 0;
      for (int32_t at = 0; at < masks.endpoints; ++at)
        end = max(end, DataMasks::word(masks.intervals, list.span.storage_batch, head, row, at));
      range.begin = max(range.begin, DataMasks::word(masks.intervals, list.span.storage_batch, head, row, 0));
      range.end = min(range.end, end);
    }
    return range;
  }

  // The key at a place below `num`; -1 if it is absent or hidden.
  FMHA_DEVICE int32_t key(int32_t at) const {
    if (!list.lists.whole) return list.key(at);
    const int32_t j = positions.begin + at;
    if (!visible(list.band, list.i, j)) return -1;
    if (masks.intervals.data &&
        !DataMasks{masks}.in_intervals(list.span, list.i_head_kv * list.p.gqa_ratio, list.i, j))
      return -1;
    return j;
  }
};

struct TwoCaches {
  CacheKeys first, second;
  KvKind second_layout;
  const ListParams& lists;
  int32_t i;

  FMHA_DEVICE static TwoCaches of(const FwdParams& p, const TwoCachesParams& caches, QLayout q_layout,
                                  const SeqSpan& span, int32_t i, int32_t i_head_kv) {
    const KeySetParams& of_second = caches.second;
    const KvKind layout = of_second.is_paged ? KvKind::Paged : of_second.is_packed ? KvKind::Packed : KvKind::Strided;
    const SeqSpan other = resolve_seq(of_second.call, q_layout, layout, span.i_batch);
    const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);
    const MaskBand all = resolve_band(of_second.call.mask, other.seqlen_q, other.seqlen_k);
    return {CacheKeys::of({p, caches.lists, span, band, i, i_head_kv}, caches.masks),
            CacheKeys::of({of_second.call, of_second.lists, other, all, i, i_head_kv}, of_second.masks), layout,
            caches.lists, i};
  }

  FMHA_DEVICE int32_t count() const { return first.num + second.num; }
  FMHA_DEVICE bool is_second(int32_t at) const { return at >= first.num; }

  // The key at a place, in either cache; -1 if it is absent or hidden.
  FMHA_DEVICE int32_t key(int32_t at) const {
    return is_second(at) ? second.key(at - first.num) : first.key(at);
  }

  // Place of a list entry's key: batch -1 if absent. A row of the second cache is stored as its complement.
  FMHA_DEVICE KvRow place(KvKind layout, int32_t at) const {
    const int32_t j = key(at);
    if (j < 0) return {-1, 0};
    if (!is_second(at)) return first.list.row_of(layout, j);
    const KvRow row = second.list.row_of(second_layout, j);
    return {row.batch, ~row.row};
  }

  // Offset of a place's row from the first element of the first cache's K or V, `view`, for elements of this size.
  template <int32_t bytes>
  FMHA_DEVICE int64_t offset(const View& view, KvRow at, int32_t head) const {
    if (at.row >= 0) return row_offset(view, at, head);
    const FwdParams& own = second.list.p;
    const View& other = &view == &first.list.p.v ? own.v : own.k;
    const int64_t apart = (reinterpret_cast<int64_t>(other.data) - reinterpret_cast<int64_t>(view.data)) / bytes;
    return apart + row_offset(other, KvRow{at.batch, ~at.row}, head);
  }

  // Addresses of the row at a place, in caches of rows of bytes.
  template <int bytes>
  FMHA_DEVICE BytesOfRow bytes_of(KvRow at) const {
    if (at.row >= 0) return first.list.template bytes_of<bytes>(at);
    return second.list.template bytes_of<bytes>({at.batch, ~at.row});
  }
};

}  // namespace fmha
