// Work of a pair of CTAs: its rows of a sequence and kv head, and its keys. Over lists of keys its rows are heads of
// one token, and a key is a place in the token's list.
#pragma once
#include <fmha/common/part_keys.cuh>
#include <fmha/common/two_cache_keys.cuh>
#include <fmha/ptx/barrier.cuh>
#include <fmha/mask.h>
#include <fmha/seq.h>
#include <fmha/sm100/mla/config.cuh>

namespace fmha::sm100::mla {

struct Work {
  SeqSpan span;
  MaskBand band;
  int32_t i_head_kv, part;
  int32_t first_row;   // of the CTA
  int32_t end_query;   // of the rows; those of queries from here on are not stored
  Range part_keys;     // the part's, or all
  int32_t end;         // keys from here on are seen by no row of the pair
  int32_t last_block;  // blocks go down from this one,
  int32_t num_blocks;  // this many; 0 where no row sees a key
  bool has_rows;       // of the pair; else there is nothing to do

  // The query of a row, which is (query, head of the kv head's group).
  FMHA_DEVICE static int32_t query_of(const FwdParams& p, int32_t row) { return row / p.gqa_ratio; }
  FMHA_DEVICE int32_t head_of(const FwdParams& p, int32_t row, int32_t i) const {
    return i_head_kv * p.gqa_ratio + row - i * p.gqa_ratio;
  }
};

// Tiles of rows of a part lie side by side, so that pairs that start together share their keys in the L2.
template <FwdSpec spec, Sm100MlaTile tile>
FMHA_DEVICE Work resolve(const FwdParams& p, const MlaSchedule& schedule, int32_t index) {
  constexpr bool in_parts = tile.split_keys > 0;
  Work work;
  const int32_t heads_and_parts = index / schedule.num_m_blocks, i_m = index - heads_and_parts * schedule.num_m_blocks;
  // Tiles that see most keys start first.
  const int32_t pair_row = (spec.mask == MaskKind::Full ? i_m : schedule.num_m_blocks - 1 - i_m) * kPairRows;
  const int32_t sequence_and_head = in_parts ? heads_and_parts / schedule.num_parts : heads_and_parts;
  work.part = heads_and_parts - sequence_and_head * (in_parts ? schedule.num_parts : 1);
  const int32_t i_batch = sequence_and_head / p.num_heads_kv;
  work.i_head_kv = sequence_and_head - i_batch * p.num_heads_kv;
  work.span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
  const int32_t seqlen_q = work.span.seqlen_q, seqlen_k = work.span.seqlen_k;

  work.first_row = pair_row + rank_in_pair() * kRows;
  work.end_query = seqlen_q;
  const int32_t num_rows = seqlen_q * p.gqa_ratio;
  work.has_rows = pair_row < num_rows;
  if (!work.has_rows) return work;
  const int32_t last_row = min(pair_row + kPairRows, num_rows) - 1;
  work.band = resolve_band(p.mask, seqlen_q, seqlen_k);
  const Range queries = {Work::query_of(p, pair_row), Work::query_of(p, last_row) + 1};
  Range keys = k_range(work.band, queries, seqlen_k);
  work.part_keys = {0, seqlen_k};
  if constexpr (in_parts) {
    // The merge knows how many parts a sequence has: one without keys has the first.
    const int32_t part_keys = keys_of_a_part(seqlen_k, schedule.num_parts, kKeys), begin = work.part * part_keys;
    if (work.part > 0 && begin >= seqlen_k) work.has_rows = false;
    work.part_keys = {min(begin, seqlen_k), min(begin + part_keys, seqlen_k)};
    keys = {max(keys.begin, work.part_keys.begin), min(keys.end, work.part_keys.end)};
  }
  work.end = keys.end;
  work.last_block = ceil_div(keys.end, kKeys) - 1;
  work.num_blocks = keys.empty() ? 0 : work.last_block + 1 - keys.begin / kKeys;
  return work;
}

// The keys of the token whose heads are a pair's rows.
template <FwdSpec spec, int row_bytes>
FMHA_DEVICE KeysOfToken<TokenList, row_bytes> keys_of_token(const FwdParams& p, const ListParams& lists,
                                                            const Work& work) {
  return {{p, lists, work.span, work.band, work.end_query - 1, work.i_head_kv}};
}
template <FwdSpec spec, int row_bytes>
FMHA_DEVICE KeysOfToken<TwoCaches, row_bytes> keys_of_token(const FwdParams& p, const TwoCachesParams& caches,
                                                            const Work& work) {
  return {TwoCaches::of(p, caches, spec.q_layout, work.span, work.end_query - 1, work.i_head_kv)};
}

// Tiles of a token lie side by side, so that their gathers meet in the L2. Every part of every token is a tile, one
// without keys too: the merge reads all of them.
// `lists`: a list's parameters, or those of two caches.
template <FwdSpec spec, Sm100MlaTile tile, class Lists>
FMHA_DEVICE Work resolve_token(const FwdParams& p, const MlaSchedule& schedule, const Lists& lists, int32_t index) {
  Work work;
  const int32_t heads_and_parts = index / schedule.num_m_blocks, i_m = index - heads_and_parts * schedule.num_m_blocks;
  const int32_t sequence_and_head = heads_and_parts / schedule.num_parts;
  work.part = heads_and_parts - sequence_and_head * schedule.num_parts;
  const int32_t i_batch = sequence_and_head / p.num_heads_kv;
  work.i_head_kv = sequence_and_head - i_batch * p.num_heads_kv;
  work.span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);

  const int32_t tiles_of_token = ceil_div(p.gqa_ratio, kPairRows), i = i_m / tiles_of_token;
  work.first_row = i * p.gqa_ratio + (i_m - i * tiles_of_token) * kPairRows + rank_in_pair() * kRows;
  work.end_query = i + 1;
  work.has_rows = i < work.span.seqlen_q;
  if (!work.has_rows) return work;
  work.band = resolve_band(p.mask, work.span.seqlen_q, work.span.seqlen_k);
  const int32_t count = keys_of_token<spec, tile.row_bytes>(p, lists, work).list.count();
  work.part_keys = {0, count};
  if constexpr (tile.split_keys > 0) {
    const int32_t part_keys = keys_of_a_part(schedule.most_keys, schedule.num_parts, kKeys);
    const int32_t begin = work.part * part_keys;
    work.part_keys = {min(begin, count), min(begin + part_keys, count)};
  }
  work.end = work.part_keys.end;
  work.last_block = ceil_div(work.end, kKeys) - 1;
  work.num_blocks = work.part_keys.empty() ? 0 : work.last_block + 1 - work.part_keys.begin / kKeys;
  return work;
}

// Leaves out the last blocks as long as no key is there, as at the end of a list that is not full. All threads of both
// CTAs of a pair come to the same number.
template <class List>
FMHA_DEVICE void leave_out_absent(Work& work, const List& list) {
  while (work.num_blocks > 0) {
    const int32_t place = work.last_block * kKeys + int32_t(threadIdx.x);
    const bool looks = threadIdx.x < kKeys && place >= work.part_keys.begin && place < work.end;
    const bool absent = !looks || list.key(place) < 0;
    if (!ptx::bar_red_and<kNumThreads>(kAbsentTold, absent)) break;
    --work.last_block;
    --work.num_blocks;
  }
}

}  // namespace fmha::sm100::mla
