// Small outputs of the forward, in separate launches after the kernel that writes O, whichever kernel that is: the
// greatest score of each row and of each head, and each key's sum of probabilities. Scores are computed again in f32.
//
// One group of lanes computes a row's numbers, or those of a key, whose queries its lanes
// handle in rotation: every sum has a fixed order. Nothing goes through shared memory.
//
// `Lanes` is a type that each vendor defines, with `count`, `index()`, `ballot(bool)` and `from(x, lane)`.
#pragma once
#include <fmha/bwd.h>
#include <fmha/exp_sum.h>
#include <fmha/mask.h>
#include <fmha/num.h>
#include <fmha/pair_masks.h>
#include <fmha/score.h>
#include <fmha/seq.h>
#include <fmha/small_params.h>

namespace fmha {

// The greater of two numbers; NaN if one is NaN.
FMHA_DEVICE float greater_of(float a, float b) { return b > a || b != b ? b : a; }

// Head of one sequence, whose small outputs are computed.
template <FwdSpec spec, class Lanes, class Masks = NoMasks>
struct SmallHead {
  const FwdParams& p;
  const SeqSpan span;
  const int32_t i_head;
  const Masks masks = {};
  const int32_t i_head_kv = i_head / p.gqa_ratio;
  const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);
  const Score<spec> modifiers =
      Score<spec>::of(p, span, i_head,
                      p.softmax_scale * scalar_of(p.descale_q, span.i_batch, i_head_kv, 1.f) *
                          scalar_of(p.descale_k, span.i_batch, i_head_kv, 1.f));

  FMHA_DEVICE bool sees(int32_t i, int32_t j) const { return visible(band, i, j) && masks.sees(span, i_head, i, j); }

  // Score of query i and its visible key j; -infinity if a mask as code hides it.
  FMHA_DEVICE float score(int32_t i, int32_t j) const {
    const int64_t q = query_offset(p, span, i, i_head);
    const int64_t k = row_offset(p.k, kv_row(p, spec.kv_layout, span, j), i_head_kv);
    float dot = 0.f;
    for (int32_t d = 0; d < spec.head_dim_qk; ++d)
      dot += load_elem<spec.dtype_qk>(p.q.data, q + d) * load_elem<spec.dtype_qk>(p.k.data, k + d);
    return modifiers.natural({i, j}, dot);
  }
};

// Numbers of a row that later launches read, three in the workspace.
struct SmallRow {
  float max;      // the greatest score
  float top;      // of scores and sink, from which exponentials are measured
  float inverse;  // of their sum; 0 of a row without weight
};
FMHA_DEVICE SmallRow load_small_row(const SmallParams& small, int64_t at) {
  const float* row = small.rows + 3 * at;
  return {row[0], row[1], row[2]};
}

// Row `at` of all (sequence, head, query) triples.
template <FwdSpec spec, class Lanes, class Masks = NoMasks>
FMHA_DEVICE void small_row(const FwdParams& p, const SmallParams& small, int64_t at, const Masks& masks = {}) {
  const int32_t i = int32_t(at % p.seqlen_q), i_head = int32_t(at / p.seqlen_q % p.num_heads_q);
  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, int32_t(at / p.seqlen_q / p.num_heads_q));
  if (i >= span.seqlen_q) return;
  const SmallHead<spec, Lanes, Masks> head{p, span, i_head, masks};
  float greatest = -infinity();
  ExpSum sum;
  const auto take = [&](Range keys) {
    for (int32_t begin = keys.begin; begin < keys.end; begin += Lanes::count) {
      const int32_t j = begin + Lanes::index();
      const bool seen = j < keys.end && head.sees(i, j);
      if (Lanes::ballot(seen) == 0) continue;
      // A score of -infinity changes neither number.
      const float score = seen ? head.score(i, j) : -infinity();
      greatest = greater_of(greatest, score);
      sum.add(score);
    }
  };
  const Range row = {i, i + 1};
  take(sink_range(head.band, row, span.seqlen_k));
  take(row_range(head.band, i, span.seqlen_k));
