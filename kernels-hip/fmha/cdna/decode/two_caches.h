// Keys of two caches in one softmax: those that a token sees of the first, then those of the second. A list selects
// each cache's keys, or intervals and (in the first cache) the band. Places run over both, as over one list (list.h).
//
// An entry is read two tiles before its row, as in list.h. An entry is a list's
// or, of a cache without a list, the key itself.
#pragma once
#include <fmha/cdna/decode/list.h>
#include <fmha/two_caches.h>

namespace fmha::cdna::decode {

FMHA_DEVICE const TwoCachesParams& both_params() { return reload_params<TwoDecodeParams>().caches; }

// Whether a list of this cache can name a key.
FMHA_DEVICE bool can_name(const CacheKeys& keys) {
  const TokenList& list = keys.list;
  return list.lists.whole || (list.lists.addresses ? list.p.num_pages > 0 : list.span.seqlen_k > 0);
}

// The keys of both caches that token i may see. All lanes compute equal numbers.
FMHA_DEVICE TwoCaches both_of(const FwdParams& p, const SeqSpan& span, int32_t i, int32_t i_head_kv) {
  const QLayout q_layout = p.cu_seqlens_q ? QLayout::Packed : QLayout::Batch;
  TwoCaches both = TwoCaches::of(p, both_params(), q_layout, span, i, i_head_kv);
  both.first.num = v_readfirstlane_b32(can_name(both.first) ? both.first.num : 0);
  both.second.num = v_readfirstlane_b32(can_name(both.second) ? both.second.num : 0);
  return both;
}

// Places of a token's keys in both caches, one tile after another, as ListPlaces has those of a list. A row of the
// second cache is stored as its complement.
class TwoPlaces {
  // Row and length of the second cache's sequence, and the first keys that are walked where a cache has no list.
  int32_t second_row_, second_keys_, first_begin_, second_begin_;
  int32_t num_first_;  // places of the first cache
  int32_t entry_;      // of the lane's place in the tile after the next
  int32_t key_, page_; // of its place in the next tile; the key is negative where there is none
  int32_t is_second_;  // whether this place is of the second cache
  KvRow row_;          // that the lane has had last
  uint32_t shown_;     // a bit for each place of the tile that `row` was asked for: whether it has a key

 public:
  static FMHA_DEVICE int32_t count(const FwdParams& p, const SeqSpan& span, int32_t i, int32_t i_head_kv) {
    return both_of(p, span, i, i_head_kv).count();
  }

  template <class Tiles>
  FMHA_DEVICE TwoPlaces(const FwdParams& p, const Job& job, const Tiles& tiles, int lane) {
    SeqSpan span = job.span;
    span.seqlen_k = job.nameable;
    const TwoCaches both = both_of(p, span, job.queries.begin, job.i_head_kv);
    second_row_ = v_readfirstlane_b32(both.second.list.span.k_row);
    second_keys_ = v_readfirstlane_b32(both.second.list.span.seqlen_k);
    first_begin_ = v_readfirstlane_b32(both.first.positions.begin);
    second_begin_ = v_readfirstlane_b32(both.second.positions.begin);
    num_first_ = both.first.num;
    // At least one cache has keys, since there are places; its row 0 exists.
    const FwdParams& second = both_params().second.call;
    const bool in_pages = num_first_ > 0 ? of_pages(p, 0) : of_pages(second, 1);
    row_ = in_pages ? KvRow{0, 0} : KvRow{job.span.i_batch, num_first_ > 0 ? job.span.k_row : second_row_};
    if (num_first_ == 0) row_.row = ~row_.row;
    entry_ = entry(keys_of(p, job), place(job, tiles, 0, lane));
  }

  // Looks up the keys that tile n's entries name, and reads the entries of the next tile.
  template <class Tiles>
  FMHA_DEVICE void find(const FwdParams& p, const Job& job, const Tiles& tiles, int32_t n, int lane) {
    const TwoCaches both = keys_of(p, job);
    const int32_t at = place(job, tiles, n, lane);
    is_second_ = at >= num_first_;
    const int32_t key = is_second_ ? key_of(both.second, entry_, at - num_first_) : key_of(both.first, entry_, at);
    const bool is_in_part = tiles.first_key(min(n, tiles.count - 1)) + lane < job.keys.end;
    key_ = is_in_part ? key : -1;
    page_ = 0;
    const FwdParams& second = both_params().second.call;
    if (of_table(p, 0) && key_ >= 0 && !is_second_) page_ = page_of(p, job.span.i_batch, key_);
    if (of_table(second, 1) && key_ >= 0 && is_second_) page_ = page_of(second, job.span.i_batch, key_);
    entry_ = entry(both, place(job, tiles, n + 1, lane));
  }

  FMHA_DEVICE KvRow row(const FwdParams& p, const Job& job) {
    const bool is_there = key_ >= 0;
    const FwdParams& second = both_params().second.call;
    KvRow row = row_in(p, 0, job.span.i_batch, job.span.k_row);
    const KvRow other = row_in(second, 1, job.span.i_batch, second_row_);
    if (is_second_) row = {other.batch, ~other.row};
    row_ = {is_there ? row.batch : row_.batch, is_there ? row.row : row_.row};
    shown_ = uint32_t(v_cmp_ballot(is_there));
    return row_;
  }
  FMHA_DEVICE uint32_t shown() const { return shown_; }

