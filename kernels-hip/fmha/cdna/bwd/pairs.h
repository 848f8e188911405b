// Steps that turn a block of scores and of dP into P and dS. Walked rows lie along the registers, and each lane has one
// owned row.
#pragma once
#include <fmha/amd/score.h>
#include <fmha/cdna/bwd/job.h>
#include <fmha/cdna/bwd/rest.h>
#include <fmha/dropout.h>
#include <fmha/mask.h>
#include <fmha/shown_words.h>

namespace fmha::cdna::bwd {

// The queries and keys of a block of pairs.
struct PairPlace {
  int32_t own, walked;  // the lane's own row; the walked row of its register 0
};

template <class U>
struct Pairs {
  static constexpr MatrixBwdSpec spec = U::spec;
  static constexpr bool queries_own = owns_queries(U::tile.sums);

  const SeqSpan& span;
  const MaskBand& band;
  int32_t i_head;

  static FMHA_DEVICE Pair pair_of(const PairPlace& at, int i) {
    // Separate step variables would need more scalar registers than there are (clang 22).
    const int32_t step = U::walked_row(i, 0);
    return queries_own ? Pair{at.own, at.walked + step} : Pair{at.walked + step, at.own};
  }

  FMHA_DEVICE bool sees(Pair at) const {
    const int32_t i = at.i(), j = at.j();
    const bool is_there = i < span.seqlen_q && j < span.seqlen_k;
    if constexpr (spec.mask == MaskKind::Full) return is_there;
    return is_there && visible(band, i, j);
  }
  // Sets pairs that the mask hides, or that are beyond the lengths, to 0. It selects instead of multiplying, since
  // hidden values may be NaN.
  FMHA_DEVICE void hide(PairValues& x, PairPlace at) const {
    // Visibility is recomputed each time: results kept from S to dS would fill scalar registers.
    opaque_in_vgpr(at.own);
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = sees(pair_of(at, i)) ? x[i] : 0.f;
  }

  // A bit for each of a lane's pairs that the band, masks as
  // data and a mask as code show. All lanes must call it.
  FMHA_DEVICE uint32_t shown(const PairPlace& at) const {
    const MaskedBwdParams& p = reload_params<MaskedBwdParams>();
    const ShownWords<MaskLanes> masks = {DataMasks{p.masks}};
    // Lane 0 has the first owned row, and register 0 the first walked row.
    const int32_t first_own = v_readfirstlane_b32(at.own), first_walked = v_readfirstlane_b32(at.walked);
    ShownBits<1> words;
    if constexpr (queries_own) {
      const Range rows = {first_own, min(first_own + U::edge, span.seqlen_q)};
      words = masks.template of_query<1>(span, i_head, min(at.own, span.seqlen_q - 1), rows, first_walked);
    } else {
      const Range keys = {first_own, min(first_own + U::edge, span.seqlen_k)};
      words = masks.of_key(span, i_head, min(at.own, span.seqlen_k - 1), keys, first_walked);
    }
    const int32_t own_row = at.walked - first_walked;
    const uint32_t seen = words.seen[0] >> own_row, full = words.full[0] >> own_row;
    uint32_t shown = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int32_t row = U::walked_row(i, 0);
      const Pair pair = pair_of(at, i);
      uint32_t is_shown = seen >> row & uint32_t(sees(pair));
      if constexpr (code::kIsGiven) {
        // No branch around the function: with one, shown pairs were hidden (clang 22, emulated; cause unknown).
        const uint32_t by_function = Functions::of(p.bwd.bwd.fwd, span, i_head).shows(pair);
        is_shown &= full >> row | by_function;
      }
      shown |= (is_shown & 1) << i;
    }
    return shown;
  }
  static FMHA_DEVICE void hide(PairValues& x, uint32_t shown) {
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = shown >> i & 1 ? x[i] : 0.f;
  }

  // A block of scores in the form that `apply_given` takes.
  struct Fragment {
    static constexpr int count = 16;
    PairValues &s, &slopes;
    const PairPlace& place;

    FMHA_DEVICE float at(int e) const { return s[e]; }
    FMHA_DEVICE void set(int e, float x) { s[e] = x; }
    FMHA_DEVICE void add(int e, float x) { s[e] = usual_nan(s[e] + x); }
    FMHA_DEVICE void multiply_slope(int e, float x) { slopes[e] *= x; }
    FMHA_DEVICE void forget_place() {}
    FMHA_DEVICE Pair pair(int e) const { return pair_of(place, e); }
  };
  // Converts raw scores to natural ones, and computes their slopes.
  FMHA_DEVICE void modify(PairValues& s, PairValues& slopes, const PairPlace& at) const {
    const MatrixBwdParams& params = reload_params<MatrixBwdParams>();
    s *= params.bwd.fwd.softmax_scale;
    slopes = PairValues{} + 1.f;
    apply_given<typename U::Tanh, !spec.masks>(Fragment{s, slopes, at}, params.bwd.fwd, DType(params.dtype_bias), span, i_head);
  }

  // A bit for each of a block's pairs that dropout keeps. Parameters are reloaded for each call of
  // the generator: kept across the loop, the keys of its ten rounds would spill scalar registers.
  FMHA_DEVICE uint32_t kept(const PairPlace& at) const {
    if (!reload_params<MatrixBwdParams>().drops) return 0xffff;
    uint32_t kept = 0;
    // Number of a lane's registers whose keys belong to one group of four.
    constexpr int of_four = U::walked_row(1, 0) == 1 ? 4 : 2;
#pragma nounroll
    for (int call = 0; call < (queries_own ? 16 / of_four : 16); ++call) {
      const FwdParams& p = reload_params<MatrixBwdParams>().bwd.fwd;
      const int32_t batch_head = head_of_whole(p, span.i_batch, i_head);
      if constexpr (queries_own) {
        const int32_t key = at.walked + U::walked_row(call * of_four, 0);
        const auto words = dropout_words_of_keys(p, batch_head, at.own, of_four == 4 ? key : key & ~3);
#pragma unroll
        for (int i = 0; i < of_four; ++i) {
          const uint32_t word = of_four == 4 ? words[i] : key & 1 ? words[2 * i + 1] : words[2 * i];
          kept |= uint32_t(word < p.dropout_threshold) << (call * of_four + i);
        }
      } else {
        const int32_t query = at.walked + U::walked_row(call, 0);
        const int32_t key = at.own + p.dropout_key_of_quad, word = key % 4;
        const auto words = dropout_words(p, batch_head, query, key / 4);
        // Selects are used: an array of registers with a different index in each lane would lie in scratch memory.
        const uint32_t low = word % 2 ? words[1] : words[0], high = word % 2 ? words[3] : words[2];
        kept |= uint32_t((word / 2 ? high : low) < p.dropout_threshold) << call;
      }
    }
    return kept;
  }
};

}  // namespace fmha::cdna::bwd
