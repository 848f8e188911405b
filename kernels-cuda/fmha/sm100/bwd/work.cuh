// Work of a CTA: a block of keys of one kv head, and the blocks of queries that see it, of all the kv head's query
// heads.
#pragma once
#include <fmha/bwd.h>
#include <fmha/sm100/bwd/config.cuh>

namespace fmha::sm100::bwd {

// A block of queries.
struct QueryBlock {
  int32_t i_head, first;
};

struct Work {
  SeqSpan span;
  MaskBand band;
  int32_t i_head_kv, first_head, gqa_ratio;
  Range keys;                         // empty: the sequence has no such block
  int32_t first_block, num_blocks;    // of queries, of each head

  FMHA_DEVICE int32_t num_steps() const { return num_blocks * gqa_ratio; }
  FMHA_DEVICE QueryBlock at(int32_t step) const {
    const int32_t head = step / num_blocks;
    return {first_head + head, (first_block + step - head * num_blocks) * kBlock};
  }
};

// Order of the CTAs: blocks of keys, the first ones, which a causal mask shows to most queries, first; in each block
// all heads.
template <BwdSpec spec>
FMHA_DEVICE Work work_of(const BwdParams& p) {
  const int32_t heads = p.fwd.batch * p.fwd.num_heads_kv, head = blockIdx.x % heads;
  const int32_t i_batch = head / p.fwd.num_heads_kv, first_key = blockIdx.x / heads * kBlock;
  Work work;
  work.span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  work.band = resolve_band(p.fwd.mask, work.span.seqlen_q, work.span.seqlen_k);
  work.i_head_kv = head - i_batch * p.fwd.num_heads_kv;
  work.gqa_ratio = p.fwd.gqa_ratio;
  work.first_head = work.i_head_kv * work.gqa_ratio;
  work.keys = {first_key, min(first_key + kBlock, work.span.seqlen_k)};
  work.num_blocks = 0;
  work.first_block = 0;
  if (work.keys.empty()) return work;
  const Range queries = query_range(work.band, work.keys, work.span.seqlen_q);
  if (queries.empty()) return work;
  work.first_block = queries.begin / kBlock;
  work.num_blocks = ceil_div(queries.end, kBlock) - work.first_block;
  return work;
}

}  // namespace fmha::sm100::bwd
