// Scores as text: what a score becomes between Q K^T and the softmax, and its derivative. Kernels name no modifier.
//
// A modifier is a struct here, and a name in a list. A map takes a scaled product to a score and says its slope; a term
// is added to a score, so that its slope is 1. `Score` holds the modifiers of one (sequence, query head), maps before
// terms. A kernel describes its accumulator as a Fragment and calls `apply`; a backward kernel asks for a score and its
// slope, pair by pair.
//
// A modifier says whether a kernel has it (`in`), whether a call does (`given`), what it reads once for a head (`of`).
//
// A Fragment has `count` elements, and `rows` of them that may be of different heads:
//   row(e)            the row of an element
//   at(e), set(e, x)  the score
//   pair(e)           its query and key
//   there(e)          whether the sequence has both
#pragma once
#include <fmha/code.h>
#include <fmha/mask.h>
#include <fmha/num.h>
#include <fmha/range.h>
#include <fmha/seq.h>

namespace fmha {

// A query and a key: a place that a whole fragment shares, and offsets from it that are
// constants in unrolled loops. Terms that depend on the place alone are then computed once.
struct Pair {
  int32_t first_i, first_j;
  int32_t step_i = 0, step_j = 0;

  FMHA_DEVICE int32_t i() const { return first_i + step_i; }
  FMHA_DEVICE int32_t j() const { return first_j + step_j; }
  // The distance i + diagonal - j that ALiBi multiplies by its slope.
  FMHA_DEVICE float distance(int32_t diagonal) const {
    return float(first_i + diagonal - first_j) + float(step_i - step_j);
  }
};

// A score, and its derivative with respect to the scaled product.
struct Scored {
  float score, slope;
};

// Evaluates cap * tanh(scale * s / cap) exactly.
struct ExactTanh {
  FMHA_DEVICE static Scored capped(float s, float scale, float cap) {
    const float y = s * scale, x = y / cap, square = x * x;
    if (abs_of(x) < 0.0625f) {
      // The series is in y itself: with a large cap the quotient would be subnormal, and lose digits of y.
      const float series = -1.f / 3.f + square * (2.f / 15.f), t = x + x * square * series;
      return {y + y * square * series, 1.f - t * t};
    }
    const float t = tanh_of(x);
    return {cap * t, 1.f - t * t};
  }
};
// Soft-cap by one exponential and one reciprocal of `Unit`: tanh(x) = 1 - 2 w where w = 1 / (1 + e^(2 x)), so that
// the slope is 4 w (1 - w). A score near 0 has the absolute error of one near the cap.
template <class Unit>
struct FastTanh {
  FMHA_DEVICE static Scored capped(float s, float scale, float cap) {
    const float w = Unit::rcp(1.f + Unit::exp2(s * (2.f * (scale * kLog2E) / cap)));
    return {cap - 2.f * cap * w, 4.f * w * (1.f - w)};
  }
};
// Soft-cap that is as exact as `ExactTanh`, without a branch or a division for each element.
template <class Unit>
struct BranchlessTanh {
  FMHA_DEVICE static Scored capped(float s, float scale, float cap) {
    // The inverse would be infinite for the smallest caps, and 0 times infinity NaN, so it is limited.
    const float per_cap = min(1.f / cap, kLargestFloat);
    const float y = s * scale, x = y * per_cap, a = abs_of(x), square = x * x;
    const float w = Unit::rcp(1.f + Unit::exp2(2.f * kLog2E * a)), quotient = cap * (1.f - 2.f * w);
    // The quotient cancels below 1/16.
    const float series = y + y * square * (-1.f / 3.f + square * (2.f / 15.f));
    return {a < 0.0625f ? series : x < 0.f ? -quotient : quotient, 4.f * w * (1.f - w)};
  }
};

// A map: a score as code, and a mask as code, which hides a pair by a score of
// -infinity. It is applied first; no other modifier shows a pair that it hides.
struct Functions {
  static constexpr bool slope_is_within_one = false, is_first = true;
  const uint64_t* words;
  int32_t b, h, seqlen_q, seqlen_k;

