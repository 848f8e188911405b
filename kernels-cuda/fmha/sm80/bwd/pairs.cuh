// P and dS of fragments of S and dP: a fragment's rows are those that the CTA owns, its columns those of the walked
// block.
#pragma once
#include <fmha/common/score_pair.cuh>
#include <fmha/common/seen_keys.cuh>
#include <fmha/philox.h>
#include <fmha/sm80/bwd/config.cuh>

namespace fmha::sm80::bwd {

template <BwdSpec spec, Sm80BwdTile tile, class Keys = EveryKey>
struct Pairs : ScorePair<spec, tile> {
  static constexpr FwdSpec kFwd = spec.fwd;
  static constexpr bool has_slopes = num_maps(kFwd) > 0;
  static constexpr int columns = tile.columns;
  using Fragment = mma::Accumulator<columns>;
  using One = ScorePair<spec, tile>;
  using One::modifiers, One::p, One::prob, One::prob_from, One::sees, One::span;
  const Keys keys = {};

  // The query and the key of element `e`. `row` is the thread's first row, `column` the block's first one.
  FMHA_DEVICE static Pair pair_of(int e, int32_t row, int32_t column) {
    const int32_t rows = 8 * Fragment::row(e), columns = Fragment::column(e);
    return owns_queries(tile) ? Pair{row, column, rows, columns} : Pair{column, row, columns, rows};
  }

  // Slopes of a block's scores, by which dS is multiplied before the product. They are packed in pairs, except those of
  // a score function with f16 operands: f16 would lack their range, and bf16 their digits.
  static constexpr bool wide_slopes = Functions::in(kFwd) && kFwd.dtype_qk == DType::F16;
  struct Slopes {
    uint32_t pairs[has_slopes && !wide_slopes ? columns / 4 : 1];
    float wide[wide_slopes ? columns / 2 : 1];
  };
  // Which elements dropout keeps, one bit each.
  struct Kept {
    uint32_t words[kFwd.dropout ? ceil_div(columns / 2, 32) : 1];
    FMHA_DEVICE bool has(int e) const { return words[e / 32] >> e % 32 & 1; }
  };

  FMHA_DEVICE Kept kept_of(int32_t i_head, int32_t row, int32_t column) const {
    Kept kept = {};
    if constexpr (kFwd.dropout) {
      const int32_t batch_head = head_of_whole(p.fwd, span.i_batch, i_head);
#pragma unroll
      for (int w = 0; w < ceil_div(columns / 2, 32); ++w) {
        uint32_t word = 0;
        // One call of the generator at a time: unrolled over a block, the calls would not fit the instruction cache.
#pragma unroll 1
        for (int e = 0; e < min(32, columns / 2 - 32 * w); ++e) {
          const Pair at = pair_of(32 * w + e, row, column);
          word |= uint32_t(dropout_keeps(p.fwd, batch_head, at.i(), at.j())) << e;
        }
        kept.words[w] = word;
      }
    }
    return kept;
  }

  // Converts the scores of a block to P. Hidden pairs become 0 if the block is an `edge`, that is, partly masked.
  template <class Queries>
  FMHA_DEVICE void exponentiate(Fragment& s, Slopes& slopes, int32_t i_head, int32_t row, int32_t column, bool edge,
                                const Queries& queries) const {
    if (queries.any_far()) {
      exponentiate<true>(s, slopes, i_head, row, column, queries);
    } else {
      exponentiate<false>(s, slopes, i_head, row, column, queries);
    }
    if (edge) hide(s, i_head, row, column);
  }
  template <bool any_far, class Queries>
  FMHA_DEVICE void exponentiate(Fragment& s, Slopes& slopes, int32_t i_head, int32_t row, int32_t column,
                                const Queries& queries) const {
    const auto modifiers = this->modifiers(i_head);
#pragma unroll
    for (int e = 0; e < s.num_elems; e += 2) {
      float slope[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const Pair at = pair_of(e + k, row, column);
        if constexpr (any_far) {
          s[e + k] = prob_from(queries.origin(e + k), s[e + k], modifiers, queries.lse_log2(e + k), at, slope[k]);
        } else {
          s[e + k] = prob(s[e + k], modifiers, queries.lse_log2(e + k), at, slope[k]);
        }
      }
      if constexpr (wide_slopes) {
        slopes.wide[e] = slope[0];
        slopes.wide[e + 1] = slope[1];
      } else if constexpr (has_slopes) slopes.pairs[e / 2] = ptx::cvt_rn_x2<slope_dtype(kFwd)>(slope[0], slope[1]);
    }
  }
  FMHA_DEVICE void hide(Fragment& x, int32_t i_head, int32_t row, int32_t column) const {
#pragma unroll
    for (int e = 0; e < x.num_elems; ++e) {
      const Pair at = pair_of(e, row, column);
      bool seen = sees(at);
      if constexpr (!Keys::all) seen = seen && keys.sees(span, i_head, at.i(), at.j());
      if (!seen) x[e] = 0.f;
    }
  }

  // The P that dV takes: after dropout.
  FMHA_DEVICE Fragment dropped(const Fragment& probs, const Kept& kept) const {
    Fragment x;
#pragma unroll
    for (int e = 0; e < x.num_elems; ++e) x[e] = kept.has(e) ? probs[e] * p.fwd.dropout_scale : 0.f;
    return x;
  }

  // Converts dP to dS: with `through_map` the gradient of scale * Q K^T, otherwise the gradient of the score that the
  // softmax takes.
  template <bool through_map, class Queries>
  FMHA_DEVICE void differentiate(Fragment& dp, const Fragment& probs, const Slopes& slopes, const Kept& kept, int32_t i_head,
                                 int32_t row, int32_t column, bool edge, const Queries& queries) const {
#pragma unroll
    for (int e = 0; e < dp.num_elems; e += 2) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float d = dp[e + k];
        if constexpr (kFwd.dropout) d = kept.has(e + k) ? d * p.fwd.dropout_scale : 0.f;
        dp[e + k] = probs[e + k] * (d - queries.delta(e + k));
        // A pair that a function hides has P = 0, but its dP may be NaN.
        if constexpr (Functions::in(kFwd)) dp[e + k] = probs[e + k] == 0.f ? 0.f : dp[e + k];
      }
      if constexpr (wide_slopes && through_map) {
        dp[e] *= slopes.wide[e];
        dp[e + 1] *= slopes.wide[e + 1];
      } else if constexpr (has_slopes && through_map) {
        float low, high;
        ptx::unpack_x2<slope_dtype(kFwd)>(slopes.pairs[e / 2], low, high);
        dp[e] *= low;
        dp[e + 1] *= high;
      }
    }
    // Hidden elements of dP are set to 0, since 0 times a hidden NaN is NaN.
    if (edge) hide(dp, i_head, row, column);
  }
};

}  // namespace fmha::sm80::bwd
