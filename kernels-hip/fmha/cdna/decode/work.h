// Pieces of work of a decode kernel, for any tile: rows of a group of heads, a part of their sequence's keys, and where
// the keys lie.
#pragma once
#include <fmha/cache_rows.h>
#include <fmha/cdna/decode/tile.h>
#include <fmha/cdna/span.h>
#include <fmha/isa/sched.h>
#include <fmha/mask.h>

namespace fmha::cdna::decode {

// Piece of work: some rows of a group, and some of their sequence's keys.
struct Job {
  SeqSpan span;
  KvKind layout;
  MaskBand band;
  int32_t i_head_kv;
  int32_t part;                 // where its results lie in the workspace (pieces.h)
  Range keys, sinks;            // that the piece has; of sink columns alone these
  int32_t first_row, num_rows;  // of the group's rows; rows that there are
  Range queries;                // of these rows
  int32_t scale_keys;           // of CdnaDecodeParams
  int32_t nameable;             // keys of the sequence, where span.seqlen_k has the places of a list (list.h)

  // Power of two by which P is scaled for bf16, in log2: it is below 1 and follows from the number of keys.
  FMHA_DEVICE int scale_below_keys() const {
    return __builtin_clz((scale_keys != 0 ? scale_keys : span.seqlen_k) | 1) - 32;
  }
};

FMHA_DEVICE KvKind layout_of(const FwdParams& p) {
  return p.block_table ? KvKind::Paged : p.cu_seqlens_k ? KvKind::Packed : KvKind::Strided;
}

// The sequence of each lane's own batch index.
FMHA_DEVICE SeqSpan seq_of(const FwdParams& p, int32_t i_batch) {
  return resolve_seq(p, p.cu_seqlens_q ? QLayout::Packed : QLayout::Batch, layout_of(p), i_batch);
}

FMHA_DEVICE SeqSpan span_of(const FwdParams& p, int32_t i_batch) { return uniform(seq_of(p, i_batch)); }

// The tree mask alone decides which keys a query sees, so the band hides nothing.
FMHA_DEVICE MaskBand band_of(const CdnaDecodeParams& params, const SeqSpan& span) {
  MaskParams mask = params.call.fwd.mask;
  if (params.tree_mask) mask = {kUnboundedLo, kUnboundedHi, 0, 0};
  return resolve_band(mask, span.seqlen_q, span.seqlen_k);
}

// Where a tile's keys lie in memory: one key for each lane that has one.
struct KeyPlaces {
  int32_t key;   // clamped to the sequence
  int32_t page;  // its page, as the block table has it

  // Block table entries are read a tile before they are needed.
  static FMHA_DEVICE KeyPlaces of(const FwdParams& p, const Job& job, int32_t key) {
    KeyPlaces places;
    places.key = min(key, job.span.seqlen_k - 1);
    places.page = job.layout == KvKind::Paged ? page_of(p, job, places.key) : 0;
    return places;
  }

  // Entry of the block table for a key.
  static FMHA_DEVICE int32_t page_of(const FwdParams& p, const Job& job, int32_t key) {
    const int64_t entry = job.span.i_batch * p.block_table_batch + uint32_t(key) / uint32_t(p.page_size);
    return ((const int32_t FMHA_GLOBAL*)p.block_table)[entry];
  }

  // Row of a key, like kv_row.
  FMHA_DEVICE KvRow row(const FwdParams& p, const Job& job) const {
    if (job.layout != KvKind::Paged) return {job.span.i_batch, job.span.k_row + key};
    return {clamp(page, 0, p.num_pages - 1), int32_t(uint32_t(key) % uint32_t(p.page_size))};
  }
};

// Where rows of one cache lie: the distance in bytes from the first element of K, or V, to a row.
struct OneCache {
  template <bool of_v, int bytes>
  static FMHA_DEVICE int64_t offset(const FwdParams& p, KvRow at, int32_t i_head_kv) {
    return row_offset(of_v ? p.v : p.k, at, i_head_kv) * bytes;
  }

  // A row of a cache of rows of bytes.
  template <int bytes>
  static FMHA_DEVICE BytesOfRow bytes_of(const FwdParams& p, KvRow at) {
    return bytes_of_row<bytes>(p.k, p.page_size, at);
  }
};

// Places of a sequence's keys, one tile after another. `lane` is the lane's key within a tile.
class SequencePlaces : public OneCache {
  KeyPlaces places_;

 public:
  template <class Tiles>
  FMHA_DEVICE SequencePlaces(const FwdParams&, const Job&, const Tiles&, int) {}

  // Reads the table for tile n, or the last one.
  template <class Tiles>
  FMHA_DEVICE void find(const FwdParams& p, const Job& job, const Tiles& tiles, int32_t n, int lane) {
    places_ = KeyPlaces::of(p, job, tiles.first_key(min(n, tiles.count - 1)) + lane);
  }

  // Rows of the tile whose places `find` has looked up.
  FMHA_DEVICE KvRow row(const FwdParams& p, const Job& job) { return places_.row(p, job); }
  FMHA_DEVICE uint32_t shown() const { return ~0u; }
};

// Places of keys whose rows in an FP8 cache have scales of their own.
class ScaledPlaces : public SequencePlaces {
 public:
  using SequencePlaces::SequencePlaces;

  // The scale of a row of K, or V.
  template <bool of_v>
  static FMHA_DEVICE float factor(KvRow at, int32_t i_head_kv) {
    const ScaledDecodeParams& params = reload_params<ScaledDecodeParams>();
    const View& scales = of_v ? params.v_scale : params.k_scale;
    const KvRow block = {at.batch, int32_t(uint32_t(at.row) / uint32_t(params.scale_block))};
    return ((const float FMHA_GLOBAL*)scales.data)[row_offset(scales, block, i_head_kv)];
  }
};

// Tiles of a work item's keys that some row sees, those of sink columns first. Tiles and parts begin at multiples
// of `keys` from the sequence's first key, so that a row's sums have a fixed order whatever other rows see.
template <int keys>
struct PartTiles {
  int32_t first_sink, num_sinks, first, count;

  static FMHA_DEVICE PartTiles of(const Job& job) {
    const Range seen = k_range(job.band, job.queries, job.span.seqlen_k);
    const Range sinks = sink_range(job.band, job.queries, job.span.seqlen_k);
    PartTiles tiles;
    tiles.first = max(job.keys.begin, seen.begin) / keys;
    const int32_t num = max(ceil_div(min(job.keys.end, seen.end), keys) - tiles.first, 0);
    tiles.first_sink = job.sinks.begin / keys;
    tiles.num_sinks = max(ceil_div(min(job.sinks.end, sinks.end), keys) - tiles.first_sink, 0);
    if (num > 0) tiles.num_sinks = min(tiles.num_sinks, tiles.first - tiles.first_sink);
    tiles.count = num + tiles.num_sinks;
    return tiles;
  }

  FMHA_DEVICE int32_t first_key(int32_t n) const {
    return (n < num_sinks ? first_sink + n : first + n - num_sinks) * keys;
  }
};

}  // namespace fmha::cdna::decode