  FMHA_DEVICE static constexpr bool in(const FwdSpec& spec) { return spec.code != CodeKind::None; }
  // Whether a call has functions is a compile-time fact of a kernel's text.
  FMHA_DEVICE static constexpr bool given(const FwdParams&) { return code::kIsGiven; }
  FMHA_DEVICE static Functions of(const FwdParams& p, const SeqSpan& span, int32_t i_head) {
    return {&p.code.elems[0], span.i_batch, i_head, span.seqlen_q, span.seqlen_k};
  }

  template <class Layout>
  FMHA_DEVICE code::CodePair<Layout> place(Pair pair) const {
    return {b, h, pair.i(), pair.j(), seqlen_q, seqlen_k, words};
  }
  FMHA_DEVICE bool shows(Pair pair) const { return code::of_mask::visible(place<code::of_mask::Layout>(pair)); }
  // Bounds of the mask's value over non-empty rows and keys: from 1 on it shows all pairs, up to 0 none.
  FMHA_DEVICE expr::Bound shows_of(Range rows, Range keys) const {
    const auto point = [](int32_t x) { return expr::Bound{x, x}; };
    return code::of_mask::seen(code::CodeTile<code::of_mask::Layout>{point(b),
                                                                     point(h),
                                                                     {rows.begin, rows.end - 1},
                                                                     {keys.begin, keys.end - 1},
                                                                     point(seqlen_q),
                                                                     point(seqlen_k),
                                                                     words});
  }
  // Maps the product s to a score of s * scale. `hides`: the mask is evaluated; otherwise the kernel only visits pairs
  // that it shows.
  template <class Tanh, bool hides = true>
  FMHA_DEVICE Scored at(Pair pair, float s, float scale) const {
    const auto here = place<code::of_score::Layout>(pair);
    const float y = s * scale, score = !hides || shows(pair) ? code::of_score::score(here, y) : -infinity();
    return {score, score == -infinity() ? 0.f : code::of_score::slope(here, y)};
  }
  // Calls `add(n, element, derivative)` for the n-th captured element that
  // is read, if it has a gradient; element indices count from the first sum.
  template <class Add>
  FMHA_DEVICE void slopes(Pair pair, float y, Add add) const {
    using Layout = code::of_score::Layout;
    const auto here = place<Layout>(pair);
    int32_t n = 0;
    code::of_score::slopes(here, y, [&](int i, const int64_t* at, float slope) {
      if (Layout::gradient(i) >= 0) add(n, int64_t(words[Layout::gradient(i)]) + here.dense_place(i, at), slope);
      ++n;
    });
  }
};

// The soft-cap, a map.
struct SoftCap {
  static constexpr bool slope_is_within_one = true, is_first = false;
  float cap;

  FMHA_DEVICE static constexpr bool in(const FwdSpec& spec) { return spec.softcap; }
  FMHA_DEVICE static bool given(const FwdParams& p) { return p.softcap > 0.f; }
  FMHA_DEVICE static SoftCap of(const FwdParams& p, const SeqSpan&, int32_t) { return {p.softcap}; }

  // Maps the product s to the soft-capped score of s * scale.
  template <class Tanh>
  FMHA_DEVICE Scored at(Pair, float s, float scale) const {
    return Tanh::capped(s, scale, cap);
  }
};

// ALiBi, a term added to the score.
struct Alibi {
  float slope;
  int32_t diagonal;

  FMHA_DEVICE static constexpr bool in(const FwdSpec& spec) { return spec.bias == BiasKind::Alibi; }
  FMHA_DEVICE static bool given(const FwdParams& p) { return p.alibi_slopes.data; }
  FMHA_DEVICE static Alibi of(const FwdParams& p, const SeqSpan& span, int32_t i_head) {
    return {scalar_of(p.alibi_slopes, span.i_batch, i_head, 0.f), alibi_diagonal(p, span.seqlen_q, span.seqlen_k)};
  }

  // The term, in `units` of one.
  FMHA_DEVICE float at(Pair pair, float units) const { return -(slope * units) * abs_of(pair.distance(diagonal)); }
};

// A list of modifiers: all maps or all terms, in their order.
template <class... T>
struct List {
  FMHA_DEVICE static constexpr int num_in(const FwdSpec& spec) { return (0 + ... + int(T::in(spec))); }
};
using Maps = List<Functions, SoftCap>;
using Terms = List<Alibi>;

// The bias term, whose elements kernels load in their own ways: one for each pair of the sequence.
struct ElementBias {
  const void* data;  // element (0, 0)
  int64_t row;

