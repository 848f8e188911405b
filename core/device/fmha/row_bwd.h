// Attention backward, a row at a time: right for every spec of the contract and fast for none, as row_fwd.h
// is for the forward. A row of dQ, of dK and dV, of dBias, or one head's dSink is computed by a group of
// lanes that run together: lane l computes the pair of the row and its l-th partner; then the lanes divide
// the columns and add the pairs in order. No sums are in memory, so every sum has a fixed order.
//
// `Lanes` is a type that each vendor defines, with `count`, `index()`, `ballot(bool)` and `from(x, lane)`.
#pragma once
#include <fmha/bwd.h>
#include <fmha/exp_sum.h>
#include <fmha/mask.h>
#include <fmha/num.h>
#include <fmha/pair_masks.h>
#include <fmha/philox.h>
#include <fmha/score.h>
#include <fmha/seq.h>

namespace fmha {

// Sum over the lanes, returned in all lanes.
template <class Lanes>
FMHA_DEVICE float lane_sum(float x) {
#pragma unroll
  for (int32_t step = Lanes::count / 2; step > 0; step /= 2) x += Lanes::from(x, Lanes::index() ^ step);
  return x;
}

// P is exp(S - LSE), so rounding LSE to f32 multiplies all P of a row by one wrong
// factor: 0.1 % from this size on, exp(32) at 1e9. In such a row an origin near
// its LSE is subtracted from scores, and its own sum of exponentials replaces LSE.
constexpr float kLargestPlainLse = 16384.f;
FMHA_DEVICE bool is_far(float lse) { return abs_of(lse) >= kLargestPlainLse && abs_of(lse) != infinity(); }

// Numbers from which a query row's P is computed: exp2((S - origin) log2(e) - lse_log2).
struct RowOrigin {
  float origin, lse_log2;
};
// Encodes the `lse_log2` of a far row (one whose |LSE| exceeds kLargestPlainLse) as a number beyond 2^110, which no
// other row has, so that kernels recognise the row. The error is 2^-12.
FMHA_DEVICE float marked_far(float lse_log2) { return (clamp(lse_log2, -2047.f, 2047.f) + 4096.f) * 0x1p100f; }
FMHA_DEVICE bool is_marked_far(float lse_log2) { return lse_log2 > 0x1p110f && lse_log2 != infinity(); }
FMHA_DEVICE float unmarked(float lse_log2) { return is_marked_far(lse_log2) ? lse_log2 * 0x1p-100f - 4096.f : lse_log2; }

FMHA_DEVICE RowOrigin row_origin(const BwdParams& p, int64_t stats) {
  return {p.score_origin[stats], unmarked(p.lse_log2[stats])};
}
// The exponential exp(score - LSE) for a score minus the origin, limited to 1 because of rounding.
FMHA_DEVICE float probability(float score, float lse_log2) { return exp2_of(min(score * kLog2E - lse_log2, 0.f)); }

// Numbers of a pair of a query and a visible key.
struct BwdPair {
  float prob;   // P after dropout: what multiplies dO in dV
  float ds;     // gradient of the score as the softmax sees it: dBias
  float dscore; // gradient of scale * Q K^T: ds times the slope of the score
  bool seen = true;  // no score of -infinity hides the pair
};

// Head of one sequence, whose rows' gradients are computed.
template <BwdSpec spec, class Lanes, class Masks = NoMasks>
struct BwdHead {
  static constexpr FwdSpec kFwd = spec.fwd;

  const BwdParams& p;
  const SeqSpan span;
  const int32_t i_head;
  const Masks masks = {};
  const int32_t i_head_kv = i_head / p.fwd.gqa_ratio;
  const int32_t batch_head = head_of_whole(p.fwd, span.i_batch, i_head);
  const MaskBand band = resolve_band(p.fwd.mask, span.seqlen_q, span.seqlen_k);
  const float descale_q = scalar_of(p.fwd.descale_q, span.i_batch, i_head_kv, 1.f);
  const float descale_k = scalar_of(p.fwd.descale_k, span.i_batch, i_head_kv, 1.f);
  const float descale_v = scalar_of(p.fwd.descale_v, span.i_batch, i_head_kv, 1.f);
  const Score<kFwd> modifiers = Score<kFwd>::of(p.fwd, span, i_head, p.fwd.softmax_scale * descale_q * descale_k);

