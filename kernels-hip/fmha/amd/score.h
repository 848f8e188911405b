// Modifiers that a call decides on at run time, for a fragment of scores at once: of all of them there is one kernel.
#pragma once
#include <fmha/isa/num.h>
#include <fmha/score.h>

namespace fmha {

struct VectorUnit {
  FMHA_DEVICE static float exp2(float x) { return v_exp_f32(x); }
  FMHA_DEVICE static float rcp(float x) { return v_rcp_f32(x); }
};

// Adds a term's elements. Places are clamped: the bias ends where the lengths do.
template <class Elem, class Fragment>
FMHA_DEVICE void add_elements(Fragment& fragment, const FwdParams& p, const SeqSpan& span, int32_t i_head) {
  // Typed before the head is added: bytes cost the backward two registers (clang 22).
  const Elem* data = static_cast<const Elem*>(p.bias.data) + ElementBias::first(p, span, i_head);
#pragma unroll
  for (int e = 0; e < Fragment::count; ++e) {
    const Pair pair = fragment.pair(e);
    const int64_t i = min(pair.i(), span.seqlen_q - 1);
    fragment.add(e, float(data[i * p.bias.row + min(pair.j(), span.seqlen_k - 1)]));
  }
}

// Scaled products of a fragment (score.h) become natural scores. The fragment takes a map's slopes by `set_slope(e, x)`,
// and a term by `add(e, x)`.
template <class Tanh, class Fragment>
FMHA_DEVICE void apply_given(Fragment fragment, const FwdParams& p, DType dtype_bias, const SeqSpan& span,
                             int32_t i_head) {
  if (SoftCap::given(p)) {
    const SoftCap cap = SoftCap::of(p);
#pragma unroll
    for (int e = 0; e < Fragment::count; ++e) {
      const Scored x = cap.template at<Tanh>(fragment.at(e), 1.f);
      fragment.set(e, x.score);
      fragment.set_slope(e, x.slope);
    }
  }
  if (ElementBias::given(p)) {
    switch (dtype_bias) {
      case DType::F16: add_elements<f16>(fragment, p, span, i_head); break;
      case DType::Bf16: add_elements<bf16>(fragment, p, span, i_head); break;
      default: add_elements<float>(fragment, p, span, i_head);
    }
  }
  if (Alibi::given(p)) {
    const Alibi alibi = Alibi::of(p, span, i_head);
#pragma unroll
    for (int e = 0; e < Fragment::count; ++e) fragment.add(e, alibi.at(fragment.pair(e), 1.f));
  }
}

}  // namespace fmha
