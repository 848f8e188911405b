// Mask on the device: the keys that a query sees. A kernel calls `resolve_band` once per sequence, then `k_range`
// (`row_range` for one query) and `sink_range` for the loop, and `block_class` and `visible` to hide pairs. A kernel
// compiled for one kind of mask uses `KnownMask` instead, which classifies tiles.
#pragma once
#include <fmha/params.h>
#include <fmha/spec.h>

namespace fmha {

constexpr int32_t kUnboundedLo = -2147483647 - 1;
constexpr int32_t kUnboundedHi = 2147483647;

// Key j is visible to query i iff lo <= j - i <= hi, or j < sink_columns and j - i <= hi. The bounds are clamped to
// -seqlen_q..seqlen_k, which changes nothing, since j - i lies in this range.
struct MaskBand {
  int32_t lo, hi, sink_columns;
};

// A half-open range of indices.
struct Range {
  int32_t begin, end;
  FMHA_DEVICE bool empty() const { return begin >= end; }
};

enum class BlockClass { Skipped, Edge, Inside };

FMHA_DEVICE MaskBand resolve_band(const MaskParams& mask, int32_t seqlen_q, int32_t seqlen_k) {
  const int64_t diag = mask.bottom_right ? int64_t(seqlen_k) - seqlen_q : 0;
  const int64_t least = -int64_t(seqlen_q), most = seqlen_k;
  MaskBand band;
  band.lo = int32_t(mask.lo == kUnboundedLo ? least : clamp(mask.lo + diag, least, most));
  band.hi = int32_t(mask.hi == kUnboundedHi ? most : clamp(mask.hi + diag, least, most));
  // Without a lower bound the band hides no key that a sink column could show, so sink columns are dropped.
  band.sink_columns = mask.lo == kUnboundedLo ? 0 : min(mask.sink_columns, seqlen_k);
  return band;
}

FMHA_DEVICE bool visible(const MaskBand& band, int32_t i, int32_t j) {
  const int32_t distance = j - i;
  return distance <= band.hi && (distance >= band.lo || j < band.sink_columns);
}

// Range of keys outside which no query of the non-empty `rows` sees a key, sink columns excepted.
FMHA_DEVICE Range k_range(const MaskBand& band, Range rows, int32_t seqlen_k) {
  const int64_t first = clamp<int64_t>(int64_t(rows.begin) + band.lo, 0, seqlen_k);
  const int64_t last = clamp<int64_t>(int64_t(rows.end) + band.hi, first, seqlen_k);
  return {int32_t(first), int32_t(last)};
}

// The band's keys of query i alone: its first key, and one past its last, without sink columns.
FMHA_DEVICE Range row_range(const MaskBand& band, int32_t i, int32_t seqlen_k) {
  return k_range(band, {i, i + 1}, seqlen_k);
}

// The keys before `k_range` that some query of `rows` sees as sink columns.
FMHA_DEVICE Range sink_range(const MaskBand& band, Range rows, int32_t seqlen_k) {
  const int64_t last_visible = int64_t(rows.end) + band.hi;
  const int64_t before = k_range(band, rows, seqlen_k).begin;
  const int64_t end = min<int64_t>(min<int64_t>(band.sink_columns, last_visible), before);
  return {0, int32_t(max<int64_t>(end, 0))};
}

// Relation of the non-empty tile `rows` x `keys` to the band.
FMHA_DEVICE BlockClass block_class(const MaskBand& band, Range rows, Range keys) {
  const int32_t least = keys.begin - (rows.end - 1), most = keys.end - 1 - rows.begin;
  const bool some_below_hi = least <= band.hi;
  const bool some_above_lo = most >= band.lo || keys.begin < band.sink_columns;
  if (!some_below_hi || !some_above_lo) return BlockClass::Skipped;
  if (most <= band.hi && (least >= band.lo || keys.end <= band.sink_columns)) return BlockClass::Inside;
  return BlockClass::Edge;
}

// The columns of a block of keys that one query sees.
template <bool has_lo, bool has_sinks>
struct SeenColumns {
  int32_t begin, end, sinks;

  FMHA_DEVICE bool has(int32_t column) const {
    bool seen = column < end;
    if constexpr (has_lo) seen &= column >= begin || (has_sinks && column < sinks);
    return seen;
  }
};

// A band whose kind is a compile-time constant: bounds that the kind lacks cost nothing.
template <MaskKind kind, bool has_sinks>
struct KnownMask {
  static constexpr bool has_hi = kind != MaskKind::Full, has_lo = kind == MaskKind::Band;
  using Columns = SeenColumns<has_lo, has_sinks>;
  MaskBand band;
  int32_t seqlen_k;

  // The keys that every query from `first` to `last` sees: a tile within them is fully visible.
  FMHA_DEVICE Range whole(int32_t first, int32_t last) const {
    return {has_lo ? max(last + band.lo, 0) : 0, has_hi ? max(min(seqlen_k, first + band.hi + 1), 0) : seqlen_k};
  }
  // Whether some query from `first` to `last` does not see one of the keys.
  FMHA_DEVICE bool cuts(int32_t first, int32_t last, Range keys) const {
    bool cut = keys.end > seqlen_k;
    if constexpr (has_hi) cut |= keys.end > first + band.hi + 1;
    if constexpr (has_lo) cut |= keys.begin < last + band.lo;
    return cut;
  }
  // Whether no query from `first` to `last` sees any of the keys.
  FMHA_DEVICE bool skips(int32_t first, int32_t last, Range keys) const {
    bool skipped = keys.begin >= seqlen_k;
    if constexpr (has_hi) skipped |= keys.begin > last + band.hi;
    if constexpr (has_lo) skipped |= keys.end <= first + band.lo && !is_sink(keys.begin);
    return skipped;
  }
  // Columns that query i sees in a block whose first key is `first_key`.
  FMHA_DEVICE Columns columns(int32_t i, int32_t first_key) const {
    return {has_lo ? i + band.lo - first_key : 0,
            (has_hi ? min(seqlen_k, i + band.hi + 1) : seqlen_k) - first_key,
            band.sink_columns - first_key};
  }
  // The queries that see key j, from `first_query` on; not cut by the sequence's ends.
  FMHA_DEVICE Range queries(int32_t j, int32_t first_query) const {
    return {has_hi ? j - band.hi - first_query : 0,
            has_lo && !is_sink(j) ? j - band.lo + 1 - first_query : kUnboundedHi};
  }
  // Whether the band has the pair; the sequence's ends apart.
  FMHA_DEVICE bool sees(int32_t i, int32_t j) const {
    bool seen = true;
    if constexpr (has_hi) seen &= j - i <= band.hi;
    if constexpr (has_lo) seen &= j - i >= band.lo || is_sink(j);
    return seen;
  }
  FMHA_DEVICE bool is_sink(int32_t j) const { return has_sinks && j < band.sink_columns; }
};

}  // namespace fmha
