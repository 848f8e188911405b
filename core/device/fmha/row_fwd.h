// Attention forward, a row at a time: right for every spec of the contract and fast for none. It serves as a second
// implementation to compare with, and as the fallback if no fast kernel supports a problem and the caller allows it.
//
// A warp or wave computes one row of O. It processes as many keys at a time as it has lanes: lane l computes the score
// of key l; then the lanes divide the columns of O among themselves and add one key after another. Nothing goes through
// shared memory, so any stride works, and a masked key is never read.
//
// Scores stay natural: times log2(e) a finite bias, sink or soft-cap may overflow f32. A row whose
// unnormalised O overflows f32, while O itself does not, is computed again with O scaled down (`headroom`).
//
// `Lanes` is a type that each vendor defines, with `count`, `index()`, `ballot(bool)` and `from(x, lane)`.
#pragma once
#include <fmha/finish.h>
#include <fmha/mask.h>
#include <fmha/num.h>
#include <fmha/online_softmax.h>
#include <fmha/pair_masks.h>
#include <fmha/philox.h>
#include <fmha/range.h>
#include <fmha/score.h>
#include <fmha/seq.h>

namespace fmha {

FMHA_DEVICE float larger_of(float a, float b) { return a < b ? b : a; }
FMHA_DEVICE float sum_of(float a, float b) { return a + b; }

// Elements of Q, K and V in their stored types, without descales.
struct StoredElems {
  // Product Q[i] . K[j] of the stored elements.
  template <FwdSpec spec>
  static FMHA_DEVICE float product(const FwdParams& p, const SeqSpan& span, int32_t i, int32_t i_head, int32_t j,
                                   int32_t i_head_kv) {
    const int64_t q = query_offset(p, span, i, i_head);
    const int64_t k = row_offset(p.k, kv_row(p, spec.kv_layout, span, j), i_head_kv);
    float dot = 0.f;
    for (int32_t d = 0; d < spec.head_dim_qk; ++d)
      dot += load_elem<spec.dtype_qk>(p.q.data, q + d) * load_elem<spec.dtype_qk>(p.k.data, k + d);
    return dot;
  }

  // The row of V of one key.
  template <FwdSpec spec>
  struct Value {
    const View& v;
    int64_t at;

    FMHA_DEVICE float operator()(int32_t d) const { return load_elem<spec.dtype_v>(v.data, at + d * v.dim); }
  };

  template <FwdSpec spec>
  static FMHA_DEVICE Value<spec> value(const FwdParams& p, const SeqSpan& span, int32_t j, int32_t i_head_kv) {
    return {p.v, row_offset(p.v, kv_row(p, spec.kv_layout, span, j), i_head_kv)};
  }
};

// One query of one sequence and head, whose row of O is computed.
template <FwdSpec spec, class Lanes, class Masks = NoMasks, class Elems = StoredElems>
struct FwdRow {
  static constexpr int32_t columns = ceil_div(spec.head_dim_v, Lanes::count);  // of O, to a lane

  const FwdParams& p;
  const SeqSpan span;
  const int32_t i_head, i;
  const Masks masks = {};
  const Elems elems = {};
  const int32_t lane = Lanes::index();
  const int32_t i_head_kv = i_head / p.gqa_ratio;
  const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);

  float row_max = -infinity();  // of the natural scores so far
  float row_sum = 0.f;          // of exp(score - row_max)
  Array<float, columns> o = {};
  float room = 1.f;  // what O is multiplied by so that it stays in f32
  bool with_room = false;

  FMHA_DEVICE float descale(const HeadScalars& x) const { return scalar_of(x, span.i_batch, i_head_kv, 1.f); }

  template <class Combine>
  FMHA_DEVICE float over_lanes(float x, Combine combine) const {
#pragma unroll
    for (int32_t step = Lanes::count / 2; step > 0; step /= 2) x = combine(x, Lanes::from(x, lane ^ step));
    return x;
  }

  // Product Q[i] . K[j] of the stored elements, without scale.
  FMHA_DEVICE float product(int32_t j) const {
    return elems.template product<spec>(p, span, i, i_head, j, i_head_kv);
  }

  FMHA_DEVICE bool keeps(int32_t j) const { return dropout_keeps(p, head_of_whole(p, span.i_batch, i_head), i, j); }

  // P as operand of the product with V: scaled and rounded to V's
  // type, 0 if dropped. The factor of kept P is applied at the end.
  FMHA_DEVICE float kept(float weight, int32_t j) const {
    constexpr float scale = p_scale(spec.dtype_v);
    const float rounded = round_to<spec.dtype_v>(weight * scale) / scale;
    if constexpr (!spec.dropout) return rounded;
    return keeps(j) ? rounded : 0.f;
  }

  // Computes e^(a - b).
  static FMHA_DEVICE float exp_of_difference(float a, float b) { return exp2_of((a - b) * kLog2E); }

  // Raises the running maximum; returns the factor for the sums and outputs so far.
  FMHA_DEVICE float raise_to(float new_max) {
    const float correction = exp_of_difference(row_max, finite_or_zero(new_max));
    row_max = new_max;
    row_sum *= correction;
    return correction;
  }

  // Multiplies O by a correction, and by the change of the headroom that its sum needs.
  FMHA_DEVICE void rescale(float correction) {
    const float next_room = with_room ? headroom(row_sum) : 1.f;
    const float factor = correction * next_room * inverse_of_power(room);
    room = next_room;
#pragma unroll
    for (int32_t c = 0; c < columns; ++c) o[c] *= factor;
  }

