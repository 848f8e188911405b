// A query and a key in the backward: whether one sees the other, and its P of their score, whatever fragment the score is an
// element of.
#pragma once
#include <fmha/mask.h>
#include <fmha/ptx/num.cuh>
#include <fmha/row_bwd.h>
#include <fmha/score.h>

namespace fmha {

// LSE in log2, delta and the scores' origins (row_bwd.h) of a block of queries.
template <int columns>
struct QueryStats {
  alignas(16) float lse_log2[columns];
  alignas(16) float delta[columns];
  alignas(16) float origin[columns];
};

// `fast_softcap`: by one exponential and one reciprocal.
template <BwdSpec spec, bool fast_softcap>
struct ScorePair {
  static constexpr FwdSpec kFwd = spec.fwd;
  static constexpr bool modifies = modifies_score(kFwd);
  static constexpr bool has_hi = kFwd.mask != MaskKind::Full, has_lo = kFwd.mask == MaskKind::Band;

  const BwdParams& p;
  // By value: a reference to a member of the CTA's own struct keeps all of that, the sums too, in local memory.
  const SeqSpan span;
  const MaskBand band;
  const float scale_log2 = p.fwd.softmax_scale * kLog2E;

  FMHA_DEVICE bool sees(int32_t i, int32_t j) const {
    bool seen = i < span.seqlen_q && j < span.seqlen_k;
    if constexpr (has_hi) seen &= j - i <= band.hi;
    if constexpr (has_lo) seen &= j - i >= band.lo || (kFwd.sink_columns && j < band.sink_columns);
    return seen;
  }

  // P of an element. `lse` is its query's.
  FMHA_DEVICE float prob(float s, const ScoreModifier& modifier, float lse_log2, int32_t i, int32_t j, float& slope) const {
    slope = 1.f;
    if constexpr (!modifies) {
      return ptx::ex2_approx_ftz(fmaf(s, scale_log2, -lse_log2));
    } else {
      float x = s * scale_log2;
      if constexpr (kFwd.softcap && fast_softcap) {
        // tanh(u) = 1 - 2 w where w = 1 / (1 + e^(2 u)); its derivative is 4 w (1 - w).
        const float w = ptx::rcp_approx_ftz(1.f + ptx::ex2_approx_ftz(s * (2.f * scale_log2 / modifier.softcap)));
        x = modifier.softcap * kLog2E * fmaf(-2.f, w, 1.f);
        slope = 4.f * w * (1.f - w);
      } else if constexpr (kFwd.softcap) {
        const float t = tanh_of(s * modifier.scale / modifier.softcap);
        // In this order, so that a cap near f32's largest number stays finite.
        x = modifier.softcap * t * kLog2E;
        slope = 1.f - t * t;
      }
      if constexpr (kFwd.bias == BiasKind::Alibi) {
        x -= modifier.alibi_slope * kLog2E * fabsf(float(i + modifier.alibi_diag - j));
      }
      if constexpr (kFwd.bias == BiasKind::Elementwise) {
        // There are no elements beyond the lengths.
        const bool there = i < span.seqlen_q && j < span.seqlen_k;
        const int64_t at = there ? i * modifier.bias_row + j : 0;
        if (there) x = fmaf(load_elem<kFwd.dtype_bias>(modifier.bias, at), kLog2E, x);
      }
      return ptx::ex2_approx_ftz(x - lse_log2);
    }
  }

  // The same of a query whose scores have an origin (row_bwd.h): the natural score, rounded as the forward's is, then measured
  // from there, and a P of 1 at most.
  FMHA_DEVICE float prob_from(float origin, float s, const ScoreModifier& modifier, float lse_log2, int32_t i, int32_t j,
                              float& slope) const {
    slope = 1.f;
    if constexpr (kFwd.softcap) {
      const float t = tanh_of(s * modifier.scale / modifier.softcap);
      slope = 1.f - t * t;
    }
    // There are no elements of a bias beyond the lengths.
    const bool there = i < span.seqlen_q && j < span.seqlen_k;
    const float score = there ? modified_score<kFwd>(modifier, s, i, j) : 0.f;
    return there ? probability(score - origin, lse_log2) : 0.f;
  }
};

}  // namespace fmha
