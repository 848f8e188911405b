// A tile of the backward: a key block of one kv head, and the query blocks that see it.
#pragma once
#include <fmha/bwd.h>
#include <fmha/mask.h>
#include <fmha/seq.h>
#include <fmha/sm90/bwd/config.cuh>

namespace fmha::sm90::bwd {

struct Work {
  SeqSpan span;
  MaskBand band;
  int32_t i_head_kv;
  Range keys;      // of the sequence; empty: the sequence has no such block
  Range q_blocks;  // those with a query that sees one of the keys
};

// Tile `index` of the order: the key blocks of a head one after another, since they share its Q and dO.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE Work resolve_work(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t index) {
  const int32_t head = index / schedule.num_key_blocks, first_key = (index - head * schedule.num_key_blocks) * tile.block_n;
  const int32_t i_batch = head / p.fwd.num_heads_kv;
  Work work;
  work.i_head_kv = head - i_batch * p.fwd.num_heads_kv;
  work.span = resolve_seq(p.fwd, spec.fwd.seq, i_batch);
  work.band = resolve_band(p.fwd.mask, work.span.seqlen_q, work.span.seqlen_k);
  work.keys = {first_key, min(first_key + tile.block_n, work.span.seqlen_k)};
  work.q_blocks = {0, 0};
  if (!work.keys.empty()) {
    const Range queries = query_range(work.band, work.keys, work.span.seqlen_q);
    if (!queries.empty()) work.q_blocks = {queries.begin / tile.block_m, ceil_div(queries.end, tile.block_m)};
  }
  return work;
}

// The query blocks of a tile, one query head of the group after another.
struct QueryBlocks {
  const Range range;
  const int32_t end_head;
  int32_t i_head, current;

  FMHA_DEVICE bool more() const { return i_head < end_head; }
  FMHA_DEVICE void advance() {
    if (++current < range.end) return;
    current = range.begin;
    ++i_head;
  }
};
FMHA_DEVICE QueryBlocks query_blocks(const BwdParams& p, const Work& work) {
  const int32_t first_head = work.i_head_kv * p.fwd.gqa_ratio;
  return {work.q_blocks, work.q_blocks.empty() ? first_head : first_head + p.fwd.gqa_ratio, first_head,
          work.q_blocks.begin};
}

// Whether rows of a block that lie behind its sequence may hold anything: TMA has put zeros only behind the tensor.
template <BwdSpec spec>
FMHA_DEVICE bool may_be_dirty(const BwdParams& p) {
  return spec.fwd.seq == SeqKind::Group || p.fwd.seqused_q || p.fwd.seqused_k;
}

}  // namespace fmha::sm90::bwd