  // Whether query i sees key j, both of the sequence.
  FMHA_DEVICE bool sees(int32_t i, int32_t j) const { return visible(band, i, j) && masks.sees(span, i_head, i, j); }

  FMHA_DEVICE int64_t q_row(const View& x, int32_t i) const {
    return row_offset(x, span.storage_batch, int64_t(span.q_row) + i, i_head);
  }
  FMHA_DEVICE int64_t k_row(const View& x, int32_t j) const {
    return row_offset(x, kv_row(p.fwd, kFwd.kv_layout, span, j), i_head_kv);
  }

  // Product Q[i] . K[j] of the stored elements, without scale.
  FMHA_DEVICE float product(int32_t i, int32_t j) const {
    const int64_t q = q_row(p.fwd.q, i), k = k_row(p.fwd.k, j);
    float product = 0.f;
    for (int32_t d = 0; d < kFwd.head_dim_qk; ++d)
      product += load_elem<kFwd.dtype_qk>(p.fwd.q.data, q + d) * load_elem<kFwd.dtype_qk>(p.fwd.k.data, k + d);
    return product;
  }

  // The sum of exponentials of the scores that query i sees, and of its sink, minus `origin`.
  FMHA_DEVICE ExpSum sum_from(float origin, int32_t i) const {
    ExpSum sum;
    if constexpr (requires { masks.of(span, i, i_head_kv); }) {
      const auto list = masks.of(span, i, i_head_kv);
      const int32_t count = list.count();
      for (int32_t n = Lanes::index(); n < count; n += Lanes::count) {
        const int32_t j = list.key(n);
        if (j >= 0) sum.add(modifiers.natural({i, j}, product(i, j)) - origin);
      }
    } else {
      const auto take = [&](Range keys) {
        for (int32_t j = keys.begin + Lanes::index(); j < keys.end; j += Lanes::count)
          if (sees(i, j)) sum.add(modifiers.natural({i, j}, product(i, j)) - origin);
      };
      const Range row = {i, i + 1};
      take(sink_range(band, row, span.seqlen_k));
      take(k_range(band, row, span.seqlen_k));
    }
#pragma unroll
    for (int32_t step = Lanes::count / 2; step > 0; step /= 2) {
      const int32_t other = Lanes::index() ^ step;
      sum.merge({Lanes::from(sum.top, other), Lanes::from(sum.sum, other)});
    }
    if constexpr (kFwd.sink) sum.add(scalar_of(p.fwd.sink, 0, i_head, -infinity()) - origin);
    return sum;
  }

  FMHA_DEVICE BwdPair pair(int32_t i, int32_t j) const {
    const int64_t v = k_row(p.fwd.v, j), dout = q_row(p.dout, i);
    const Scored score = modifiers.natural({i, j}, product(i, j), [&] { return modifiers.element({i, j}); });
    if constexpr (Score<kFwd>::hides) {
      if (score.score == -infinity()) return {0.f, 0.f, 0.f, false};
    }
    float dp = 0.f;
    for (int32_t d = 0; d < kFwd.head_dim_v; ++d)
      dp += load_elem<kFwd.dtype_o>(p.dout.data, dout + d) *
            load_elem<kFwd.dtype_v>(p.fwd.v.data, v + d * p.fwd.v.dim);
    dp *= descale_v;

    const int64_t stats = stats_offset(p, span, i_head, i);
    BwdPair pair;
    const RowOrigin row = row_origin(p, stats);
    const float prob = probability(score.score - row.origin, row.lse_log2);
    float kept = 1.f;
    if constexpr (kFwd.dropout) kept = dropout_keeps(p.fwd, batch_head, i, j) ? p.fwd.dropout_scale : 0.f;
    pair.prob = kept == 0.f ? 0.f : prob * kept;
    pair.ds = prob * ((kept == 0.f ? 0.f : dp * kept) - p.delta[stats]);
    pair.dscore = pair.ds * score.slope;
    return pair;
  }

