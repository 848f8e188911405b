// Score modifiers and dropout on a fragment of S^T: a key to a row, queries along it.
//
// A modifier changes what P is an exponential of; the soft-cap also what dS is multiplied by on its way back to the
// product. Its derivative is kept from S to dS as f16, since it lies in 0..1 and registers are scarce. Dropout changes
// P as dV sees it, and dP.
#pragma once
#include <fmha/philox.h>
#include <fmha/ptx/num.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/score.h>
#include <fmha/sm90/bwd/work.cuh>

namespace fmha::sm90::bwd {

// Which elements of a thread's fragment dropout keeps, a bit to each.
//
// One call of the generator decides four keys of a query, which four lanes hold. They hold two queries of an 8-column
// group in two rows each: four calls, one a lane, whose bits they exchange.
template <int n>
struct KeptBits {
  static constexpr int num_groups = n / 8, groups_a_word = 8, num_words = ceil_div(num_groups, groups_a_word);
  uint32_t words[num_words];

  FMHA_DEVICE bool keeps(int e) const { return words[e / 32] >> e % 32 & 1; }

  // `first_key`: of the warpgroup's rows; `first_query`: of the columns.
  FMHA_DEVICE void decide(const FwdParams& p, int32_t batch_head, int32_t first_key, int32_t first_query) {
    // Of the four lanes whose keys one call decides, this lane's number is its key and the call that it makes: for the
    // query of bit 0 and the row of bit 1.
    const int32_t own = threadIdx.x / 4 % 4;
    const int32_t quad = (first_key + mma::fragment_row() + (own & 2 ? 8 : 0)) / 4;
    const int32_t query = first_query + mma::fragment_column() + (own & 1);
#pragma unroll
    for (int w = 0; w < num_words; ++w) {
      uint32_t called = 0;
#pragma unroll
      for (int g = w * groups_a_word; g < min((w + 1) * groups_a_word, num_groups); ++g) {
        const Array<uint32_t, 4> decided = dropout_words(p, batch_head, query + 8 * g, quad);
#pragma unroll
        for (int key = 0; key < 4; ++key)
          called |= uint32_t(decided[key] < p.dropout_threshold) << (4 * (g - w * groups_a_word) + key);
      }
      uint32_t kept = 0;
#pragma unroll
      for (int away = 0; away < 4; ++away) {
        const uint32_t bits = ptx::shfl_xor(called, 4 * away);
        kept |= (bits >> own & 0x11111111u) << (own ^ away);
      }
      words[w] = kept;
    }
  }
};

// An elementwise bias along a fragment, pair of columns after pair: one pointer that moves on, since the addresses of all
// columns would take the registers of as many scores.
template <FwdSpec spec>
struct BiasCursor {
  static constexpr int elem_bytes = size_bytes(spec.dtype_bias);
  const char* at;  // of the thread's first key and the next column
  const int64_t row_bytes;
  int32_t queries, keys;  // there are from here on

  // Of the keys `row` and the next: 0, or 8.
  FMHA_DEVICE float elem(int row) const {
    // There are no elements behind the lengths.
    const bool there = queries > 0 && keys > row;
    if constexpr (spec.dtype_bias == DType::F32) {
      return ptx::ld_global_f32_if(at + row * elem_bytes, there);
    } else {
      float low, high;
      ptx::unpack_x2<spec.dtype_bias>(ptx::ld_global_u16_if(at + row * elem_bytes, there), low, high);
      return low;
    }
  }
  FMHA_DEVICE void move(int columns) {
    at += columns * row_bytes;
    queries -= columns;
  }
};

// A modified score, and the derivative of its soft-cap.
struct ModifiedScore {
  float log2, slope;
};

template <BwdSpec spec, Sm90BwdTile tile>
struct Modifiers {
  using Scores = mma::Accumulator<num_columns(tile)>;
  static constexpr FwdSpec kFwd = spec.fwd;

  // The slopes of a block's soft-cap: two f16 to a register.
  struct Slopes {
    uint32_t pairs[kFwd.softcap ? num_columns(tile) / 4 : 1];

    FMHA_DEVICE void multiply(float& low, float& high, int e) const {
      float slopes[2];
      ptx::unpack_f16x2(pairs[e / 2], slopes[0], slopes[1]);
      low *= slopes[0];
      high *= slopes[1];
    }
  };

  const FwdParams& p;
  const ScoreModifier modifier;
  const int32_t key, query;          // the thread's first
  const int32_t end_key, end_query;  // of the sequence

  FMHA_DEVICE static Modifiers of(const BwdParams& p, const Work& work, int32_t i_head, int32_t first_key,
                                  int32_t first_query) {
    return {p.fwd, score_modifier<kFwd>(p.fwd, work.span, i_head, p.fwd.softmax_scale),
            first_key + mma::fragment_row(), first_query + mma::fragment_column(), work.span.seqlen_k,
            work.span.seqlen_q};
  }

  // c tanh(scale s / c) in log2, where that is wanted.
  FMHA_DEVICE ModifiedScore capped(float s) const {
    const float scale_log2 = modifier.scale * kLog2E;
    if constexpr (!kFwd.softcap) {
      return {s * scale_log2, 1.f};
    } else if constexpr (tile.fast_softcap) {
      // tanh(u) = 1 - 2 w where w = 1 / (1 + e^(2 u)); its derivative is 4 w (1 - w).
      const float w = ptx::rcp_approx_ftz(1.f + ptx::ex2_approx_ftz(s * (2.f * scale_log2 / modifier.softcap)));
      return {modifier.softcap * kLog2E * fmaf(-2.f, w, 1.f), 4.f * w * (1.f - w)};
    } else {
      const float t = tanh_of(s * modifier.scale / modifier.softcap);
      return {modifier.softcap * kLog2E * t, 1.f - t * t};
    }
  }

  FMHA_DEVICE float alibi_log2(int e) const {
    const float distance = float(query + modifier.alibi_diag - key) + float(Scores::column(e) - 8 * Scores::row(e));
    return -modifier.alibi_slope * kLog2E * fabsf(distance);
  }
  FMHA_DEVICE BiasCursor<kFwd> bias() const {
    const int64_t row_bytes = modifier.bias_row * size_bytes(kFwd.dtype_bias);
    return {static_cast<const char*>(modifier.bias) + query * row_bytes + key * int64_t(size_bytes(kFwd.dtype_bias)),
            row_bytes, end_query - query, end_key - key};
  }

  // Raw scores to what P are exponentials of: two queries of two keys, elements `e` to `e + 3`.
  FMHA_DEVICE void apply(Scores& s, int e, const float (&lse_log2)[2], BiasCursor<kFwd>& bias, Slopes& slopes) const {
    float slope[4];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int k = 2 * row + column;
        const ModifiedScore score = capped(s[e + k]);
        s[e + k] = score.log2 - lse_log2[column];
        if constexpr (kFwd.bias == BiasKind::Alibi) s[e + k] += alibi_log2(e + k);
        if constexpr (kFwd.bias == BiasKind::Elementwise) s[e + k] = fmaf(bias.elem(8 * row), kLog2E, s[e + k]);
        slope[k] = score.slope;
      }
      if constexpr (kFwd.bias == BiasKind::Elementwise) bias.move(column == 0 ? 1 : 7);
    }
    if constexpr (kFwd.softcap) {
      slopes.pairs[e / 2] = ptx::cvt_rn_x2<DType::F16>(slope[0], slope[1]);
      slopes.pairs[e / 2 + 1] = ptx::cvt_rn_x2<DType::F16>(slope[2], slope[3]);
    }
  }
};

}  // namespace fmha::sm90::bwd
