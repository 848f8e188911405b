// Work of a CTA: a block of keys of one kv head, and the blocks
// of queries that see it, in all query heads of that kv head.
#pragma once
#include <fmha/bwd.h>
#include <fmha/common/seen_keys.cuh>
#include <fmha/listed_block.h>
#include <fmha/pair_masks.h>
#include <fmha/sm100/bwd/config.cuh>

namespace fmha::sm100::bwd {

// A block of queries of one query head.
struct QueryBlock {
  int32_t i_head, first;
};

struct Work {
  SeqSpan span;
  MaskBand band;
  int32_t i_head_kv, first_head, gqa_ratio;
  Range keys;                         // empty: the sequence has no such block
  int32_t first_block, num_blocks;    // of queries, of each head, as the band has them
  int32_t num_steps;                  // blocks of queries of all heads
  template <int queries>
  FMHA_DEVICE QueryBlock at(int32_t step) const {
    const int32_t head = step / num_blocks;
    return {first_head + head, (first_block + step - head * num_blocks) * queries};
  }
};

// Order of the CTAs: the first blocks of keys come first, since a causal mask shows them to most queries; for each
// block all heads follow each other.
template <BwdSpec spec, class SeenKeys>
FMHA_DEVICE Work work_of(const BwdParams& p, uint32_t i_cta, const SeenKeys& seen) {
  constexpr int queries = Shape<spec>::queries;
  const int32_t heads = p.fwd.batch * p.fwd.num_heads_kv, head = i_cta % heads;
  const int32_t i_batch = head / p.fwd.num_heads_kv, first_key = i_cta / heads * kBlock;
  Work work;
  work.span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  work.band = resolve_band(p.fwd.mask, work.span.seqlen_q, work.span.seqlen_k);
  work.i_head_kv = head - i_batch * p.fwd.num_heads_kv;
  work.gqa_ratio = p.fwd.gqa_ratio;
  work.first_head = work.i_head_kv * work.gqa_ratio;
  work.keys = {first_key, min(first_key + kBlock, work.span.seqlen_k)};
  work.num_blocks = work.num_steps = 0;
  work.first_block = 0;
  if (work.keys.empty()) return work;
  const Range seeing = query_range(work.band, work.keys, work.span.seqlen_q);
  if (seeing.empty()) return work;
  work.first_block = seeing.begin / queries;
  work.num_blocks = ceil_div(seeing.end, queries) - work.first_block;
  work.num_steps = work.num_blocks * work.gqa_ratio;
  if constexpr (SeenKeys::has_tile_list) {
    work.num_steps = 0;
    for (int32_t head = 0; head < work.gqa_ratio; ++head) {
      const int32_t row = seen.row_of(i_batch, work.first_head + head, first_key / kBlock);
      const int32_t* counts = seen.list.counts + 2 * int64_t(row);
      work.num_steps += counts[0] + counts[1];
    }
  }
  return work;
}

// The blocks of queries of a CTA's steps, one query head after another: those of the band, or those that lists name
// (shown_blocks.cuh). In each head partly masked blocks come first; in calls with ordered sums blocks go from the last
// queries to the first.
template <int queries, class SeenKeys>
struct QuerySteps {
  const Work& work;
  const SeenKeys& seen;
  int32_t step = 0;                                       // of the band
  int32_t i_head = 0, row = 0, at = 0, num_cut = 0, num = 0;  // of a head's list
  bool is_cut = false;                                    // masks hide a pair of the block

  FMHA_DEVICE QueryBlock next() {
    if constexpr (!SeenKeys::has_tile_list) {
      return work.template at<queries>(step++);
    } else {
      for (; at == num; ++step) open(work.first_head + step);
      const ListedBlock listed = seen.listed(row, num_cut, num, place(at));
      is_cut = !listed.is_whole();
      ++at;
      return {i_head, listed.block() * queries};
    }
  }
  // Place in the list of a head's step `nth`. Tiles add in ascending order of keys and walk queries in descending
  // order: so no tile begins at a block that the tile before it reaches last.
  FMHA_DEVICE int32_t place(int32_t nth) const {
    if constexpr (SeenKeys::is_ordered) return num - 1 - nth;
    return nth;
  }

 private:
  FMHA_DEVICE void open(int32_t head) {
    i_head = head;
    at = 0;
    row = seen.row_of(work.span.i_batch, head, work.keys.begin / kBlock);
    const int32_t* counts = seen.list.counts + 2 * int64_t(row);
    num_cut = counts[0];
    num = num_cut + counts[1];
  }
};

// The masks of single pairs, in the form that the recomputation of rows takes.
template <class SeenKeys>
FMHA_DEVICE auto pair_masks(const SeenKeys& seen) {
  if constexpr (SeenKeys::has_tile_list) return seen.pairs;
  else return NoMasks{};
}

}  // namespace fmha::sm100::bwd
