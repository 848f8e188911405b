// Score modifiers that a call selects at run time, for a fragment of scores at once: one compiled kernel serves all of
// them.
#pragma once
#include <fmha/isa/num.h>
#include <fmha/mask_data.h>
#include <fmha/score.h>

namespace fmha {

struct VectorUnit {
  FMHA_DEVICE static float exp2(float x) { return v_exp_f32(x); }
  FMHA_DEVICE static float rcp(float x) { return v_rcp_f32(x); }
};

// Whether a function has hidden the pair of this score; later
// modifiers do not show it. Constant false without functions.
FMHA_DEVICE bool is_hidden(float score) { return code::kIsGiven && score == -infinity(); }

// Whether the call's functions show a pair. `product()`: its scaled product,
// evaluated only for a score function. `hides`: the mask is evaluated too.
template <bool hides = true, class Product>
FMHA_DEVICE bool functions_show(const FwdParams& p, const SeqSpan& span, int32_t i_head, Pair pair, Product product) {
  if constexpr (!code::kIsGiven) return true;
  return Functions::of(p, span, i_head).template at<ExactTanh, hides>(pair, product(), 1.f).score != -infinity();
}
// Whether masks as data and the call's functions show a pair; in full blocks no mask as code is evaluated.
template <class Product>
FMHA_DEVICE bool masks_show(const DataMasks& masks, const FwdParams& p, const SeqSpan& span, int32_t i_head, Pair pair,
                            Product product) {
  const DataMasks::Shown shown = masks.shown(span, i_head, pair.i(), pair.j());
  // The functions are evaluated without a branch around them: with one, pairs that they show were hidden (clang 22,
  // gfx942; cause unknown).
  const int32_t score_shows = functions_show<false>(p, span, i_head, pair, product);
  const int32_t shows = functions_show(p, span, i_head, pair, product);
  return ((int32_t(shown == DataMasks::Shown::Full) & score_shows) |
          (int32_t(shown == DataMasks::Shown::Asked) & shows)) != 0;
}

// The derivative of a score with respect to the functions' result: that of the soft-cap behind them. `y` is the scaled
// product.
template <class Tanh>
FMHA_DEVICE float slope_behind_functions(const Functions& functions, const FwdParams& p, const SeqSpan& span,
                                         int32_t i_head, Pair pair, float y) {
  if (!SoftCap::given(p)) return 1.f;
  const float score = functions.template at<Tanh, false>(pair, y, 1.f).score;
  return SoftCap::of(p, span, i_head).template at<Tanh>(pair, score, 1.f).slope;
}

// Q[i] . K[j] over the head dimension, scaled.
template <DType dtype_q, DType dtype_k>
FMHA_DEVICE float scaled_product(const FwdParams& p, KvKind layout, const SeqSpan& span, int32_t i_head,
                                 int32_t i_head_kv, int32_t head_dim, int32_t i, int32_t j) {
  const int64_t q = query_offset(p, span, i, i_head), k = row_offset(p.k, kv_row(p, layout, span, j), i_head_kv);
  float dot = 0.f;
#pragma nounroll
  for (int32_t d = 0; d < head_dim; ++d)
    dot += load_elem<dtype_q>(p.q.data, q + d) * load_elem<dtype_k>(p.k.data, k + d);
  return dot * p.softmax_scale * scalar_of(p.descale_q, span.i_batch, i_head_kv, 1.f) *
         scalar_of(p.descale_k, span.i_batch, i_head_kv, 1.f);
}

// Adds a term's elements. Places are clamped: the bias ends where the lengths do.
template <class Elem, class Fragment>
FMHA_DEVICE void add_elements(Fragment fragment, const FwdParams& p, const SeqSpan& span, int32_t i_head) {
  // The pointer gets the element type before the head's offset is added: a byte pointer cost the backward two registers
  // (clang 22).
  const Elem* data = static_cast<const Elem*>(p.bias.data) + ElementBias::first(p, span, i_head);
  fragment.forget_place();
#pragma unroll
  for (int e = 0; e < Fragment::count; ++e) {
    const Pair pair = fragment.pair(e);
    const int64_t i = min(pair.i(), span.seqlen_q - 1);
    const float x = float(data[i * p.bias.row + min(pair.j(), span.seqlen_k - 1)]);
    fragment.add(e, is_hidden(fragment.at(e)) ? 0.f : x);
  }
}

// Calls `body` for each number below `count`: a loop over long functions, which clang would not unroll, would index
// registers.
template <int count, class Body>
FMHA_DEVICE void for_each_below(Body body) {
  if constexpr (count > 0) {
    for_each_below<count - 1>(body);
    body(count - 1);
  }
}

template <class Tanh, bool hides, class Map, class Fragment>
FMHA_DEVICE void map_given(Fragment fragment, const FwdParams& p, const SeqSpan& span, int32_t i_head) {
  if (!Map::given(p)) return;
  const Map map = Map::of(p, span, i_head);
  fragment.forget_place();
  if constexpr (Map::is_first) {
    for_each_below<Fragment::count>([&](int e) __attribute__((always_inline)) {
      const Scored x = map.template at<Tanh, hides>(fragment.pair(e), fragment.at(e), 1.f);
      fragment.set(e, x.score);
      fragment.multiply_slope(e, x.slope);
    });
  } else {
#pragma unroll
    for (int e = 0; e < Fragment::count; ++e) {
      const bool hidden = is_hidden(fragment.at(e));
      const Scored x = map.template at<Tanh>(fragment.pair(e), fragment.at(e), 1.f);
      fragment.set(e, hidden ? -infinity() : x.score);
      fragment.multiply_slope(e, hidden ? 0.f : x.slope);
    }
  }
}
template <class Term, class Fragment>
FMHA_DEVICE void add_given(Fragment fragment, const FwdParams& p, const SeqSpan& span, int32_t i_head) {
  if (!Term::given(p)) return;
  const Term term = Term::of(p, span, i_head);
  fragment.forget_place();
#pragma unroll
  for (int e = 0; e < Fragment::count; ++e) {
    const float x = term.at(fragment.pair(e), 1.f);
    fragment.add(e, is_hidden(fragment.at(e)) ? 0.f : x);
  }
}
template <class Tanh, bool hides, class Fragment, class... Map, class... Term>
FMHA_DEVICE void apply_given(Fragment& fragment, const FwdParams& p, DType dtype_bias, const SeqSpan& span,
                             int32_t i_head, List<Map...>, List<Term...>) {
  (map_given<Tanh, hides, Map>(fragment, p, span, i_head), ...);
  if (ElementBias::given(p)) {
    switch (dtype_bias) {
      case DType::F16: add_elements<f16>(fragment, p, span, i_head); break;
      case DType::Bf16: add_elements<bf16>(fragment, p, span, i_head); break;
      default: add_elements<float>(fragment, p, span, i_head);
    }
  }
  (add_given<Term>(fragment, p, span, i_head), ...);
}

// Applies the call's maps, bias and terms to the scaled products of a fragment, which become scores in
// natural units (not log2). The fragment takes the slope of a map by `multiply_slope(e, x)`, and adds a term
// by `add(e, x)`. `forget_place()` precedes each modifier: keys that live from one modifier to the next fill
// RDNA's registers. `hides`: the mask as code is evaluated here; otherwise lists of tiles include it.
template <class Tanh, bool hides = true, class Fragment>
FMHA_DEVICE void apply_given(Fragment fragment, const FwdParams& p, DType dtype_bias, const SeqSpan& span,
                             int32_t i_head) {
  apply_given<Tanh, hides>(fragment, p, dtype_bias, span, i_head, Maps{}, Terms{});
}

}  // namespace fmha