  // Adds a pair's share to the gradients of captured tensors: `add(element, gradient)` in all lanes together, 0 from
  // a pair that is not `seen`.
  template <class Add>
  FMHA_DEVICE void add_captured(int32_t i, int32_t j, bool seen, Add add) const {
    BwdPair here = {0.f, 0.f, 0.f, false};
    float y = 0.f;
    if (seen) {
      here = pair(i, j);
      y = product(i, j) * modifiers.scale;
    }
    const float gradient = here.seen ? here.ds * modifiers.slope_behind_functions({i, j}, y) : 0.f;
    static_cast<const Functions&>(modifiers).slopes({i, j}, y, [&](int32_t, int64_t at, float slope) {
      // A gradient of 0 times an infinite derivative counts as 0: the pair contributes nothing.
      add(at, gradient == 0.f ? 0.f : gradient * slope);
    });
  }
};

// A row's columns, divided among the lanes.
template <int32_t dim, class Lanes>
struct RowSums {
  static constexpr int32_t columns = ceil_div(dim, Lanes::count);
  Array<float, columns> sums = {};

  template <DType dtype>
  FMHA_DEVICE void add(const void* data, int64_t row, float factor) {
#pragma unroll
    for (int32_t c = 0; c < columns; ++c) {
      const int32_t d = c * Lanes::count + Lanes::index();
      if (d < dim) sums[c] += factor * load_elem<dtype>(data, row + d);
    }
  }
  // Stores to memory; with `adds`, adds to the value there.
  template <DType dtype, bool adds = false>
  FMHA_DEVICE void store(void* data, int64_t row, float factor) const {
#pragma unroll
    for (int32_t c = 0; c < columns; ++c) {
      const int32_t d = c * Lanes::count + Lanes::index();
      if (d >= dim) continue;
      float sum = sums[c] * factor;
      if constexpr (adds) sum += load_elem<dtype>(data, row + d);
      store_elem<dtype>(data, row + d, sum);
    }
  }
};

// Origin that is subtracted from a far row's scores. A row whose gradients of O and LSE are 0
// contributes nothing and needs no sum; most rows fully masked by a bias of -1e9 are such rows.
template <BwdSpec spec, class Lanes, class Masks = NoMasks>
FMHA_DEVICE RowOrigin origin_of_far_row(const BwdParams& p, const SeqSpan& span, int32_t i_head, int32_t i, float lse,
                                        float delta, const Masks& masks = {}) {
  const BwdHead<spec, Lanes, Masks> head{p, span, i_head, masks};
  const int64_t dout = head.q_row(p.dout, i);
  bool adds = delta != 0.f;
  for (int32_t d = Lanes::index(); d < spec.fwd.head_dim_v; d += Lanes::count)
    adds |= load_elem<spec.fwd.dtype_o>(p.dout.data, dout + d) != 0.f;
  if (Lanes::ballot(adds) == 0) return {lse, infinity()};
  float origin = lse;
  ExpSum sum = head.sum_from(origin, i);
  // LSE may be wrong by a few ulps, each up to 2e31, so the sum is computed once more from the largest score.
  if (abs_of(sum.top) >= 1024.f && abs_of(sum.top) != infinity()) {
    origin += sum.top;
    sum = head.sum_from(origin, i);
  }
  return {origin, sum.sum == 0.f ? infinity() : sum.log() * kLog2E};
}

// LSE in log2, its origin, and delta = dO . O - dLSE of query i: what `BwdHead::pair` reads.
template <BwdSpec spec, class Lanes, class Masks = NoMasks>
FMHA_DEVICE void bwd_stats_row(const BwdParams& p, const SeqSpan& span, int32_t i_head, int32_t i,
                               const Masks& masks = {}) {
  constexpr DType dtype = spec.fwd.dtype_o;
  const int64_t o = row_offset(p.fwd.o, span.storage_batch, int64_t(span.q_row) + i, i_head);
  const int64_t dout = row_offset(p.dout, span.storage_batch, int64_t(span.q_row) + i, i_head);
  float dot = 0.f;
  for (int32_t d = Lanes::index(); d < spec.fwd.head_dim_v; d += Lanes::count)
    dot += load_elem<dtype>(p.fwd.o.data, o + d) * load_elem<dtype>(p.dout.data, dout + d);
  dot = lane_sum<Lanes>(dot);
  const int64_t at = lse_offset(p.fwd, span, i_head, i), stats = stats_offset(p, span, i_head, i);
  const float delta = spec.has_dlse ? dot - p.dlse[at] : dot;
  float lse = p.fwd.lse[at];
  if constexpr (spec.fwd.sink && requires { masks.lse_with_sink(p, i_head, lse); }) {
    lse = masks.lse_with_sink(p, i_head, lse);
  }
  // A row without visible keys contributes nothing: its P are 0.
  RowOrigin row = {0.f, lse == -infinity() ? infinity() : lse * kLog2E};
  if (is_far(lse)) row = origin_of_far_row<spec, Lanes>(p, span, i_head, i, lse, delta, masks);
  if (Lanes::index() != 0) return;
  p.score_origin[stats] = row.origin;
  p.lse_log2[stats] = row.lse_log2;
  p.delta[stats] = delta;
}

// Computes dQ of query i.
template <BwdSpec spec, class Lanes, class Masks = NoMasks>
FMHA_DEVICE void bwd_query_row(const BwdParams& p, const SeqSpan& span, int32_t i_head, int32_t i,
                               const Masks& masks = {}) {
  const BwdHead<spec, Lanes, Masks> head{p, span, i_head, masks};
  RowSums<spec.fwd.head_dim_qk, Lanes> dq;
  const Range row = {i, i + 1};
  const auto take = [&](Range keys) {
    for (int32_t first = keys.begin; first < keys.end; first += Lanes::count) {
      const int32_t j = first + Lanes::index();
      const bool seen = j < keys.end && head.sees(i, j);
      uint64_t seen_lanes = Lanes::ballot(seen);
      if (seen_lanes == 0) continue;
      BwdPair pair = {0.f, 0.f, 0.f, false};
      if (seen) pair = head.pair(i, j);
      const float dscore = pair.dscore;
      if constexpr (Functions::in(spec.fwd)) seen_lanes = Lanes::ballot(pair.seen);
      for (int32_t l = 0; l < Lanes::count; ++l) {
        if (!(seen_lanes >> l & 1)) continue;  // a hidden K may hold NaN
        dq.template add<spec.fwd.dtype_qk>(p.fwd.k.data, head.k_row(p.fwd.k, first + l), Lanes::from(dscore, l));
      }
    }
  };
  take(sink_range(head.band, row, span.seqlen_k));
  take(k_range(head.band, row, span.seqlen_k));
  dq.template store<spec.dtype_grad>(p.dq.data, head.q_row(p.dq, i), p.fwd.softmax_scale * head.descale_k);
}

// Accepts all queries of a head.
struct AllQueries {
  FMHA_DEVICE bool operator()(int32_t i_head, int32_t i) const { return true; }
};

// Gradients of a key's row: dK and dV, or one of them.
enum class KeyRow { Both, Dk, Dv };

// Computes dK and dV of key j. With `adds`, the contribution of the queries that `takes(i_head, i)` accepts is added to
// dK and dV in memory.
template <BwdSpec spec, class Lanes, bool adds = false, class Takes = AllQueries, class Masks = NoMasks,
          KeyRow made = KeyRow::Both>
FMHA_DEVICE void bwd_key_row(const BwdParams& p, const SeqSpan& span, int32_t i_head_kv, int32_t j, Takes takes = {},
                             const Masks& masks = {}) {
  RowSums<spec.fwd.head_dim_qk, Lanes> dk;
  RowSums<spec.fwd.head_dim_v, Lanes> dv;
  for (int32_t g = 0; g < p.fwd.gqa_ratio; ++g) {
    const BwdHead<spec, Lanes, Masks> head{p, span, i_head_kv * p.fwd.gqa_ratio + g, masks};
    const Range queries = query_range(head.band, {j, j + 1}, span.seqlen_q);
    for (int32_t first = queries.begin; first < queries.end; first += Lanes::count) {
      const int32_t i = first + Lanes::index();
      const bool seen = i < queries.end && head.sees(i, j) && takes(head.i_head, i);
      uint64_t seen_lanes = Lanes::ballot(seen);
      if (seen_lanes == 0) continue;
      BwdPair pair = {0.f, 0.f, 0.f, false};
      if (seen) pair = head.pair(i, j);
      if constexpr (Functions::in(spec.fwd)) seen_lanes = Lanes::ballot(pair.seen);
      for (int32_t l = 0; l < Lanes::count; ++l) {
        if (!(seen_lanes >> l & 1)) continue;
        if constexpr (made != KeyRow::Dk) {
          dv.template add<spec.fwd.dtype_o>(p.dout.data, head.q_row(p.dout, first + l), Lanes::from(pair.prob, l));
        }
        if constexpr (made != KeyRow::Dv) {
          dk.template add<spec.fwd.dtype_qk>(p.fwd.q.data, head.q_row(p.fwd.q, first + l), Lanes::from(pair.dscore, l));
        }
      }
    }
  }
  const BwdHead<spec, Lanes> head{p, span, i_head_kv * p.fwd.gqa_ratio};
  if constexpr (made != KeyRow::Dv) {
    dk.template store<spec.dtype_grad, adds>(p.dk.data, head.k_row(p.dk, j), p.fwd.softmax_scale * head.descale_q);
  }
  if constexpr (made != KeyRow::Dk) dv.template store<spec.dtype_grad, adds>(p.dv.data, head.k_row(p.dv, j), 1.f);
}

// Computes row i of dBias of (`i_batch`, `i_head`), summed over all sequences and heads that share it; all of it is
// written, zeros included.
template <BwdSpec spec, class Lanes, class Masks = NoMasks>
FMHA_DEVICE void bwd_bias_row(const BwdParams& p, int32_t i_batch, int32_t i_head, int32_t i,
                              const Masks& masks = {}) {
  const Range batches = p.dbias_per_batch ? Range{i_batch, i_batch + 1} : Range{0, p.fwd.batch};
  const Range heads = p.dbias_per_head ? Range{i_head, i_head + 1} : Range{0, p.fwd.num_heads_q};
  const int64_t row = i_batch * p.dbias.batch + i_head * p.dbias.head + i * p.dbias.row;
  for (int32_t j = Lanes::index(); j < p.fwd.seqlen_k; j += Lanes::count) {
    float sum = 0.f;
    for (int32_t b = batches.begin; b < batches.end; ++b) {
      const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, b);
      if (i >= span.seqlen_q || j >= span.seqlen_k) continue;
      for (int32_t h = heads.begin; h < heads.end; ++h) {
        const BwdHead<spec, Lanes, Masks> head{p, span, h, masks};
        if (head.sees(i, j)) sum += head.pair(i, j).ds;
      }
    }
    store_elem<spec.dtype_dbias>(p.dbias.data, row + j * p.dbias.dim, sum);
  }
}

