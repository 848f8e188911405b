// Work of a CTA: its rows of a sequence and head, and its keys. Over lists of keys its rows are heads of one token, and
// a key is a place in the token's list.
#pragma once
#include <fmha/common/part_keys.cuh>
#include <fmha/common/two_cache_keys.cuh>
#include <fmha/mask.h>
#include <fmha/seq.h>
#include <fmha/sm90/mla/config.cuh>

namespace fmha::mla {

// Blocks of tiles that a CTA has walked before over lists of keys, by the parity of their place in the tile; and tiles.
// Barriers ask whether a count is odd: a register holds all three.
struct Turns {
  static constexpr uint32_t kOdd = 1, kTile = 2;
  uint32_t bits = 0;  // of even places, of odd ones, of tiles

  FMHA_DEVICE uint32_t of_parity(int32_t block) const { return bits >> block % 2; }
  FMHA_DEVICE uint32_t of_all() const { return bits ^ bits >> kOdd; }
  FMHA_DEVICE uint32_t tile() const { return bits >> kTile & 1; }
  FMHA_DEVICE void add(int32_t num_blocks) {
    bits ^= (uint32_t(num_blocks + 1) >> 1 & 1) | (uint32_t(num_blocks) >> 1 & 1) << kOdd | 1u << kTile;
  }
};

struct Work {
  SeqSpan span;
  MaskBand band;
  int32_t i_head_kv, first_row, part;
  int32_t end_query;   // of the rows; those of queries from here on are not stored
  Range part_keys;     // the part's, or all; of a cluster that folds its parts, all of these
  int32_t end;         // keys from here on are seen by no row of the cluster
  int32_t last_block;  // blocks go down from this one,
  int32_t num_blocks;  // this many; 0 where no row sees a key
  bool has_rows;       // of the cluster; else there is nothing to do
  Turns turns;         // before the tile; none without lists, where a CTA has one tile

  // The query of a row, which is (query, head of the kv head's group).
  FMHA_DEVICE static int32_t query_of(const FwdParams& p, int32_t row) { return row / p.gqa_ratio; }
  FMHA_DEVICE int32_t head_of(const FwdParams& p, int32_t row, int32_t i) const {
    return i_head_kv * p.gqa_ratio + row - i * p.gqa_ratio;
  }
};

// The phase of the barriers of a block's slot.
template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE uint32_t phase_of(const Work& work, int32_t block) {
  using P = Plan<spec, tile>;
  uint32_t turn = P::turn_of(block);
  if constexpr (tile.listed) turn += P::v_in_k ? work.turns.of_parity(block) : work.turns.of_all();
  return turn % 2;
}

// Tiles of rows of a part lie side by side, so that CTAs that start together share their keys in the L2, and those of
// a cluster in shared memory: these walk the blocks that any of their rows sees.
template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE Work resolve(const FwdParams& p, const MlaSchedule& schedule, int32_t at) {
  constexpr bool in_parts = tile.split_keys > 0;
  // Neighbouring CTAs that fold their parts have the same rows.
  constexpr int32_t folded = tile.fold_parts;
  const int32_t index = at / folded;
  constexpr int32_t cluster_rows = tile.cluster * kRows;
  Work work;
  const int32_t heads_and_parts = index / schedule.num_m_blocks, i_m = index - heads_and_parts * schedule.num_m_blocks;
  const int32_t clusters = schedule.num_m_blocks / tile.cluster, i_cluster = i_m / tile.cluster;
  // Tiles that see most keys start first.
  const int32_t cluster_row = (spec.mask == MaskKind::Full ? i_cluster : clusters - 1 - i_cluster) * cluster_rows;
  const int32_t sequence_and_head = in_parts ? heads_and_parts / schedule.num_parts : heads_and_parts;
  work.part = heads_and_parts - sequence_and_head * (in_parts ? schedule.num_parts : 1);
  const int32_t i_batch = sequence_and_head / p.num_heads_kv;
  work.i_head_kv = sequence_and_head - i_batch * p.num_heads_kv;
  work.span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
  const int32_t seqlen_q = work.span.seqlen_q, seqlen_k = work.span.seqlen_k;

  work.first_row = cluster_row + rank_in<tile>() * kRows;
  const int32_t num_rows = seqlen_q * p.gqa_ratio;
  work.end_query = seqlen_q;
  work.has_rows = cluster_row < num_rows;
  if (!work.has_rows) return work;
  const int32_t last_row = min(cluster_row + cluster_rows, num_rows) - 1;
  work.band = resolve_band(p.mask, seqlen_q, seqlen_k);
  const Range queries = {Work::query_of(p, cluster_row), Work::query_of(p, last_row) + 1};
  Range keys = k_range(work.band, queries, seqlen_k);
  work.part_keys = {0, seqlen_k};
  if constexpr (in_parts) {
    // The merge knows how many parts a sequence has: one without keys has the first.
    const int32_t part_keys = keys_of_a_part(seqlen_k, schedule.num_parts, folded * kKeys), begin = work.part * part_keys;
    if (work.part > 0 && begin >= seqlen_k) work.has_rows = false;
    work.part_keys = {min(begin, seqlen_k), min(begin + part_keys, seqlen_k)};
    const int32_t own_keys = part_keys / folded, own = begin + at % folded * own_keys;
    keys = {max(keys.begin, min(own, seqlen_k)), min(keys.end, min(own + own_keys, seqlen_k))};
  }
  work.end = keys.end;
  work.last_block = ceil_div(keys.end, kKeys) - 1;
  work.num_blocks = keys.empty() ? 0 : work.last_block + 1 - keys.begin / kKeys;
  return work;
}

// The keys of the token whose heads are a CTA's rows.
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
template <FwdSpec spec, Sm90MlaTile tile, class Lists>
FMHA_DEVICE Work resolve_token(const FwdParams& p, const MlaSchedule& schedule, const Lists& lists, int32_t index) {
  Work work;
  const int32_t heads_and_parts = index / schedule.num_m_blocks, i_m = index - heads_and_parts * schedule.num_m_blocks;
  const int32_t sequence_and_head = heads_and_parts / schedule.num_parts;
  work.part = heads_and_parts - sequence_and_head * schedule.num_parts;
  const int32_t i_batch = sequence_and_head / p.num_heads_kv;
  work.i_head_kv = sequence_and_head - i_batch * p.num_heads_kv;
  work.span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);

  const int32_t blocks_of_token = ceil_div(p.gqa_ratio, kRows), i = i_m / blocks_of_token;
  work.first_row = i * p.gqa_ratio + (i_m - i * blocks_of_token) * kRows;
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

}  // namespace fmha::mla
