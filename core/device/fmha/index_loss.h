// The loss that trains an indexer, by definition (`fmha_core::sparse::index_loss`), and its gradients. A warp or wave
// computes
//
//   scores    entries of a list, one a lane: I = sum_h relu(q_h . k) w_h; -inf where the entry is absent
//   loss      a row: p = target / its sum, q = softmax of the scores, loss = sum p (ln p - ln q); the scores' place
//             then has d loss / d score = q - p, times the caller's factor; 0 where the entry is absent
//   queries   dq and dw of a row's head, over the row's list
//   keys      dk of 32 keys, to which nothing else adds: it walks the lists of the keys' sequence in their order
//
// A slope of relu at 0 is 0. What no list names is not read. Every sum has one order.
#pragma once
#include <fmha/index_loss_params.h>
#include <fmha/num.h>

namespace fmha::index_loss {

// Keys to which one group of lanes adds.
constexpr int32_t kKeys = 32;

FMHA_DEVICE int64_t num_rows(const IndexLossParams& p) { return int64_t(p.batch) * p.seqlen_q; }

// NaN stays NaN.
FMHA_DEVICE float relu(float x) { return x <= 0.f ? 0.f : x; }

// The key that an entry names, among those of its sequence; -1 if the entry is absent.
FMHA_DEVICE int32_t key_at(const IndexLossParams& p, int64_t row, int32_t entry) {
  const int32_t j = ((const int32_t FMHA_GLOBAL*)p.indices)[row * p.topk + entry];
  return j >= 0 && j < p.seqlen_k ? j : -1;
}

// The row of k that a key of a query's sequence has.
FMHA_DEVICE int64_t key_row(const IndexLossParams& p, int64_t row, int32_t j) {
  return row / p.seqlen_q * p.seqlen_k + j;
}

template <IndexLossSpec spec>
FMHA_DEVICE float scale_of(const IndexLossParams& p, int64_t key) {
  if constexpr (spec.k_scale) return p.k_scale[key];
  return 1.f;
}

// q_h . k of a query's head and a key, elements in their order.
template <IndexLossSpec spec>
FMHA_DEVICE float product(const IndexLossParams& p, int64_t head, int64_t key) {
  float sum = 0.f;
#pragma unroll 1
  for (int32_t d = 0; d < spec.head_dim; ++d) {
    const float of_q = load_elem<spec.dtype_q>(p.q, head * spec.head_dim + d);
    sum += of_q * load_elem<spec.dtype_k>(p.k, key * spec.head_dim + d);
  }
  return sum * scale_of<spec>(p, key);
}

template <class Lanes>
FMHA_DEVICE float lane_sum(float x) {
#pragma unroll
  for (int32_t step = Lanes::count / 2; step > 0; step /= 2) x += Lanes::from(x, Lanes::index() ^ step);
  return x;
}
template <class Lanes>
FMHA_DEVICE float lane_max(float x) {
#pragma unroll
  for (int32_t step = Lanes::count / 2; step > 0; step /= 2) x = max(x, Lanes::from(x, Lanes::index() ^ step));
  return x;
}

// Scores of the `at`-th group of a row's entries.
template <IndexLossSpec spec, class Lanes>
FMHA_DEVICE void scores(const IndexLossParams& p, int64_t at) {
  const int32_t per_row = ceil_div(p.topk, Lanes::count);
  const int64_t row = at / per_row;
  const int32_t entry = int32_t(at % per_row) * Lanes::count + Lanes::index();
  if (entry >= p.topk) return;
  const int32_t j = key_at(p, row, entry);
  float score = -infinity();
  if (j >= 0) {
    score = 0.f;
#pragma unroll 1
    for (int32_t h = 0; h < spec.num_heads; ++h) {
      const int64_t head = row * spec.num_heads + h;
      score += relu(product<spec>(p, head, key_row(p, row, j))) * p.weights[head];
    }
  }
  p.scores[row * p.topk + entry] = score;
}

// Loss of a row, and the gradients of its scores in their place.
template <class Lanes>
FMHA_DEVICE void loss_row(const IndexLossParams& p, int64_t row) {
  float* const scores = p.scores + row * p.topk;
  const float* const target = p.target + row * p.topk;
  float greatest = -infinity(), weight = 0.f;
  uint64_t listed = 0;
  for (int32_t first = 0; first < p.topk; first += Lanes::count) {
    const int32_t entry = first + Lanes::index();
    const float score = entry < p.topk ? scores[entry] : -infinity();
    const bool is_listed = score != -infinity();
    listed |= Lanes::ballot(is_listed);
    greatest = max(greatest, score);
    weight += is_listed ? target[entry] : 0.f;
  }
  // A NaN among the scores stays out of the maximum, and in the sum of exponentials.
  greatest = lane_max<Lanes>(greatest);
  weight = lane_sum<Lanes>(weight);
  const bool is_any = listed != 0 && weight != 0.f;
  float sum = 0.f;
  for (int32_t entry = Lanes::index(); entry < p.topk; entry += Lanes::count) {
    if (is_any && scores[entry] != -infinity()) sum += exp2_of((scores[entry] - greatest) * kLog2E);
  }
  const float log_sum = log2_of(lane_sum<Lanes>(sum)) * kLn2, factor = p.dloss ? p.dloss[row] : 1.f;
  float loss = 0.f;
  for (int32_t entry = Lanes::index(); entry < p.topk; entry += Lanes::count) {
    float gradient = 0.f;
    if (is_any && scores[entry] != -infinity()) {
      const float share = target[entry] / weight, ln_q = scores[entry] - greatest - log_sum;
      if (share > 0.f) loss += share * (log2_of(share) * kLn2 - ln_q);
      gradient = exp2_of(ln_q * kLog2E) - share;
      // A gradient of 0 times an infinite factor is 0.
      if (gradient != 0.f) gradient *= factor;
    }
    scores[entry] = gradient;
  }
  loss = lane_sum<Lanes>(loss);
  if (p.loss && Lanes::index() == 0) p.loss[row] = loss;
}

// Calls `add(lane, factor)` for the lanes whose factor is not 0, in their order; it must not tell lanes apart.
template <class Lanes, class Add>
FMHA_DEVICE void each_factor(float factor, Add add) {
  const uint64_t lanes = Lanes::ballot(factor != 0.f);
  for (int32_t lane = 0; lane < Lanes::count; ++lane) {
    if (lanes >> lane & 1) add(lane, Lanes::from(factor, lane));
  }
}

// Gradients of a query's head, the `head`-th of all: of its row of q, and of its weight.
template <IndexLossSpec spec, class Lanes>
FMHA_DEVICE void query_head(const IndexLossParams& p, int64_t head) {
  constexpr int32_t columns = ceil_div(spec.head_dim, Lanes::count);
  const int64_t row = head / spec.num_heads;
  const float weight = p.weights[head];
  Array<float, columns> sums = {};
  float of_weight = 0.f;
  for (int32_t first = 0; first < p.topk; first += Lanes::count) {
    const int32_t entry = first + Lanes::index(), j = entry < p.topk ? key_at(p, row, entry) : -1;
    if (Lanes::ballot(j >= 0) == 0) continue;
    float factor = 0.f;
    if (j >= 0) {
      const int64_t key = key_row(p, row, j);
      const float x = product<spec>(p, head, key), d_score = p.scores[row * p.topk + entry];
      of_weight += d_score * relu(x);
      factor = x > 0.f ? d_score * weight * scale_of<spec>(p, key) : 0.f;
    }
    each_factor<Lanes>(factor, [&](int32_t lane, float of_lane) {
      const int64_t from = key_row(p, row, key_at(p, row, first + lane)) * spec.head_dim;
#pragma unroll
      for (int32_t c = 0; c < columns; ++c) {
        const int32_t d = c * Lanes::count + Lanes::index();
        if (d < spec.head_dim) sums[c] += of_lane * load_elem<spec.dtype_k>(p.k, from + d);
      }
    });
  }
  of_weight = lane_sum<Lanes>(of_weight);
  if (p.dweights && Lanes::index() == 0) p.dweights[head] = of_weight;
  if (!p.dq) return;
#pragma unroll
  for (int32_t c = 0; c < columns; ++c) {
    const int32_t d = c * Lanes::count + Lanes::index();
    if (d < spec.head_dim) p.dq[head * spec.head_dim + d] = sums[c];
  }
}

// Adds to a key's gradient what a row has for it, by the gradient of its score.
template <IndexLossSpec spec, class Lanes>
FMHA_DEVICE void add_to_key(const IndexLossParams& p, int64_t row, int64_t key, float d_score) {
  constexpr int32_t columns = ceil_div(spec.head_dim, Lanes::count);
  Array<float, columns> sums = {};
  for (int32_t first = 0; first < spec.num_heads; first += Lanes::count) {
    const int32_t h = first + Lanes::index();
    float factor = 0.f;
    if (h < spec.num_heads) {
      const int64_t head = row * spec.num_heads + h;
      factor = product<spec>(p, head, key) > 0.f ? d_score * p.weights[head] : 0.f;
    }
    each_factor<Lanes>(factor, [&](int32_t lane, float of_lane) {
      const int64_t from = (row * spec.num_heads + first + lane) * spec.head_dim;
#pragma unroll
      for (int32_t c = 0; c < columns; ++c) {
        const int32_t d = c * Lanes::count + Lanes::index();
        if (d < spec.head_dim) sums[c] += of_lane * load_elem<spec.dtype_q>(p.q, from + d);
      }
    });
  }
#pragma unroll
  for (int32_t c = 0; c < columns; ++c) {
    const int32_t d = c * Lanes::count + Lanes::index();
    if (d < spec.head_dim) p.dk[key * spec.head_dim + d] += sums[c];
  }
}

// Writes 0 to the gradients of a key.
template <IndexLossSpec spec, class Lanes>
FMHA_DEVICE void clear_key(const IndexLossParams& p, int64_t key) {
  for (int32_t d = Lanes::index(); d < spec.head_dim; d += Lanes::count) p.dk[key * spec.head_dim + d] = 0.f;
}

// Number of groups of lanes that have keys of their own.
FMHA_DEVICE int64_t num_key_groups(const IndexLossParams& p) { return int64_t(p.batch) * ceil_div(p.seqlen_k, kKeys); }

// Gradients of the `at`-th group of keys.
template <IndexLossSpec spec, class Lanes>
FMHA_DEVICE void keys(const IndexLossParams& p, int64_t at) {
  const int32_t per_batch = ceil_div(p.seqlen_k, kKeys), begin = int32_t(at % per_batch) * kKeys;
  const int64_t i_batch = at / per_batch;
  const int32_t end = min(begin + kKeys, p.seqlen_k);
  for (int32_t j = begin; j < end; ++j) clear_key<spec, Lanes>(p, i_batch * p.seqlen_k + j);
  for (int32_t i = 0; i < p.seqlen_q; ++i) {
    const int64_t row = i_batch * p.seqlen_q + i;
    for (int32_t first = 0; first < p.topk; first += Lanes::count) {
      const int32_t entry = first + Lanes::index(), j = entry < p.topk ? key_at(p, row, entry) : -1;
      const uint64_t own = Lanes::ballot(j >= begin && j < end);
      if (own == 0) continue;
      for (int32_t lane = 0; lane < Lanes::count; ++lane) {
        if (!(own >> lane & 1)) continue;
        const int32_t named = key_at(p, row, first + lane);
        add_to_key<spec, Lanes>(p, row, i_batch * p.seqlen_k + named, p.scores[row * p.topk + first + lane]);
      }
    }
  }
}

}  // namespace fmha::index_loss
