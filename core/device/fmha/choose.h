// The choice of keys: a query's candidates, the order of scores as integers, scores of an
// indexer with one key per lane, and scores of blocks. `fmha_core::sparse` defines each.
#pragma once
#include <fmha/choose_params.h>
#include <fmha/num.h>
#include <fmha/mask.h>

namespace fmha::choose {

// Keys of the sequence of a row.
FMHA_DEVICE int32_t length_of(const ChooseParams& p, int32_t i_batch) {
  return p.seqused_k ? clamp(p.seqused_k[i_batch], 0, p.seqlen_k) : p.seqlen_k;
}

// Candidates of a row among `length` keys or blocks.
FMHA_DEVICE Range candidates_of(const ChooseParams& p, int32_t row, int32_t length) {
  if (p.candidates == 2) {
    const int32_t first = clamp(p.first[row], 0, length);
    return {first, max(first, clamp(p.end[row], 0, length))};
  }
  if (p.candidates == 0) return {0, length};
  const int32_t i = row % p.seqlen_q;
  return {0, int32_t(clamp<int64_t>(int64_t(i) + 1 + length - p.seqlen_q, 0, length))};
}

// Candidate keys of a row.
FMHA_DEVICE Range keys_of(const ChooseParams& p, int32_t row) {
  return candidates_of(p, row, length_of(p, row / p.seqlen_q));
}

// Candidates of a row among the entries to choose from: keys, or blocks with a candidate key.
FMHA_DEVICE Range entries_of(const ChooseParams& p, int32_t row) {
  if (p.per_block > 0) return candidates_of(p, row, p.num_entries);
  const Range keys = keys_of(p, row);
  if (p.block == 0) return keys;
  if (keys.begin >= keys.end) return {0, 0};
  return {keys.begin / p.block, (keys.end - 1) / p.block + 1};
}

// A number that grows with the score: 0 for NaN, equal for both zeros, below `kForced` for every score.
constexpr uint32_t kForced = 0xffffffffu;
FMHA_DEVICE uint32_t order_of(float score) {
  if (is_nan(score)) return 0;
  const uint32_t bits = bits_of(score == 0.f ? 0.f : score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Place of key j of a sequence: the sequence or page, and the row in it. Wrong pages are clamped into k.
struct KeyPlace {
  int64_t outer, inner;
};
template <bool paged>
FMHA_DEVICE KeyPlace place_of(const ChooseParams& p, int32_t i_batch, int32_t j) {
  if constexpr (!paged) {
    return {i_batch, j};
  } else {
    const int32_t page = p.block_table[int64_t(i_batch) * p.max_pages + j / p.page_size];
    return {clamp(page, 0, p.num_pages - 1), j % p.page_size};
  }
}

// NaN stays NaN.
FMHA_DEVICE float relu(float x) { return x <= 0.f ? 0.f : x; }

// The score of key j for a row: heads in their order, each product by ascending elements, all sums f32.
template <IndexSpec spec>
FMHA_DEVICE float index_score(const ChooseParams& p, int32_t row, int32_t j) {
  const KeyPlace place = place_of<spec.paged>(p, row / p.seqlen_q, j);
  const int64_t key = place.outer * p.k_outer + place.inner * p.k_key;
  float scale = 1.f;
  if constexpr (spec.k_scale) scale = p.k_scale[place.outer * p.scale_outer + place.inner * p.scale_key];
  float score = 0.f;
#pragma unroll 1
  for (int32_t h = 0; h < spec.num_heads; ++h) {
    const int64_t head = int64_t(row) * spec.num_heads + h, query = head * spec.head_dim;
    float product = 0.f;
#pragma unroll 1
    for (int32_t d = 0; d < spec.head_dim; ++d)
      product += load_elem<spec.dtype_q>(p.q, query + d) * load_elem<spec.dtype_k>(p.k, key + d);
    score += relu(product * scale) * p.weights[head];
  }
  return score;
}

// Scores of a row for one key per lane: the `at`-th group of keys.
template <IndexSpec spec, class Lanes>
FMHA_DEVICE void index_keys(const ChooseParams& p, int64_t at) {
  const int32_t per_row = ceil_div(p.seqlen_k, Lanes::count);
  const int64_t row = p.row_begin + at / per_row;
  const int32_t j = int32_t(at % per_row) * Lanes::count + Lanes::index();
  if (row >= p.row_end || j >= p.seqlen_k) return;
  const Range keys = keys_of(p, int32_t(row));
  float* to = p.key_scores + (row - p.row_begin) * p.seqlen_k + j;
  if (j >= keys.begin && j < keys.end) *to = index_score<spec>(p, int32_t(row), j);
  else if (p.fills) *to = -infinity();
}

// The greatest score of a block's candidates; -inf without one, NaN where one is NaN.
FMHA_DEVICE float block_maximum(const ChooseParams& p, const float* scores, Range keys, int32_t b) {
  const int64_t begin = int64_t(b) * p.block;
  const int32_t first = int32_t(max<int64_t>(begin, keys.begin));
  const int32_t end = int32_t(min<int64_t>(begin + p.block, keys.end));
  float greatest = -infinity();
#pragma unroll 1
  for (int32_t j = first; j < end; ++j) {
    const float score = scores[j];
    if (is_nan(score)) return score;
    greatest = max(greatest, score);
  }
  return greatest;
}

// NSA's sum of the probabilities of compressed blocks over block b: a compressed block counts
// once for each of its strides inside block b. The order of additions is that of the definition.
FMHA_DEVICE float block_sum(const ChooseParams& p, const float* probabilities, int32_t b) {
  float sum = 0.f;
#pragma unroll 1
  for (int32_t m = 0; m < p.per_block; ++m) {
#pragma unroll 1
    for (int32_t n = 0; n < p.per_compressed; ++n) {
      const int64_t at = int64_t(p.per_block) * b + m - n;
      if (at >= 0 && at < p.seqlen_k) sum += probabilities[at];
    }
  }
  return sum;
}

// The `at`-th of all blocks of all rows of the launch.
FMHA_DEVICE void score_block(const ChooseParams& p, int64_t at) {
  const int64_t row = p.row_begin + at / p.num_entries;
  const int32_t b = int32_t(at % p.num_entries);
  if (row >= p.row_end) return;
  const float* from = p.key_scores + (row - p.row_begin) * p.seqlen_k;
  float* to = p.scores + (row - p.row_begin) * p.num_entries + b;
  if (p.block > 0) {
    *to = block_maximum(p, from, keys_of(p, int32_t(row)), b);
  } else {
    const Range blocks = entries_of(p, int32_t(row));
    if (b >= blocks.begin && b < blocks.end) *to = block_sum(p, from, b);
    else if (p.fills) *to = -infinity();
  }
}

}  // namespace fmha::choose