  FMHA_DEVICE static constexpr bool in(const FwdSpec& spec) { return spec.bias == BiasKind::Elementwise; }
  FMHA_DEVICE static bool given(const FwdParams& p) { return p.bias.data; }
  // The element (0, 0) of a head.
  FMHA_DEVICE static int64_t first(const FwdParams& p, const SeqSpan& span, int32_t i_head) {
    return span.i_batch * p.bias.batch + i_head * p.bias.head;
  }
  FMHA_DEVICE static ElementBias of(const FwdParams& p, DType dtype, const SeqSpan& span, int32_t i_head) {
    return {static_cast<const char*>(p.bias.data) + first(p, span, i_head) * size_bytes(dtype), p.bias.row};
  }
};

FMHA_DEVICE constexpr int num_maps(const FwdSpec& spec) { return Maps::num_in(spec); }
FMHA_DEVICE constexpr int num_modifiers(const FwdSpec& spec) {
  return num_maps(spec) + Terms::num_in(spec) + ElementBias::in(spec);
}
// Whether a mask, as a band or as code, hides pairs: K, V, Q or dO of a hidden pair may be NaN.
FMHA_DEVICE constexpr bool hides_pairs(const FwdSpec& spec) {
  return spec.mask != MaskKind::Full || Functions::in(spec);
}
// Whether a score needs more than a multiplication by the scale.
FMHA_DEVICE constexpr bool modifies_score(const FwdSpec& spec) { return num_modifiers(spec) > 0; }

// Whether the slopes of a score's maps lie from -1 to 1.
template <class... Map>
FMHA_DEVICE constexpr bool slopes_within_one(const FwdSpec& spec, List<Map...>) {
  return ((!Map::in(spec) || Map::slope_is_within_one) && ...);
}
// The 16-bit type in which kernels store derivatives (slopes) between S and dS. If dS
// itself is f16, the slope is f16 too: in bf16 it would have three bits less than dS.
FMHA_DEVICE constexpr DType slope_dtype(const FwdSpec& spec) {
  return spec.dtype_qk == DType::F16 || slopes_within_one(spec, Maps{}) ? DType::F16 : DType::Bf16;
}
// A slope limited to its stored type: one beyond f16's range would be infinite, and times a dS of 0 NaN.
template <FwdSpec spec>
FMHA_DEVICE float kept_slope(float slope) {
  if constexpr (slope_dtype(spec) != DType::F16 || slopes_within_one(spec, Maps{})) return slope;
  constexpr float most = 65504.f;
  return abs_of(slope) < infinity() ? clamp(slope, -most, most) : slope;
}

// The modifiers of one (sequence, query head).
template <FwdSpec spec, class Tanh, class Maps, class Terms>
struct ScoreOf;
template <FwdSpec spec, class Tanh, class... Map, class... Term>
struct ScoreOf<spec, Tanh, List<Map...>, List<Term...>> : Map..., Term... {
  static constexpr bool modifies = modifies_score(spec);
  // Whether a score reads memory for each pair; pairs beyond the lengths have no element there.
  static constexpr bool reads = ElementBias::in(spec);
  // Whether pairs are hidden by a score of -infinity: they are no part of a row, whatever their K and V hold.
  static constexpr bool hides = Functions::in(spec);

  float scale;  // of the raw product; FP8's descales are in it
  ElementBias bias;

  FMHA_DEVICE static ScoreOf of(const FwdParams& p, const SeqSpan& span, int32_t i_head, float scale) {
    ScoreOf x = {};
    x.scale = scale;
    (x.template read<Map>(p, span, i_head), ...);
    (x.template read<Term>(p, span, i_head), ...);
    if constexpr (reads) x.bias = ElementBias::of(p, spec.dtype_bias, span, i_head);
    return x;
  }