// Adds the contributions of a share of the query rows, in order, to the gradients of captured tensors: each share has
// sums of its own. Each lane has some elements and adds to them in the order of pairs, so that sums have a fixed order
// and no lane waits for another.
template <BwdSpec spec, class Lanes>
FMHA_DEVICE void bwd_captured_part(const BwdParams& p, int64_t part) {
  float* sums = p.captured_sums + part * p.captured_elems;
  for (int64_t e = Lanes::index(); e < p.captured_elems; e += Lanes::count) sums[e] = 0.f;
  const int64_t rows = int64_t(p.fwd.batch) * p.fwd.num_heads_q * p.fwd.seqlen_q;
  const int64_t share = (rows + p.captured_parts - 1) / p.captured_parts, end = min(rows, (part + 1) * share);
  for (int64_t row = part * share; row < end; ++row) {
    const int32_t i = int32_t(row % p.fwd.seqlen_q), i_head = int32_t(row / p.fwd.seqlen_q % p.fwd.num_heads_q);
    const int32_t i_batch = int32_t(row / p.fwd.seqlen_q / p.fwd.num_heads_q);
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
    if (i >= span.seqlen_q) continue;
    const BwdHead<spec, Lanes> head{p, span, i_head};
    const auto take = [&](Range keys) {
      for (int32_t first = keys.begin; first < keys.end; first += Lanes::count) {
        const int32_t j = first + Lanes::index();
        const bool seen = j < keys.end && visible(head.band, i, j);
        if (Lanes::ballot(seen) == 0) continue;
        head.add_captured(i, j, seen, [&](int64_t at, float gradient) {
          for (int32_t l = 0; l < Lanes::count; ++l) {
            const float added = Lanes::from(gradient, l);
            const uint32_t low = bits_of(Lanes::from(float_of(uint32_t(at)), l));
            const uint32_t high = bits_of(Lanes::from(float_of(uint32_t(uint64_t(at) >> 32)), l));
            const int64_t element = int64_t(uint64_t(high) << 32 | low);
            if (added != 0.f && element % Lanes::count == Lanes::index()) sums[element] += added;
          }
        });
      }
    };
    const Range row_of = {i, i + 1};
    take(sink_range(head.band, row_of, span.seqlen_k));
    take(k_range(head.band, row_of, span.seqlen_k));
  }
}

