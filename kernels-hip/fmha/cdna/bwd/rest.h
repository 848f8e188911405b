// Launches before and after the main launch, with a wave for each row. The one before computes LSE and delta of each
// query; the one after computes rows whose gradients the products cannot sum, dBias and dSink. All follow the rules of
// fmha/row_bwd.h.
//
// Rows that are recomputed from memory, pair by pair:
//   far     dQ of a query whose LSE is so large that P is to be measured from an origin of its own, and dK and dV of
//           the heads that such queries attend to. To the products such a query's P is 0.
//   hidden  rows with a sum that is not finite under a mask: a hidden NaN is multiplied by 0 there.
#pragma once
#include <fmha/cdna/bwd/tile.h>
#include <fmha/isa/atomic.h>
#include <fmha/shown_pairs.h>
#include <fmha/simt/bwd.h>

namespace fmha::cdna::bwd {

// Rows of a wave of the main launches, and so of a word of flags in `non_finite`.
constexpr int32_t kRowsOfWord = 32;

FMHA_DEVICE int64_t num_query_words(const BwdParams& p) {
  return int64_t(p.fwd.batch) * p.fwd.num_heads_q * ceil_div(p.fwd.seqlen_q, kRowsOfWord);
}
FMHA_DEVICE int64_t num_key_words(const BwdParams& p) {
  return int64_t(p.fwd.batch) * p.fwd.num_heads_kv * ceil_div(p.fwd.seqlen_k, kRowsOfWord);
}

// Replaces a NaN by the usual one. A caller's f32 NaN may have any bits, and rounding to bf16 by adding to the bits
// would turn the largest NaN into 0.
FMHA_DEVICE float usual_nan(float x) { return is_nan(x) ? float_of(0x7fc00000) : x; }

// Address of the flags of rows `first` ...: those of dQ,
// then of dK (with dV, if one launch sums both), then of dV.
FMHA_DEVICE int32_t* nonfinite_of(const BwdParams& p, BwdSums sums, int32_t i_batch, int32_t head, int32_t first) {
  if (sums == BwdSums::Dq) {
    return p.non_finite + (int64_t(i_batch) * p.fwd.num_heads_q + head) * ceil_div(p.fwd.seqlen_q, kRowsOfWord) +
           first / kRowsOfWord;
  }
  const int64_t before = num_query_words(p) + (sums == BwdSums::Dv ? num_key_words(p) : 0);
  return p.non_finite + before +
         (int64_t(i_batch) * p.fwd.num_heads_kv + head) * ceil_div(p.fwd.seqlen_k, kRowsOfWord) + first / kRowsOfWord;
}

// Whether a KV head of a sequence has far queries: 0 before each run.
FMHA_DEVICE int32_t* has_far(const BwdParams& p, int32_t i_batch, int32_t i_head_kv) {
  return p.schedulers + int64_t(i_batch) * p.fwd.num_heads_kv + i_head_kv;
}

// Prepares rows of queries in whole words of flags. Rows beyond a length get LSE +infinity and delta 0, so that
// products need no test for them.
template <BwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void stats(const BwdParams& p, const Masks& masks = {}) {
  const int64_t at = simt::row_of_wave();
  const int32_t padded = int32_t(p.stats_batch);
  if (at >= int64_t(p.fwd.batch) * p.fwd.num_heads_q * padded) return;
  const int32_t i = int32_t(at % padded), i_head = int32_t(at / padded % p.fwd.num_heads_q);
  const SeqSpan span =
      resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, int32_t(at / padded / p.fwd.num_heads_q));
  const int64_t stats = stats_offset(p, span, i_head, i);
  if (i < span.seqlen_q) bwd_stats_row<spec, simt::Wave>(p, span, i_head, i, masks);
  if (simt::Wave::index() != 0) return;
  if (i >= span.seqlen_q) {
    p.lse_log2[stats] = infinity();
    p.delta[stats] = 0.f;
    return;
  }
  const float lse_log2 = usual_nan(p.lse_log2[stats]);
  p.lse_log2[stats] = lse_log2;
  p.delta[stats] = usual_nan(p.delta[stats]);
  if (p.score_origin[stats] == 0.f || lse_log2 == infinity()) return;
  p.lse_log2[stats] = marked_far(lse_log2);
  *has_far(p, span.i_batch, i_head / p.fwd.gqa_ratio) = 1;
}

