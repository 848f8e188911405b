// What a decode kernel's pieces of work are, of any tile: rows of a group, a part of their sequence's keys, where keys lie.
#pragma once
#include <fmha/cdna/decode/tile.h>
#include <fmha/cdna/span.h>
#include <fmha/mask.h>

namespace fmha::cdna::decode {

// A piece of the launch's work: some rows of a group, and a part of the keys.
struct Job {
  SeqSpan span;
  KvKind layout;
  MaskBand band;
  int32_t i_head_kv, part;
  int32_t first_row, num_rows;  // of the group's rows; rows that there are
  Range queries;                // of these rows
};

FMHA_DEVICE KvKind layout_of(const FwdParams& p) {
  return p.block_table ? KvKind::Paged : p.cu_seqlens_k ? KvKind::Packed : KvKind::Strided;
}

FMHA_DEVICE SeqSpan span_of(const FwdParams& p, int32_t i_batch) {
  return uniform(resolve_seq(p, p.cu_seqlens_q ? QLayout::Packed : QLayout::Batch, layout_of(p), i_batch));
}

// A tree mask alone says who sees whom: its band hides nothing.
FMHA_DEVICE MaskBand band_of(const CdnaDecodeParams& params, const SeqSpan& span) {
  MaskParams mask = params.call.fwd.mask;
  if (params.tree_mask) mask = {kUnboundedLo, kUnboundedHi, 0, 0};
  return resolve_band(mask, span.seqlen_q, span.seqlen_k);
}

// Where the keys of a tile lie: a key to each lane that has one.
struct KeyPlaces {
  int32_t key;   // clamped to the sequence
  int32_t page;  // its page, as the block table has it

  // The table's entry is read a tile before it is needed.
  static FMHA_DEVICE KeyPlaces of(const FwdParams& p, const Job& job, int32_t key) {
    KeyPlaces places;
    places.key = min(key, job.span.seqlen_k - 1);
    places.page = 0;
    if (job.layout == KvKind::Paged) {
      const int64_t entry = job.span.i_batch * p.block_table_batch + uint32_t(places.key) / uint32_t(p.page_size);
      places.page = ((const int32_t FMHA_GLOBAL*)p.block_table)[entry];
    }
    return places;
  }

  // As kv_row has it.
  FMHA_DEVICE KvRow row(const FwdParams& p, const Job& job) const {
    if (job.layout != KvKind::Paged) return {job.span.i_batch, job.span.k_row + key};
    return {clamp(page, 0, p.num_pages - 1), int32_t(uint32_t(key) % uint32_t(p.page_size))};
  }
};

// Work `at` of the launch, `rows` of a group at most. Neighbours have the same keys where there are more rows than one
// piece of work takes, and find them in the cache of their compute unit.
template <int rows>
FMHA_DEVICE Job job_of(const CdnaDecodeParams& params, int32_t at) {
  const FwdParams& p = params.call.fwd;
  const int32_t i_rows = at % params.row_blocks, rest = at / params.row_blocks;
  const int32_t batch_head = rest / params.num_parts;
  Job job;
  job.part = rest % params.num_parts;
  job.i_head_kv = batch_head % p.num_heads_kv;
  job.span = span_of(p, batch_head / p.num_heads_kv);
  job.layout = layout_of(p);
  job.band = band_of(params, job.span);
  job.first_row = i_rows * rows;
  job.num_rows = job.span.seqlen_q * p.gqa_ratio;
  const int32_t last_row = min(job.first_row + rows, job.num_rows) - 1;
  job.queries = {job.first_row / p.gqa_ratio, last_row / p.gqa_ratio + 1};
  return job;
}

// Tiles of a part that some row of a piece of work sees, those of sink columns first. Tiles and parts begin at multiples
// of `keys` from the sequence's first key, so that a row's sums have one order whatever other rows see.
template <int keys>
struct PartTiles {
  int32_t first_sink, num_sinks, first, count;

  static FMHA_DEVICE PartTiles of(const Job& job, int32_t part_keys) {
    const int32_t begin = job.part * part_keys;
    const int32_t end = int32_t(min<int64_t>(int64_t(begin) + part_keys, job.span.seqlen_k));
    const Range seen = k_range(job.band, job.queries, job.span.seqlen_k);
    const Range sinks = sink_range(job.band, job.queries, job.span.seqlen_k);
    PartTiles tiles;
    tiles.first = max(begin, seen.begin) / keys;
    const int32_t num = max(ceil_div(min(end, seen.end), keys) - tiles.first, 0);
    tiles.first_sink = begin / keys;
    tiles.num_sinks = max(ceil_div(min(end, sinks.end), keys) - tiles.first_sink, 0);
    if (num > 0) tiles.num_sinks = min(tiles.num_sinks, tiles.first - tiles.first_sink);
    tiles.count = num + tiles.num_sinks;
    return tiles;
  }

  FMHA_DEVICE int32_t first_key(int32_t n) const {
    return (n < num_sinks ? first_sink + n : first + n - num_sinks) * keys;
  }
};

}  // namespace fmha::cdna::decode
