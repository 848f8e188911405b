// What becomes of a block of scores and of dP: walked rows along the registers, an own row in each lane.
#pragma once
#include <fmha/cdna/bwd/job.h>
#include <fmha/cdna/bwd/rest.h>
#include <fmha/dropout.h>
#include <fmha/mask.h>
#include <fmha/range.h>

namespace fmha::cdna::bwd {

// Where a block of pairs lies.
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

  static FMHA_DEVICE int32_t query_of(const PairPlace& at, int i) {
    return queries_own ? at.own : at.walked + U::walked_row(i, 0);
  }
  static FMHA_DEVICE int32_t key_of(const PairPlace& at, int i) {
    return queries_own ? at.walked + U::walked_row(i, 0) : at.own;
  }

  FMHA_DEVICE bool sees(int32_t i, int32_t j) const {
    const bool is_there = i < span.seqlen_q && j < span.seqlen_k;
    if constexpr (spec.mask == MaskKind::Full) return is_there;
    return is_there && visible(band, i, j);
  }
  // Pairs that the mask hides or the lengths end before become 0. A select, since they may be NaN.
  FMHA_DEVICE void hide(PairValues& x, PairPlace at) const {
    // Who is seen is asked anew each time: the answers would fill scalar registers from S to dS.
    opaque_in_vgpr(at.own);
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = sees(query_of(at, i), key_of(at, i)) ? x[i] : 0.f;
  }

  // Raw scores to natural ones. `slopes` become the derivative of the soft-cap.
  FMHA_DEVICE void modify(PairValues& s, PairValues& slopes, const PairPlace& at) const {
    const MatrixBwdParams& params = reload_params<MatrixBwdParams>();
    const FwdParams& p = params.bwd.fwd;
    s *= p.softmax_scale;
    slopes = PairValues{} + 1.f;
    if (p.softcap > 0.f) {
      const float per_cap = min(1.f / p.softcap, kLargestFloat);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float t = U::capped(s[i] * per_cap, 1.f, 1.f);
        s[i] = U::capped(s[i], p.softcap, per_cap);
        slopes[i] = 1.f - t * t;
      }
    }
    if (p.bias.data) {
      const int64_t head = span.i_batch * p.bias.batch + i_head * p.bias.head;
      switch (DType(params.dtype_bias)) {
        case DType::F16: add_bias(s, static_cast<const f16*>(p.bias.data) + head, p.bias.row, at); break;
        case DType::Bf16: add_bias(s, static_cast<const bf16*>(p.bias.data) + head, p.bias.row, at); break;
        default: add_bias(s, static_cast<const float*>(p.bias.data) + head, p.bias.row, at);
      }
    }
    if (p.alibi_slopes.data) {
      const float slope = scalar_of(p.alibi_slopes, span.i_batch, i_head, 0.f);
      const int32_t diag = alibi_diagonal(p, span.seqlen_q, span.seqlen_k);
#pragma unroll
      for (int i = 0; i < 16; ++i) s[i] = usual_nan(s[i] - slope * abs_of(float(query_of(at, i) + diag - key_of(at, i))));
    }
  }

  // Which of a block's pairs dropout keeps, a bit to each. Parameters are reloaded for each call of the generator: kept
  // across the loop, the keys of its ten rounds would spill scalar registers.
  FMHA_DEVICE uint32_t kept(const PairPlace& at) const {
    if (!reload_params<MatrixBwdParams>().drops) return 0xffff;
    uint32_t kept = 0;
    // Registers of a lane whose keys lie in one four.
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
        // Selects: an array of registers that lanes index differently would lie in scratch memory.
        const uint32_t low = word % 2 ? words[1] : words[0], high = word % 2 ? words[3] : words[2];
        kept |= uint32_t((word / 2 ? high : low) < p.dropout_threshold) << call;
      }
    }
    return kept;
  }

 private:
  // Clamped: the bias ends where the lengths do.
  template <class Elem>
  FMHA_DEVICE void add_bias(PairValues& s, const Elem* bias, int64_t row, const PairPlace& at) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int64_t query = min(query_of(at, i), span.seqlen_q - 1);
      s[i] = usual_nan(s[i] + float(bias[query * row + min(key_of(at, i), span.seqlen_k - 1)]));
    }
  }
};

}  // namespace fmha::cdna::bwd
