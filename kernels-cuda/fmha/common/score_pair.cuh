// A query and a key in the backward: whether the query sees
// the key, and P of their score, for any kind of fragment.
#pragma once
#include <fmha/mask.h>
#include <fmha/ptx/num.cuh>
#include <fmha/row_bwd.h>
#include <fmha/score.h>

namespace fmha {

// LSE in log2, delta and the scores' origins (row_bwd.h) of a block of queries, in shared memory.
template <int columns>
struct QueryStats {
  alignas(16) float lse_log2[columns];
  alignas(16) float delta[columns];
  alignas(16) float origin[columns];
};

// Exponential and reciprocal, computed by the special-function unit.
struct SpecialUnit {
  FMHA_DEVICE static float exp2(float x) { return ptx::ex2_approx_ftz(x); }
  FMHA_DEVICE static float rcp(float x) { return ptx::rcp_approx_ftz(x); }
};
template <bool fast_softcap>
struct TanhOf {
  using type = FastTanh<SpecialUnit>;
};
template <>
struct TanhOf<false> {
  using type = ExactTanh;
};
// Applies the score modifiers of a backward kernel.
template <BwdSpec spec, auto tile>
using BwdScore = Score<spec.fwd, typename TanhOf<tile.fast_softcap>::type>;

template <BwdSpec spec, auto tile>
struct ScorePair {
  static constexpr FwdSpec kFwd = spec.fwd;
  using Modifiers = BwdScore<spec, tile>;

  const BwdParams& p;
  // Copies of the CTA's values. A reference to a member of its struct would keep the whole struct, sums included, in
  // local memory.
  const SeqSpan span;
  const KnownMask<kFwd.mask, kFwd.sink_columns> mask;
  const float scale_log2 = p.fwd.softmax_scale * kLog2E;

  FMHA_DEVICE Modifiers modifiers(int32_t i_head) const {
    return Modifiers::of(p.fwd, span, i_head, p.fwd.softmax_scale);
  }
  FMHA_DEVICE bool is_there(Pair at) const { return at.i() < span.seqlen_q && at.j() < span.seqlen_k; }
  FMHA_DEVICE bool sees(Pair at) const { return is_there(at) && mask.sees(at.i(), at.j()); }

  // Returns P of an element and sets the slope of its score. `lse_log2` is the LSE of its query.
  FMHA_DEVICE float prob(float s, const Modifiers& modifiers, float lse_log2, Pair at, float& slope) const {
    const bool there = is_there(at);
    const Scored x = modifiers.log2(at, s, -lse_log2, [&] { return modifiers.element(at, there); }, there);
    slope = x.slope;
    return ptx::ex2_approx_ftz(x.score);
  }
  // P and the slope of an element whose query has an origin (row_bwd.h). The natural score is rounded as in the
  // forward and then taken relative to the origin; P is at most 1.
  FMHA_DEVICE float prob_from(float origin, float s, const Modifiers& modifiers, float lse_log2, Pair at,
                              float& slope) const {
    if (!is_there(at)) {
      slope = 0.f;
      return 0.f;
    }
    const Scored x = modifiers.natural(at, s, [&] { return modifiers.element(at); });
    slope = x.slope;
    return probability(x.score - origin, lse_log2);
  }
};

}  // namespace fmha
