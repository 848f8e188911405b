// Work of a CTA: its rows of a sequence and head, and its keys. Over lists of keys its rows are heads of one token, and
// a key is a place in the token's list.
#pragma once
#include <fmha/common/part_keys.cuh>
#include <fmha/common/shares.cuh>
#include <fmha/common/token_tile.cuh>
#include <fmha/common/two_cache_keys.cuh>
#include <fmha/mask.h>
#include <fmha/seq.h>
#include <fmha/sm90/mla/config.cuh>

namespace fmha::mla {

// The phase of the barriers of a block's slot.
template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE uint32_t phase_of(const Work& work, int32_t block) {
  using P = Plan<spec, tile>;
  uint32_t turn = P::turn_of(block);
  if constexpr (counts_turns(tile)) turn += P::v_in_k ? work.turns.of_parity(block) : work.turns.of_all();
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
  set_head_and_part<spec, in_parts>(work, p, schedule, heads_and_parts);
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
    const int32_t part_keys = keys_of_a_part(seqlen_k, schedule.num_parts, folded * kKeys);
    const int32_t begin = work.part * part_keys;
    if (work.part > 0 && begin >= seqlen_k) work.has_rows = false;
    work.part_keys = {min(begin, seqlen_k), min(begin + part_keys, seqlen_k)};
    const int32_t own_keys = part_keys / folded, own = begin + at % folded * own_keys;
    keys = {max(keys.begin, min(own, seqlen_k)), min(keys.end, min(own + own_keys, seqlen_k))};
  }
  set_blocks<kKeys>(work, keys);
  return work;
}

// Fields of a tile that a share is computed from.
struct TileOfShares {
  int32_t block_n, shares, split_keys;
};
FMHA_DEVICE consteval TileOfShares tile_of_shares(const Sm90MlaTile& tile) {
  return {kKeys, tile.shares, tile.split_keys};
}

// A CTA's share. `leaves`: whether this warp, of the last CTA, stores for the merge how shares were dealt.
template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE LeftOfShare share_of_cta(const FwdParams& p, const MlaSchedule& schedule, bool leaves) {
  TileSchedule tiles = {};
  tiles.num_heads = p.batch * p.num_heads_kv;
  tiles.num_m_blocks = schedule.num_m_blocks;
  const Share<spec, tile_of_shares(tile)> share{p, tiles, leaves};
  return {share.i_batch, share.at - share.begin, share.end - share.at};
}

// Takes the next part from what is left of a share: without rows if the tile has none of the sequence's. A tile of rows
// that see none of the part's keys has no blocks: the merge reads all parts of a tile.
template <FwdSpec spec, Sm90MlaTile tile>
FMHA_DEVICE void take_part(const FwdParams& p, const MlaSchedule& schedule, PartOfShare& next) {
  auto& [work, left] = next;
  const int32_t i_batch = left.i_batch, tiles = p.num_heads_kv * schedule.num_m_blocks;
  const BlocksOfTile blocks = blocks_of_tile<spec, tile_of_shares(tile)>(p, i_batch);
  const int32_t first = blocks.first + left.skipped, count = min(blocks.count - left.skipped, left.num_blocks);
  left = {i_batch + 1, 0, left.num_blocks - count};
  const int32_t stretch = blockIdx.x / tiles, in_sequence = blockIdx.x - stretch * tiles;
  work.part = part_of_tile(stretch, i_batch, tiles, in_sequence);
  work.i_head_kv = in_sequence / schedule.num_m_blocks;
  work.first_row = (in_sequence - work.i_head_kv * schedule.num_m_blocks) * kRows;
  work.span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
  const int32_t seqlen_q = work.span.seqlen_q, seqlen_k = work.span.seqlen_k, num_rows = seqlen_q * p.gqa_ratio;
  work.end_query = seqlen_q;
  work.has_rows = work.first_row < num_rows;
  if (!work.has_rows) return;
  work.band = resolve_band(p.mask, seqlen_q, seqlen_k);
  const int32_t last_row = min(work.first_row + kRows, num_rows) - 1;
  const Range own = {first * kKeys, (first + count) * kKeys};
  const Range seen = k_range(work.band, {Work::query_of(p, work.first_row), Work::query_of(p, last_row) + 1}, seqlen_k);
  work.part_keys = {min(own.begin, seqlen_k), min(own.end, seqlen_k)};
  set_blocks<kKeys>(work, {max(seen.begin, own.begin), min(seen.end, own.end)});
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

// Work of a tile over a token's keys.
template <FwdSpec spec, Sm90MlaTile tile, class Lists>
FMHA_DEVICE Work resolve_token(const FwdParams& p, const MlaSchedule& schedule, const Lists& lists, int32_t index) {
  const auto list_of = [&](const Work& work) { return keys_of_token<spec, tile.row_bytes>(p, lists, work).list; };
  return work_of_token<spec, kRows, kKeys, (tile.split_keys > 0), Work>(p, schedule, index, 0, list_of);
}

}  // namespace fmha::mla
