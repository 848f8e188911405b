// Lists of keys: a work item has heads of one token and kv head, and a part of the token's list.
// The loop runs over places in the list; the entry at a place names the key to load, or no key.
//
// The entry of a place is read two tiles before its row, and the block table's entry one tile before. For
// a place without a key the lane loads its previous row again, so that every lane loads cache memory and
// no branch has loads on one side alone. The row's score is hidden, and its V becomes 0 in registers.
#pragma once
#include <fmha/cdna/decode/pieces.h>
#include <fmha/isa/sched.h>
#include <fmha/token_list.h>

namespace fmha::cdna::decode {

// The list of token i of a sequence; `span` is that of the call.
FMHA_DEVICE TokenList list_of(const FwdParams& p, const SeqSpan& span, int32_t i, int32_t i_head_kv) {
  const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);
  return {p, reload_params<ListDecodeParams>().lists, span, band, i, i_head_kv};
}

// The list of keys of the token whose work item this is.
FMHA_DEVICE TokenList list_of(const FwdParams& p, const Job& job) {
  SeqSpan span = job.span;
  span.seqlen_k = job.nameable;
  return list_of(p, span, job.queries.begin, job.i_head_kv);
}

// Number of list entries to process: 0 if a list can name no key.
FMHA_DEVICE int32_t places_of(const TokenList& list) {
  const bool has_keys = list.lists.addresses ? list.p.num_pages > 0 : list.span.seqlen_k > 0;
  return has_keys ? v_readfirstlane_b32(list.count()) : 0;
}

// Work item `at` of the launch, with at most `rows` heads. Neighbours have other
// heads of the same token. Returns false if the token or the part does not exist.
// `Places`: ListPlaces, or TwoPlaces.
template <int rows, class Places>
FMHA_DEVICE bool list_job(const CdnaDecodeParams& params, int32_t at, Job& job) {
  const FwdParams& p = params.call.fwd;
  const int32_t rest = at / params.row_blocks, number = rest % params.num_parts, head_of_token = rest / params.num_parts;
  const int32_t i_token = head_of_token / p.num_heads_kv, i = i_token % p.seqlen_q;
  job.i_head_kv = head_of_token % p.num_heads_kv;
  job.span = span_of(p, i_token / p.seqlen_q);
  if (i >= job.span.seqlen_q) return false;
  job.layout = layout_of(p);
  job.band = {kUnboundedLo, kUnboundedHi, 0};
  job.first_row = i * p.gqa_ratio + at % params.row_blocks * rows;
  job.num_rows = (i + 1) * p.gqa_ratio;
  job.queries = {i, i + 1};
  job.nameable = job.span.seqlen_k;
  job.span.seqlen_k = Places::count(p, job.span, i, job.i_head_kv);
  // The merge reads a part of each token even if its list is empty.
  const int64_t begin = int64_t(number) * params.part_keys;
  if (number > 0 && begin >= job.span.seqlen_k) return false;
  job.part = number * p.batch + job.span.i_batch;
  job.keys = {int32_t(begin), int32_t(min<int64_t>(begin + params.part_keys, job.span.seqlen_k))};
  job.sinks = job.keys;
  return true;
}

// Places in a token's list, one tile after another; SequencePlaces has those of a sequence.
class ListPlaces : public OneCache {
  int32_t entry_;    // as the list has it, of the lane's place in the tile after the next
  KeyPlaces next_;   // of its place in the next tile; the key is negative where there is none
  KvRow row_;        // that the lane has had last
  uint32_t shown_;   // a bit for each place of the tile that `row` was asked for: whether it names a key

 public:
  // Number of places of a token; `span` is the call's sequence.
  static FMHA_DEVICE int32_t count(const FwdParams& p, const SeqSpan& span, int32_t i, int32_t i_head_kv) {
    return places_of(list_of(p, span, i, i_head_kv));
  }

  template <class Tiles>
  FMHA_DEVICE ListPlaces(const FwdParams& p, const Job& job, const Tiles& tiles, int lane) {
    // A list that is walked has at least one key, so row 0 exists and may be loaded.
    row_ = job.layout == KvKind::Paged || is_of_addresses() ? KvRow{0, 0} : KvRow{job.span.i_batch, job.span.k_row};
    entry_ = list_of(p, job).entry(place(job, tiles, 0, lane));
  }

  // Looks up the keys that tile n's entries name, and reads the entries of the next tile.
  template <class Tiles>
  FMHA_DEVICE void find(const FwdParams& p, const Job& job, const Tiles& tiles, int32_t n, int lane) {
    const TokenList list = list_of(p, job);
    const int32_t key = list.key_of(entry_, place(job, tiles, n, lane));
    const bool is_in_part = tiles.first_key(min(n, tiles.count - 1)) + lane < job.keys.end;
    next_.key = is_in_part ? key : -1;
    next_.page = 0;
    if (job.layout == KvKind::Paged && !is_of_addresses()) next_.page = KeyPlaces::page_of(p, job, max(next_.key, 0));
    entry_ = list.entry(place(job, tiles, n + 1, lane));
  }

  FMHA_DEVICE KvRow row(const FwdParams& p, const Job& job) {
    const bool is_there = next_.key >= 0;
    const uint32_t key = uint32_t(max(next_.key, 0));
    KvRow row = KeyPlaces{int32_t(key), next_.page}.row(p, job);
    if (is_of_addresses()) row = {int32_t(key / uint32_t(p.page_size)), int32_t(key % uint32_t(p.page_size))};
    row_ = {is_there ? row.batch : row_.batch, is_there ? row.row : row_.row};
    shown_ = uint32_t(v_cmp_ballot(is_there));
    return row_;
  }
  FMHA_DEVICE uint32_t shown() const { return shown_; }

 private:
  static FMHA_DEVICE bool is_of_addresses() { return reload_params<ListDecodeParams>().lists.addresses != 0; }

  // The lane's place in tile n, or in the last tile; beyond the part, the part's last place.
  template <class Tiles>
  static FMHA_DEVICE int32_t place(const Job& job, const Tiles& tiles, int32_t n, int lane) {
    return min(tiles.first_key(min(n, tiles.count - 1)) + lane, job.keys.end - 1);
  }
};

}  // namespace fmha::cdna::decode