#pragma unroll
  for (int32_t step = Lanes::count / 2; step > 0; step /= 2) {
    const int32_t other = Lanes::index() ^ step;
    greatest = greater_of(greatest, Lanes::from(greatest, other));
    sum.merge({Lanes::from(sum.top, other), Lanes::from(sum.sum, other)});
  }
  if constexpr (spec.sink) sum.add(scalar_of(p.sink, 0, i_head, -infinity()));
  if (Lanes::index() != 0) return;
  float* to = small.rows + 3 * at;
  to[0] = greatest;
  to[1] = sum.top;
  to[2] = sum.normaliser();
  if (small.row_max) small.row_max[lse_offset(p, span, i_head, i)] = greatest;
}

// The greatest score of a head, over all rows that its sequences have.
template <FwdSpec spec, class Lanes>
FMHA_DEVICE void small_head(const FwdParams& p, const SmallParams& small, int32_t i_head) {
  float greatest = -infinity();
  for (int32_t b = 0; b < p.batch; ++b) {
    const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, b);
    const int64_t first = (int64_t(b) * p.num_heads_q + i_head) * p.seqlen_q;
#pragma unroll 4
    for (int32_t i = Lanes::index(); i < span.seqlen_q; i += Lanes::count)
      greatest = greater_of(greatest, load_small_row(small, first + i).max);
  }
#pragma unroll
  for (int32_t step = Lanes::count / 2; step > 0; step /= 2)
    greatest = greater_of(greatest, Lanes::from(greatest, Lanes::index() ^ step));
  if (Lanes::index() == 0) small.head_max[i_head] = greatest;
}

// Key `at` of all (sequence, head, key) triples; writes 0 for a key beyond its sequence.
template <FwdSpec spec, class Lanes, class Masks = NoMasks>
FMHA_DEVICE void small_key(const FwdParams& p, const SmallParams& small, int64_t at, const Masks& masks = {}) {
  const int32_t j = int32_t(at % p.seqlen_k), i_head = int32_t(at / p.seqlen_k % p.num_heads_q);
  const int32_t i_batch = int32_t(at / p.seqlen_k / p.num_heads_q);
  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
  float sum = 0.f;
  if (j < span.seqlen_k) {
    const SmallHead<spec, Lanes, Masks> head{p, span, i_head, masks};
    const Range queries = query_range(head.band, {j, j + 1}, span.seqlen_q);
    const int64_t first = (int64_t(i_batch) * p.num_heads_q + i_head) * p.seqlen_q;
    for (int32_t begin = queries.begin; begin < queries.end; begin += Lanes::count) {
      const int32_t i = begin + Lanes::index();
      const bool seen = i < queries.end && head.sees(i, j);
      if (Lanes::ballot(seen) == 0) continue;
      const float score = seen ? head.score(i, j) : -infinity();
      const SmallRow row = load_small_row(small, first + min(i, queries.end - 1));
      const float prob = exp2_of(min((score - row.top) * kLog2E, 0.f)) * row.inverse;
      // A hidden pair adds 0, even if the row's statistics are not finite.
      sum += score == -infinity() ? 0.f : prob;
    }
  }
#pragma unroll
  for (int32_t step = Lanes::count / 2; step > 0; step /= 2) sum += Lanes::from(sum, Lanes::index() ^ step);
  if (Lanes::index() == 0) small.key_sum[at] = sum;
}

FMHA_DEVICE int64_t num_small_rows(const FwdParams& p) { return int64_t(p.batch) * p.num_heads_q * p.seqlen_q; }
FMHA_DEVICE int64_t num_small_keys(const FwdParams& p) { return int64_t(p.batch) * p.num_heads_q * p.seqlen_k; }

}  // namespace fmha
