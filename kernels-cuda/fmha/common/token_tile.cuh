// The tile of a kernel whose rows are pairs of a query and a head of one kv head: its sequence and part, the keys of a
// token whose heads are its rows, and its blocks of keys.
#pragma once
#include <fmha/common/part_keys.cuh>
#include <fmha/mask.h>
#include <fmha/num.h>
#include <fmha/range.h>
#include <fmha/seq.h>

namespace fmha {

// Sets the blocks of a range of keys.
template <int32_t block_keys, class Work>
FMHA_DEVICE void set_blocks(Work& work, const Range& keys) {
  work.end = keys.end;
  work.last_block = ceil_div(keys.end, block_keys) - 1;
  work.num_blocks = keys.empty() ? 0 : work.last_block + 1 - keys.begin / block_keys;
}

// Sets the part, kv head and sequence of tiles by their number, of which the part is the innermost.
template <FwdSpec spec, bool in_parts, class Work, class Schedule>
FMHA_DEVICE void set_head_and_part(Work& work, const FwdParams& p, const Schedule& schedule, int32_t heads_and_parts) {
  const int32_t sequence_and_head = in_parts ? heads_and_parts / schedule.num_parts : heads_and_parts;
  work.part = heads_and_parts - sequence_and_head * (in_parts ? schedule.num_parts : 1);
  const int32_t i_batch = sequence_and_head / p.num_heads_kv;
  work.i_head_kv = sequence_and_head - i_batch * p.num_heads_kv;
  work.span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
}

// Work of a tile of `rows` heads of one token, of which the CTA's begin at `row_in_tile`. Tiles of a token lie side by
// side, so that their gathers meet in the L2. Every part of every token is a tile, one without keys too: the merge
// reads all of them. `list_of` gives the keys of the work's token.
template <FwdSpec spec, int32_t rows, int32_t block_keys, bool in_parts, class Work, class Schedule, class ListOf>
FMHA_DEVICE Work work_of_token(const FwdParams& p, const Schedule& schedule, int32_t index, int32_t row_in_tile,
                               const ListOf& list_of) {
  Work work;
  const int32_t heads_and_parts = index / schedule.num_m_blocks, i_m = index - heads_and_parts * schedule.num_m_blocks;
  set_head_and_part<spec, true>(work, p, schedule, heads_and_parts);
  const int32_t tiles_of_token = ceil_div(p.gqa_ratio, rows), i = i_m / tiles_of_token;
  work.first_row = i * p.gqa_ratio + (i_m - i * tiles_of_token) * rows + row_in_tile;
  work.end_query = i + 1;
  work.has_rows = i < work.span.seqlen_q;
  if (!work.has_rows) return work;
  work.band = resolve_band(p.mask, work.span.seqlen_q, work.span.seqlen_k);
  const int32_t count = list_of(work).count();
  work.part_keys = {0, count};
  if constexpr (in_parts) {
    const int32_t part_keys = keys_of_a_part(schedule.most_keys, schedule.num_parts, block_keys);
    const int32_t begin = work.part * part_keys;
    work.part_keys = {min(begin, count), min(begin + part_keys, count)};
  }
  set_blocks<block_keys>(work, work.part_keys);
  return work;
}

}  // namespace fmha
