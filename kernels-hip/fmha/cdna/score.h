// What happens to scores between Q K^T and the softmax. Which of it a call wants is decided at run time, for a
// block of scores at once: of all modifiers there is one kernel.
#pragma once
#include <fmha/cdna/tile.h>
#include <fmha/isa/num.h>
#include <fmha/mma/cdna.h>
#include <fmha/range.h>
#include <fmha/seq.h>

namespace fmha::cdna {

// The query of a lane, and the lengths that its keys end with.
struct ScorePlace {
  int32_t i_batch, i_head, query, seqlen_q, seqlen_k;
};

// cap * tanh(s / cap), as `capped_score`, without a branch or a division; `per_cap` is 1 / cap.
FMHA_DEVICE float cap_without_branch(float s, float cap, float per_cap) {
  const float x = s * per_cap, a = abs_of(x), square = x * x;
  const float quotient = cap * (1.f - 2.f * v_rcp_f32(1.f + v_exp_f32(2.f * kLog2E * a)));
  // Below 1/16 the quotient cancels.
  const float series = s + s * square * (-1.f / 3.f + square * (2.f / 15.f));
  return a < 0.0625f ? series : x < 0.f ? -quotient : quotient;
}

// scores[i] += bias[key of i]; `row` is the query's. Clamped: the bias ends where the sequence does.
template <class Elem>
FMHA_DEVICE void add_bias(Acc& scores, const Elem* row, int32_t first_key, int32_t last_key) {
#pragma unroll
  for (int i = 0; i < 16; ++i) scores[i] += float(row[min(first_key + acc_row(i, 0), last_key)]);
}

// A block of raw scores becomes one of natural scores. `first_key` is the lane's.
FMHA_DEVICE void modify_block(Acc& scores, const CdnaParams& params, const ScorePlace& at, float scale,
                              int32_t first_key) {
  const FwdParams& p = params.fwd;
  scores *= scale;
  if (p.softcap > 0.f) {
    // Infinite of the smallest soft-caps, and 0 times that would be NaN.
    const float per_cap = min(1.f / p.softcap, kLargestFloat);
#pragma unroll
    for (int i = 0; i < 16; ++i) scores[i] = cap_without_branch(scores[i], p.softcap, per_cap);
  }
  if (p.bias.data) {
    const int64_t row = at.i_batch * p.bias.batch + at.i_head * p.bias.head + at.query * p.bias.row;
    const int32_t last_key = at.seqlen_k - 1;
    switch (DType(params.dtype_bias)) {
      case DType::F16: add_bias(scores, static_cast<const f16*>(p.bias.data) + row, first_key, last_key); break;
      case DType::Bf16: add_bias(scores, static_cast<const bf16*>(p.bias.data) + row, first_key, last_key); break;
      default: add_bias(scores, static_cast<const float*>(p.bias.data) + row, first_key, last_key);
    }
  }
  if (p.alibi_slopes.data) {
    const float slope = scalar_of(p.alibi_slopes, at.i_batch, at.i_head, 0.f);
    const int32_t distance = at.query + alibi_diagonal(p, at.seqlen_q, at.seqlen_k) - first_key;
#pragma unroll
    for (int i = 0; i < 16; ++i) scores[i] -= slope * abs_of(float(distance - acc_row(i, 0)));
  }
}

}  // namespace fmha::cdna