// Element `at` of all gradients of captured tensors: its sums over the shares, in their order.
FMHA_DEVICE void bwd_captured_element(const BwdParams& p, int64_t at) {
  float sum = 0.f;
  for (int64_t part = 0; part < p.captured_parts; ++part) sum += p.captured_sums[part * p.captured_elems + at];
#pragma unroll
  for (int32_t g = code::kNumGradients - 1; g >= 0; --g) {
    const uint64_t* words = &p.fwd.code.elems[code::kFirstGradientWord + 2 * g];
    if (at < int64_t(words[0])) continue;
    void* out = reinterpret_cast<void*>(words[1]);
    const int64_t element = at - int64_t(words[0]);
    if (code::gradient_dtype(g) == DType::F32) store_elem<DType::F32>(out, element, sum);
    else if (code::gradient_dtype(g) == DType::F16) store_elem<DType::F16>(out, element, sum);
    else store_elem<DType::Bf16>(out, element, sum);
    break;
  }
}

// Contribution to dSink of the query whose LSE and delta are at `stats`: exp(sink - LSE) (dLSE - dO . O).
FMHA_DEVICE float sink_term(const BwdParams& p, int64_t stats, float sink, RowOrigin row) {
  // The LSE is +infinity for a row without visible keys and with a sink of -infinity.
  if (row.lse_log2 == infinity()) return 0.f;
  return -probability(sink - row.origin, row.lse_log2) * p.delta[stats];
}
FMHA_DEVICE float sink_term(const BwdParams& p, int64_t stats, float sink) {
  return sink_term(p, stats, sink, row_origin(p, stats));
}

