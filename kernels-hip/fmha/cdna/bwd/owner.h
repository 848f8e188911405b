// The rows that a wave owns and their gradient sums, and the contributions of a block of walked rows to them.
#pragma once
#include <fmha/cdna/bwd/captured.h>
#include <fmha/cdna/bwd/pairs.h>
#include <fmha/isa/num.h>

namespace fmha::cdna::bwd {

template <class U>
struct Owner {
  using C = typename U::C;
  using Acc = typename U::Acc;
  static constexpr MatrixBwdSpec spec = U::spec;

  typename U::OwnScore own_score;
  [[no_unique_address]] typename Maybe<C::makes_dp, typename U::OwnValue>::type own_value;
  Array<Acc, max(C::score_blocks, 1)> dscore;  // dQ^T or dK^T
  Array<Acc, max(C::value_blocks, 1)> dvalue;  // dV^T
  static constexpr bool adds_captured = U::tile.sums == BwdSums::Captured;
  [[no_unique_address]] typename Maybe<adds_captured, CapturedSums>::type captured;
  typename U::Lanes lanes;

  FMHA_DEVICE void clear() {
#pragma unroll
    for (int d = 0; d < C::score_blocks; ++d) dscore[d] = Acc{};
#pragma unroll
    for (int d = 0; d < C::value_blocks; ++d) dvalue[d] = Acc{};
    if constexpr (adds_captured) captured.clear();
    lanes.find();
  }

  // Adds block `b` of a stage. `edge`: some of its pairs are hidden, or beyond the lengths.
  template <class Stats>
  FMHA_DEVICE void add(const Pairs<U>& pairs, const typename C::Stage& stage, int b, const PairPlace& at, bool edge,
                       const Stats& stats) {
    PairValues s, slopes, dp = {};
    s = U::product(stage.score, lanes.score(), b, own_score);
    if constexpr (C::makes_dp) dp = U::product(stage.value, lanes.value(), b, own_value);
    [[maybe_unused]] PairValues products = {};
    if constexpr (adds_captured) products = s;

    // Parameters are reloaded: kept across the products, they would fill the scalar registers.
    const FwdParams& p = reload_params<MatrixBwdParams>().bwd.fwd;
    if constexpr (spec.modifies) pairs.modify(s, slopes, at);
    const float to_log2 = spec.modifies ? kLog2E : p.softmax_scale * kLog2E;
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i] = v_exp_f32(v_fma_f32(s[i], to_log2, -stats.lse_log2(i)));
    // A hidden dP may be NaN, and 0 times NaN is NaN, so hidden elements are set to 0.
    if constexpr (spec.masks) {
      if (edge) {
        const uint32_t shown = pairs.shown(at);
        Pairs<U>::hide(s, shown);
        if constexpr (C::makes_dp) Pairs<U>::hide(dp, shown);
      }
    } else if (edge) {
      pairs.hide(s, at);
      if constexpr (C::makes_dp) pairs.hide(dp, at);
    }
    uint32_t kept = 0;
    if constexpr (spec.dropout) kept = pairs.kept(at);

    if constexpr (C::makes_dv) {
      PairValues probs = s;
      if constexpr (spec.dropout) {
#pragma unroll
        for (int i = 0; i < 16; ++i) probs[i] = kept >> i & 1 ? s[i] : 0.f;
      }
      if constexpr (U::p_scale != 1.f) probs *= U::p_scale;
      U::add_to(dvalue, stage.value, lanes.value(), b, probs);
    }
    if constexpr (C::makes_dp) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if constexpr (spec.dropout) dp[i] = kept >> i & 1 ? dp[i] * p.dropout_scale : 0.f;
        dp[i] = s[i] * (dp[i] - stats.delta(i));
        // A pair that a function hides has P = 0, but its dP may be NaN.
        if constexpr (code::kIsGiven) dp[i] = s[i] == 0.f ? 0.f : dp[i];
        if constexpr (spec.modifies && C::makes_ds) dp[i] *= slopes[i];
      }
    }
    if constexpr (C::makes_ds) U::add_to(dscore, stage.score, lanes.score(), b, dp);
    if constexpr (adds_captured) {
      const BwdParams& to = reload_params<MatrixBwdParams>().bwd;
      for_each_below<16>([&](int i) __attribute__((always_inline)) {
        add_captured<typename U::Tanh>(captured, to, pairs.span, pairs.i_head, Pairs<U>::pair_of(at, i),
                                       products[i] * to.fwd.softmax_scale, dp[i]);
      });
    }
  }
};

}  // namespace fmha::cdna::bwd
