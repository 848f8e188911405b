// Score modifiers: what is applied between Q K^T and the softmax.
#pragma once
#include <fmha/num.h>
#include <fmha/seq.h>

namespace fmha {

// True where a score needs more than its scale.
FMHA_DEVICE constexpr bool modifies_score(const FwdSpec& spec) {
  return spec.softcap || spec.bias != BiasKind::None;
}

// The modifiers of one (sequence, query head).
struct ScoreModifier {
  const void* bias;   // element (0, 0)
  int64_t bias_row;
  float alibi_slope;
  int32_t alibi_diag;
  float scale, softcap;
};

// `scale` multiplies the raw product; FP8's descales are in it.
template <FwdSpec spec>
FMHA_DEVICE ScoreModifier score_modifier(const FwdParams& p, const SeqSpan& span, int32_t i_head, float scale) {
  ScoreModifier m = {nullptr, 0, 0.f, 0, scale, p.softcap};
  if constexpr (spec.bias == BiasKind::Elementwise) {
    m.bias = static_cast<const char*>(p.bias.data) +
             (span.i_batch * p.bias.batch + i_head * p.bias.head) * size_bytes(spec.dtype_bias);
    m.bias_row = p.bias.row;
  }
  if constexpr (spec.bias == BiasKind::Alibi) {
    m.alibi_slope = scalar_of(p.alibi_slopes, span.i_batch, i_head, 0.f);
    m.alibi_diag = alibi_diagonal(p, span.seqlen_q, span.seqlen_k);
  }
  return m;
}

// softcap * tanh(s / softcap). Where the quotient is small, the series is in s itself: by a large soft-cap the quotient
// would be subnormal, and lose what s has.
FMHA_DEVICE float capped_score(float s, float softcap) {
  const float x = s / softcap, square = x * x;
  if (abs_of(x) < 0.0625f) return s + s * square * (-1.f / 3.f + square * (2.f / 15.f));
  return softcap * tanh_of(x);
}

// softcap * tanh(scale * s / softcap), plus the bias of (i, j): a natural score.
template <FwdSpec spec>
FMHA_DEVICE float modified_score(const ScoreModifier& m, float s, int32_t i, int32_t j) {
  s *= m.scale;
  if constexpr (spec.softcap) s = capped_score(s, m.softcap);
  if constexpr (spec.bias == BiasKind::Elementwise) s += load_elem<spec.dtype_bias>(m.bias, i * m.bias_row + j);
  if constexpr (spec.bias == BiasKind::Alibi) s -= m.alibi_slope * abs_of(float(i + m.alibi_diag - j));
  return s;
}

}  // namespace fmha