  // Distance in bytes from the first element of the first cache's K, or V, to a row.
  template <bool of_v, int bytes>
  static FMHA_DEVICE int64_t offset(const FwdParams& p, KvRow at, int32_t i_head_kv) {
    const FwdParams& second = both_params().second.call;
    const View &own = of_v ? p.v : p.k, &other = of_v ? second.v : second.k;
    const int64_t apart = reinterpret_cast<int64_t>(other.data) - reinterpret_cast<int64_t>(own.data);
    const int64_t in_first = row_offset(own, {at.batch, max(at.row, 0)}, i_head_kv) * bytes;
    const int64_t in_second = apart + row_offset(other, {at.batch, max(~at.row, 0)}, i_head_kv) * bytes;
    return at.row >= 0 ? in_first : in_second;
  }

  // A row of a cache of rows of bytes.
  template <int bytes>
  static FMHA_DEVICE BytesOfRow bytes_of(const FwdParams& p, KvRow at) {
    const FwdParams& second = both_params().second.call;
    const BytesOfRow first = bytes_of_row<bytes>(p.k, p.page_size, {at.batch, max(at.row, 0)});
    const BytesOfRow other = bytes_of_row<bytes>(second.k, second.page_size, {at.batch, max(~at.row, 0)});
    return at.row >= 0 ? first : other;
  }

 private:
  static FMHA_DEVICE const ListParams& lists_of(int cache) {
    return cache == 0 ? both_params().lists : both_params().second.lists;
  }
  // Whether a cache's rows lie in pages, and whether its block table says in which.
  static FMHA_DEVICE bool of_pages(const FwdParams& p, int cache) {
    return p.block_table != nullptr || lists_of(cache).addresses != 0;
  }
  static FMHA_DEVICE bool of_table(const FwdParams& p, int cache) {
    return p.block_table != nullptr && lists_of(cache).addresses == 0;
  }

  static FMHA_DEVICE int32_t page_of(const FwdParams& p, int32_t i_batch, int32_t key) {
    const int64_t entry = i_batch * p.block_table_batch + uint32_t(key) / uint32_t(p.page_size);
    return ((const int32_t FMHA_GLOBAL*)p.block_table)[entry];
  }

  // The row of the lane's key in its cache.
  FMHA_DEVICE KvRow row_in(const FwdParams& p, int cache, int32_t i_batch, int32_t first_row) const {
    const uint32_t key = uint32_t(max(key_, 0)), page_size = uint32_t(max(p.page_size, 1));
    const KvRow of_address = {int32_t(key / page_size), int32_t(key % page_size)};
    if (lists_of(cache).addresses != 0) return of_address;
    if (p.block_table != nullptr) return {clamp(page_, 0, p.num_pages - 1), of_address.row};
    return {i_batch, first_row + int32_t(key)};
  }

  // The keys of both caches, from the numbers that the constructor has found.
  FMHA_DEVICE TwoCaches keys_of(const FwdParams& p, const Job& job) const {
    const TwoCachesParams& caches = both_params();
    const KeySetParams& of_second = caches.second;
    SeqSpan span = job.span, other = job.span;
    span.seqlen_k = job.nameable;
    other.k_row = second_row_, other.seqlen_k = second_keys_;
    const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);
    const MaskBand all = resolve_band(of_second.call.mask, other.seqlen_q, other.seqlen_k);
    const TokenList first = {p, caches.lists, span, band, job.queries.begin, job.i_head_kv};
    const TokenList second = {of_second.call, of_second.lists, other, all, job.queries.begin, job.i_head_kv};
    return {{first, caches.masks, {first_begin_, 0}, num_first_},
            {second, of_second.masks, {second_begin_, 0}, 0}, KvKind::Strided, caches.lists, job.queries.begin};
  }

  // The list's entry for a place of a cache, and in the next function the key that it stands for.
  static FMHA_DEVICE int32_t entry_in(const CacheKeys& keys, int32_t at) {
    return keys.list.lists.whole ? keys.positions.begin + at : keys.list.entry(at);
  }
  static FMHA_DEVICE int32_t key_of(const CacheKeys& keys, int32_t entry, int32_t at) {
    return keys.list.lists.whole ? keys.key(at) : keys.list.key_of(entry, at);
  }
  FMHA_DEVICE int32_t entry(const TwoCaches& both, int32_t at) const {
    if (at >= num_first_) return entry_in(both.second, at - num_first_);
    return entry_in(both.first, at);
  }

  // The lane's place in tile n, or in the last tile; beyond the part, the part's last place.
  template <class Tiles>
  static FMHA_DEVICE int32_t place(const Job& job, const Tiles& tiles, int32_t n, int lane) {
    return min(tiles.first_key(min(n, tiles.count - 1)) + lane, job.keys.end - 1);
  }
};

}  // namespace fmha::cdna::decode