  // Processes the keys of a range, one per lane at a time.
  FMHA_DEVICE void take(Range keys, const Score<spec>& modifiers) {
    for (int32_t first = keys.begin; first < keys.end; first += Lanes::count) {
      const int32_t j = first + lane;
      bool seen = j < keys.end && visible(band, i, j) && masks.sees(span, i_head, i, j);
      uint64_t seen_lanes = Lanes::ballot(seen);
      if (seen_lanes == 0) continue;

      const float score = seen ? modifiers.natural({i, j}, product(j)) : -infinity();
      if constexpr (Score<spec>::hides) {
        seen = seen && score != -infinity();
        seen_lanes = Lanes::ballot(seen);
        if (seen_lanes == 0) continue;
      }
      const float correction = raise_to(max(row_max, over_lanes(score, larger_of)));
      const float weight = seen ? exp_of_difference(score, finite_or_zero(row_max)) : 0.f;
      row_sum += over_lanes(weight, sum_of);
      rescale(correction);
      const float p_j = seen ? kept(weight, j) * room : 0.f;

      for (int32_t l = 0; l < Lanes::count; ++l) {
        if (!(seen_lanes >> l & 1)) continue;  // a hidden V may hold NaN
        add_value(first + l, Lanes::from(p_j, l));
      }
    }
  }

  FMHA_DEVICE void add_value(int32_t j, float weight) {
    const auto value = elems.template value<spec>(p, span, j, i_head_kv);
#pragma unroll
    for (int32_t c = 0; c < columns; ++c) {
      const int32_t d = c * Lanes::count + lane;
      if (d < spec.head_dim_v) o[c] += weight * value(d);
    }
  }

  FMHA_DEVICE void take_sink() {
    if constexpr (spec.sink) {
      const float sink = scalar_of(p.sink, 0, i_head, 0.f);
      const float correction = raise_to(max(row_max, sink));
      row_sum += exp_of_difference(sink, finite_or_zero(row_max));
      rescale(correction);
    }
  }

  FMHA_DEVICE void store() const {
    // O was scaled down by `room`, which is undone here.
    const RowResult end = end_row<ScalarUnit>({0.f, row_max}, row_sum, true);
    const float normaliser = end.factor * inverse_of_power(room);
    const float factor = scaled_output<OutputScales{true, spec.dropout, true}>(1.f, p, span.i_batch, i_head_kv);
    const OutputRow to = output_row(span, i_head, i);
#pragma unroll
    for (int32_t c = 0; c < columns; ++c) {
      const int32_t d = c * Lanes::count + lane;
      float x = o[c] * normaliser;
      // The mean of V is no larger than V: if the sum did not overflow, its last rounding must not either.
      if (with_room && o[c] - o[c] == 0.f) x = clamp(x, -kLargestFloat, kLargestFloat);
      if (d < spec.head_dim_v) store_elem<spec.dtype_o>(p.o.data, to.o(p) + d, x * factor);
    }
    if (spec.write_lse && lane == 0) *to.lse(p) = end.lse;
  }

  // Writes the keep bits of every key of the sequence, masked or not.
  FMHA_DEVICE void store_keep_mask() const {
    if constexpr (spec.write_keep_mask) {
      const int64_t batch_head = int64_t(span.i_batch) * p.num_heads_q + i_head;
      uint8_t* row = p.keep_mask + (batch_head * p.seqlen_q + i) * p.seqlen_k;
      for (int32_t j = lane; j < span.seqlen_k; j += Lanes::count)
        row[j] = !spec.dropout || keeps(j);
    }
  }

  // Computes all keys that the query sees, and its sink.
  FMHA_DEVICE void walk(const Score<spec>& modifiers) {
    const Range row = {i, i + 1};
    take(sink_range(band, row, span.seqlen_k), modifiers);
    take(row_range(band, i, span.seqlen_k), modifiers);
    take_sink();
  }

  FMHA_DEVICE void run() {
    const float scale = p.softmax_scale * descale(p.descale_q) * descale(p.descale_k);
    const Score<spec> modifiers = Score<spec>::of(p, span, i_head, scale);
    walk(modifiers);
    bool is_finite = true;
#pragma unroll
    for (int32_t c = 0; c < columns; ++c) is_finite &= o[c] - o[c] == 0.f;
    if (Lanes::ballot(!is_finite) != 0) {
      row_max = -infinity();
      row_sum = 0.f;
      o = {};
      with_room = true;
      walk(modifiers);
    }
    store();
    store_keep_mask();
  }
};

// Row `at` of all (sequence, head, query) triples, counted by the longest sequence; shorter sequences skip the rest.
template <FwdSpec spec, class Lanes, class Masks = NoMasks, class Elems = StoredElems>
FMHA_DEVICE void fwd_row(const FwdParams& p, int64_t at, const Masks& masks = {}, const Elems& elems = {}) {
  const int32_t i = int32_t(at % p.seqlen_q);
  const int32_t i_head = int32_t(at / p.seqlen_q % p.num_heads_q);
  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, int32_t(at / p.seqlen_q / p.num_heads_q));
  if (i >= span.seqlen_q) return;
  FwdRow<spec, Lanes, Masks, Elems> row{p, span, i_head, i, masks, elems};
  row.run();
}

FMHA_DEVICE int64_t num_fwd_rows(const FwdParams& p) { return int64_t(p.batch) * p.num_heads_q * p.seqlen_q; }

}  // namespace fmha
