// Code shared by the backward kernels of every vendor: the place of a query row's numbers, and the queries that see a
// key.
#pragma once
#include <fmha/mask.h>
#include <fmha/seq.h>

namespace fmha {

// Range of queries outside which no query sees any of the non-empty `keys`, sink columns included.
FMHA_DEVICE Range query_range(const MaskBand& band, Range keys, int32_t seqlen_q) {
  const int64_t first = clamp<int64_t>(int64_t(keys.begin) - band.hi, 0, seqlen_q);
  // A band with lo > hi shows no pair, although the block ranges of its two edges may overlap. The range is then empty.
  const int64_t band_end = band.lo > band.hi ? first : int64_t(keys.end) - band.lo;
  const int64_t end = keys.begin < band.sink_columns ? seqlen_q : band_end;
  return {int32_t(first), int32_t(clamp<int64_t>(end, first, seqlen_q))};
}

// Index of a query row's LSE and delta in the workspace: sequences are apart by the longest, in whole blocks of
// queries.
FMHA_DEVICE int64_t stats_offset(const BwdParams& p, const SeqSpan& span, int32_t i_head, int32_t i) {
  return i_head * p.stats_head + span.i_batch * p.stats_batch + i;
}

}  // namespace fmha