// Adds what a far query's pairs contribute to the gradients of captured tensors: to the products its P is 0.
template <BwdSpec spec, class Masks>
FMHA_DEVICE void add_captured_of_row(const BwdParams& p, const SeqSpan& span, int32_t i_head, int32_t i,
                                     const Masks& masks) {
  const BwdHead<spec, simt::Wave, Masks> head{p, span, i_head, masks};
  const auto take = [&](Range keys) {
    for (int32_t j = keys.begin + simt::Wave::index(); j < keys.end; j += simt::Wave::count) {
      head.add_captured(i, j, head.sees(i, j), [&](int64_t at, float gradient) {
        if (gradient != 0.f) global_atomic_add_f32(p.captured_sums + at, gradient);
      });
    }
  };
  take(sink_range(head.band, {i, i + 1}, span.seqlen_k));
  take(k_range(head.band, {i, i + 1}, span.seqlen_k));
}

// Calls `row(first + bit)` for each bit of `rows`, which is equal in all lanes.
template <class Row>
FMHA_DEVICE void for_each_row(uint32_t rows, int32_t first, Row row) {
#pragma nounroll
  for (; rows != 0; rows &= rows - 1) row(first + __builtin_ctz(rows));
}

FMHA_DEVICE uint32_t uniform_word(uint32_t x) { return uint32_t(v_readfirstlane_b32(int32_t(x))); }

// A bit for each row from `first` on that lies before `end`.
FMHA_DEVICE uint32_t rows_there(int32_t first, int32_t end) {
  return end - first >= kRowsOfWord ? ~0u : (1u << max(end - first, 0)) - 1;
}

// The last launch: words of queries, words of keys, then rows of dBias, then dSink.
template <BwdSpec spec, bool splits_keys, class Masks = NoMasks>
FMHA_DEVICE void rest(const BwdParams& p, const Masks& masks = {}) {
  constexpr bool hides = hides_pairs(spec.fwd) || !Masks::all;
  int64_t at = simt::row_of_wave();
  const auto place = [&](int32_t blocks, int32_t heads, int32_t& head, int32_t& first) {
    first = int32_t(at % blocks) * kRowsOfWord;
    head = int32_t(at / blocks % heads);
    return resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, int32_t(at / blocks / heads));
  };
  int32_t head, first;
  if (at < num_query_words(p)) {
    const SeqSpan span = place(ceil_div(p.fwd.seqlen_q, kRowsOfWord), p.fwd.num_heads_q, head, first);
    if (first >= span.seqlen_q) return;
    const int32_t i = first + simt::Wave::index() % kRowsOfWord;
    const bool is_far = i < span.seqlen_q && is_marked_far(p.lse_log2[stats_offset(p, span, head, i)]);
    uint32_t rows = uint32_t(simt::Wave::ballot(is_far));
    if constexpr (spec.write_dcaptured) {
      for_each_row(rows & rows_there(first, span.seqlen_q), first,
                   [&](int32_t i) { add_captured_of_row<spec>(p, span, head, i, masks); });
    }
    if constexpr (hides) rows |= uniform_word(*nonfinite_of(p, BwdSums::Dq, span.i_batch, head, first));
    for_each_row(rows & rows_there(first, span.seqlen_q), first,
                 [&](int32_t i) { bwd_query_row<spec, simt::Wave>(p, span, head, i, masks); });
    return;
  }
  at -= num_query_words(p);
  if (at < num_key_words(p)) {
    const SeqSpan span = place(ceil_div(p.fwd.seqlen_k, kRowsOfWord), p.fwd.num_heads_kv, head, first);
    if (first >= span.seqlen_k) return;
    uint32_t rows = *has_far(p, span.i_batch, head) ? ~0u : 0;
    if constexpr (hides) {
      rows |= *nonfinite_of(p, BwdSums::DkDv, span.i_batch, head, first);
      // The flags of dV are needed only if both launches could visit different blocks: otherwise a non-finite dO makes
      // delta, and so dK of the same rows, non-finite too.
      if constexpr (splits_keys) rows |= *nonfinite_of(p, BwdSums::Dv, span.i_batch, head, first);
    }
    for_each_row(uniform_word(rows) & rows_there(first, span.seqlen_k), first,
                 [&](int32_t j) { bwd_key_row<spec, simt::Wave>(p, span, head, j, AllQueries{}, masks); });
    return;
  }
  at -= num_key_words(p);
  if constexpr (spec.write_dbias) {
    if (at < num_bias_rows<spec>(p)) {
      const int32_t heads = p.dbias_per_head ? p.fwd.num_heads_q : 1;
      const int64_t row = at / p.fwd.seqlen_q;
      bwd_bias_row<spec, simt::Wave>(p, int32_t(row / heads), int32_t(row % heads), int32_t(at % p.fwd.seqlen_q), masks);
      return;
    }
    at -= num_bias_rows<spec>(p);
  }
  if constexpr (spec.write_dsink) {
    if (at < p.fwd.num_heads_q) bwd_sink<spec, simt::Wave>(p, int32_t(at));
  }
}

}  // namespace fmha::cdna::bwd
