// The forward kernel over lists of keys. A tile has query heads of one token and kv head, whose list is the keys that
// it walks; each block's rows of K and V are gathered from where the list says. Keys that are absent, or outside the
// band, are loaded as zeros and hidden.
//
// Tiles of a token are neighbours, so that the keys that they gather are found in the L2. Long lists of few tokens are
// cut into parts of `split_keys` entries; every part of every token writes an LSE, so that the merge reads all of them.
#pragma once
#include <fmha/common/token_keys.cuh>
#include <fmha/sm80/fwd/fwd.cuh>

namespace fmha::sm80 {

// Runs the forward over lists. `keys_of(i, i_head)` returns the keys of a query and kv head.
template <FwdSpec spec, Sm80Tile tile, class KeysOf>
FMHA_DEVICE void fwd_of_tokens(const FwdParams& p, const TileSchedule& schedule, const KeysOf& keys_of) {
  static_assert(spec.mask == MaskKind::Full, "sm80: lists hide keys by their places");
  static_assert(tile.pack_gqa && tile.shares == 0 && !tile.tma, "sm80: a tile has one token's heads");
  static_assert(tile.split_keys == 0 || tile.fixed_parts, "sm80: lists have parts of a fixed number of entries");
  static_assert(!spec.dropout && spec.bias == BiasKind::None, "sm80: a place in a list is not a position");
  if constexpr (tile.launches_merge) ptx::launch_dependents();
  if (int32_t(blockIdx.x) >= schedule.num_tiles) return;
  const int32_t m_block = blockIdx.x % schedule.num_m_blocks, head_and_part = blockIdx.x / schedule.num_m_blocks;
  const int32_t num_parts = schedule.num_heads / (p.batch * p.num_heads_kv);
  const int32_t head = head_and_part / num_parts, part = head_and_part - head * num_parts;
  const int32_t blocks_of_token = ceil_div(p.gqa_ratio, tile.block_m), i = m_block / blocks_of_token;
  const int32_t i_batch = head / p.num_heads_kv, i_head_kv = head - i_batch * p.num_heads_kv;

  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
  if (i >= span.seqlen_q) return;
  const auto keys = keys_of(span, i, i_head_kv);
  const int32_t count = keys.list.count();
  const Range own = tile.split_keys == 0 ? Range{0, count}
                                         : Range{min(part * tile.split_keys, count),
                                             min((part + 1) * tile.split_keys, count)};

  Work work = {};
  work.i_batch = i_batch;
  work.storage_batch = span.storage_batch;
  work.i_head_kv = i_head_kv;
  work.i_head = i_head_kv * p.gqa_ratio;
  // The token is the only query in its tile.
  work.first_row = (m_block - i * blocks_of_token) * tile.block_m;
  work.q_row = span.q_row;
  work.seqlen_q = 1;
  work.k_row = span.k_row;
  work.seqlen_k = count;
  work.part = part;
  work.first_dirty = tile.block_n;
  work.last_sink_block = -1;
  work.last_block = ceil_div(own.end, tile.block_n) - 1;
  work.num_band_blocks = own.empty() ? 0 : work.last_block + 1 - own.begin / tile.block_n;
  if (own.empty()) {  // one block outside the list, zeros that are hidden
    work.last_block = -1;
    work.num_band_blocks = 1;
  }
  work.num_blocks = work.num_band_blocks;

  extern __shared__ __align__(1024) unsigned char raw[];
  attend(p, work, *reinterpret_cast<Smem<spec, tile>*>(raw), keys);
}

template <FwdSpec spec, Sm80Tile tile>
FMHA_DEVICE void fwd_lists(const FwdParams& p, const TileSchedule& schedule, const ListParams& lists) {
  fwd_of_tokens<spec, tile>(p, schedule, [&](const SeqSpan& span, int32_t i, int32_t i_head_kv) {
    const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);
    return KeysOfToken<TokenList, tile.row_bytes>{{p, lists, span, band, i, i_head_kv}};
  });
}

// The forward kernel over the union of the lists that the tile's tokens have, a step a block of some list's keys.
template <FwdSpec spec, Sm80Tile tile>
FMHA_DEVICE void fwd_union(const FwdParams& p, const TileSchedule& schedule, const ListParams& lists) {
  // A list may hide a NaN of V from some rows of a tile, for which a kernel whose spec has no mask does not test.
  static_assert(spec.mask != MaskKind::Full, "sm80: a row's list hides what others name");
  static_assert(tile.unites && tile.pack_gqa && tile.split_keys == 0 && !tile.tma, "sm80: a tile has whole tokens");
  static_assert(warp_rows(tile) <= 32, "sm80: a lane follows the list of each of a warp's rows");
  static_assert(tile.row_bytes == 0 && spec.v_layout == VLayout::RowMajor, "sm80: a union has rows of elements");
  static_assert(!spec.dropout && spec.bias == BiasKind::None, "sm80: lists stand beside no bias");
  if (int32_t(blockIdx.x) >= schedule.num_tiles) return;
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<spec, tile>& smem = *reinterpret_cast<Smem<spec, tile>*>(raw);
  Work work = resolve_tile<spec, shared(tile)>(p, schedule, blockIdx.x);
  if (work.num_blocks == 0) return;
  const SeqSpan span = {work.i_batch, work.storage_batch, work.q_row, work.seqlen_q, work.k_row, work.seqlen_k};
  const KeysOfUnion<tile> keys{p,
                               lists,
                               span,
                               {work.lo, work.hi, work.sink_columns},
                               query_of<tile>(p, work.first_row),
                               rows_of_tile<shared(tile)>(p) / p.gqa_ratio,
                               work.i_head_kv,
                               smem.lists.elems};
  keys.template unite<num_consumers(tile)>();
  work.num_blocks = keys.num_steps();
  work.first_dirty = tile.block_n;
  attend(p, work, smem, keys);
}

}  // namespace fmha::sm80