  // The natural score of a raw product. `element()`: the bias element of the pair, if it is `there`.
  template <class Element>
  FMHA_DEVICE Scored natural(Pair pair, float s, Element element, bool there = true) const {
    float factor;
    bool hidden;
    Scored x = mapped(pair, s, factor, hidden);
    x.score *= factor;
    add_terms(x.score, pair, 1.f, element, there);
    return hidden ? Scored{-infinity(), 0.f} : x;
  }
  FMHA_DEVICE float natural(Pair pair, float s) const {
    return natural(pair, s, [&] { return element(pair); }).score;
  }
  // The score in log2, plus `offset`.
  template <class Element>
  FMHA_DEVICE Scored log2(Pair pair, float s, float offset, Element element, bool there = true) const {
    float factor;
    bool hidden;
    Scored x = mapped(pair, s, factor, hidden);
    x.score = x.score * (factor * kLog2E) + offset;
    add_terms(x.score, pair, kLog2E, element, there);
    return hidden ? Scored{-infinity(), 0.f} : x;
  }

  // The derivative of a score with respect to y, the functions' result: that of the maps after the functions.
  FMHA_DEVICE float slope_behind_functions(Pair pair, float y) const {
    Scored x = {Functions::template at<Tanh>(pair, y, 1.f).score, 1.f};
    float factor = 1.f;
    bool hidden = false;
    (map_behind<Map>(x, pair, factor, hidden), ...);
    return x.slope;
  }

  // Element of a pair; element (0, 0) where the pair is not there.
  FMHA_DEVICE float element(Pair pair, bool there = true) const {
    if constexpr (reads) return load_elem<spec.dtype_bias>(bias.data, there ? pair.i() * bias.row + pair.j() : 0);
    return 0.f;
  }

 private:
  template <class One>
  FMHA_DEVICE void read(const FwdParams& p, const SeqSpan& span, int32_t i_head) {
    if constexpr (One::in(spec)) static_cast<One&>(*this) = One::of(p, span, i_head);
  }
  // The first map includes the scale; `factor` is what remains to be multiplied.
  FMHA_DEVICE Scored mapped(Pair pair, float s, float& factor, bool& hidden) const {
    Scored x = {s, 1.f};
    factor = scale;
    hidden = false;
    (map_by<Map>(x, pair, factor, hidden), ...);
    return x;
  }
  template <class One>
  FMHA_DEVICE void map_by(Scored& x, Pair pair, float& factor, bool& hidden) const {
    if constexpr (One::in(spec)) {
      const Scored y = mapped_by<One>(pair, x.score, factor);
      x = {y.score, x.slope * y.slope};
      factor = 1.f;
      if constexpr (hides) hidden |= y.score == -infinity();
    }
  }
  template <class One>
  FMHA_DEVICE Scored mapped_by(Pair pair, float s, float scale) const {
    if constexpr (One::is_first) return One::template at<Tanh, spec.code != CodeKind::Score>(pair, s, scale);
    else return One::template at<Tanh>(pair, s, scale);
  }
  template <class One>
  FMHA_DEVICE void map_behind(Scored& x, Pair pair, float& factor, bool& hidden) const {
    if constexpr (!One::is_first) map_by<One>(x, pair, factor, hidden);
  }
  template <class Element>
  FMHA_DEVICE void add_terms(float& score, Pair pair, float units, Element element, bool there) const {
    if constexpr (reads) {
      if (there) score += element() * units;
    }
    (add<Term>(score, pair, units), ...);
  }
  template <class One>
  FMHA_DEVICE void add(float& score, Pair pair, float units) const {
    if constexpr (One::in(spec)) score += One::at(pair, units);
  }
};
template <FwdSpec spec, class Tanh = ExactTanh>
using Score = ScoreOf<spec, Tanh, Maps, Terms>;

// Converts raw products of a fragment to natural scores. `of_row(r)` returns the modifiers of row r.
template <class Fragment, class OfRow>
FMHA_DEVICE void apply(Fragment fragment, OfRow of_row) {
#pragma unroll
  for (int r = 0; r < Fragment::rows; ++r) {
    const auto score = of_row(r);
#pragma unroll
    for (int e = 0; e < Fragment::count; ++e) {
      if (fragment.row(e) != r) continue;
      if (!score.reads || fragment.there(e)) fragment.set(e, score.natural(fragment.pair(e), fragment.at(e)));
    }
  }
}

}  // namespace fmha