// Computes dSink of a head, over all its queries.
template <BwdSpec spec, class Lanes>
FMHA_DEVICE void bwd_sink(const BwdParams& p, int32_t i_head) {
  const float sink = scalar_of(p.fwd.sink, 0, i_head, -infinity());
  float sum = 0.f;
  for (int32_t b = 0; b < p.fwd.batch; ++b) {
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, b);
    for (int32_t i = Lanes::index(); i < span.seqlen_q; i += Lanes::count)
      sum += sink_term(p, stats_offset(p, span, i_head, i), sink);
  }
  sum = lane_sum<Lanes>(sum);
  if (Lanes::index() == 0) p.dsink[i_head] = sum;
}

// Number of rows of each kind, also those beyond their sequence's length.
FMHA_DEVICE int64_t num_query_rows(const BwdParams& p) {
  return int64_t(p.fwd.batch) * p.fwd.num_heads_q * p.fwd.seqlen_q;
}
FMHA_DEVICE int64_t num_key_rows(const BwdParams& p) {
  return int64_t(p.fwd.batch) * p.fwd.num_heads_kv * p.fwd.seqlen_k;
}
template <BwdSpec spec>
FMHA_DEVICE int64_t num_bias_rows(const BwdParams& p) {
  if (!spec.write_dbias) return 0;
  return int64_t(p.dbias_per_batch ? p.fwd.batch : 1) * (p.dbias_per_head ? p.fwd.num_heads_q : 1) * p.fwd.seqlen_q;
}
template <BwdSpec spec>
FMHA_DEVICE int64_t num_bwd_rows(const BwdParams& p) {
  return num_query_rows(p) + num_key_rows(p) + num_bias_rows<spec>(p) + (spec.write_dsink ? p.fwd.num_heads_q : 0) +
         (spec.write_dcaptured ? p.captured_parts : 0);
}

// First launch of the backward: LSE in log2, delta and the origin of scores of query row `at`.
template <BwdSpec spec, class Lanes, class Masks = NoMasks>
FMHA_DEVICE void bwd_stats(const BwdParams& p, int64_t at, const Masks& masks = {}) {
  const int32_t i = int32_t(at % p.fwd.seqlen_q), i_head = int32_t(at / p.fwd.seqlen_q % p.fwd.num_heads_q);
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, int32_t(at / p.fwd.seqlen_q / p.fwd.num_heads_q));
  if (i < span.seqlen_q) bwd_stats_row<spec, Lanes>(p, span, i_head, i, masks);
}

// The second launch: row `at` of dQ, then of dK and dV, then of dBias, then of dSink, then shares of captured
// gradients.
template <BwdSpec spec, class Lanes, class Masks = NoMasks>
FMHA_DEVICE void bwd_row(const BwdParams& p, int64_t at, const Masks& masks = {}) {
  if (at < num_query_rows(p)) {
    const int32_t i = int32_t(at % p.fwd.seqlen_q), i_head = int32_t(at / p.fwd.seqlen_q % p.fwd.num_heads_q);
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, int32_t(at / p.fwd.seqlen_q / p.fwd.num_heads_q));
    if (i < span.seqlen_q) bwd_query_row<spec, Lanes>(p, span, i_head, i, masks);
    return;
  }
  at -= num_query_rows(p);
  if (at < num_key_rows(p)) {
    const int32_t j = int32_t(at % p.fwd.seqlen_k), i_head_kv = int32_t(at / p.fwd.seqlen_k % p.fwd.num_heads_kv);
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, int32_t(at / p.fwd.seqlen_k / p.fwd.num_heads_kv));
    if (j < span.seqlen_k) bwd_key_row<spec, Lanes>(p, span, i_head_kv, j, AllQueries{}, masks);
    return;
  }
  at -= num_key_rows(p);
  if constexpr (spec.write_dbias) {
    if (at < num_bias_rows<spec>(p)) {
      const int32_t heads = p.dbias_per_head ? p.fwd.num_heads_q : 1;
      const int64_t row = at / p.fwd.seqlen_q;
      bwd_bias_row<spec, Lanes>(p, int32_t(row / heads), int32_t(row % heads), int32_t(at % p.fwd.seqlen_q), masks);
      return;
    }
    at -= num_bias_rows<spec>(p);
  }
  if constexpr (spec.write_dsink) {
    if (at < p.fwd.num_heads_q) {
      bwd_sink<spec, Lanes>(p, int32_t(at));
      return;
    }
    at -= p.fwd.num_heads_q;
  }
  if constexpr (spec.write_dcaptured) bwd_captured_part<spec, Lanes>(p, at);
}

}  // namespace fmha
