// A wave's own rows and their sums, and what a block of 32 walked rows adds to them.
#pragma once
#include <fmha/cdna/bwd/pairs.h>
#include <fmha/cdna/tile_step.h>

namespace fmha::cdna::bwd {

// C += A B over one step of 32 bytes.
template <DType dtype>
FMHA_DEVICE Acc mma_step(Frag a, Frag b, Acc c) {
#pragma unroll
  for (int part = 0; part < Mma<dtype>::parts; ++part) c = mma_part<dtype>(a, b, part, c);
  return c;
}

// A block of P or dS as the B operand of sums: two steps of 16 walked rows, in KeyOrder.
using BlockFrags = Array<Frag, 2>;
template <DType dtype>
FMHA_DEVICE BlockFrags block_frags(const Acc& x) {
  BlockFrags frags = {};
#pragma unroll
  for (int i = 0; i < 16; i += 2) frags[i / 8][i % 8 / 2] = p_word<dtype>(x, i, 0);
  return frags;
}

// LSE in log2 and delta of a lane's own query.
struct OwnStats {
  float lse_log2_, delta_;
  FMHA_DEVICE float lse_log2(int) const { return lse_log2_; }
  FMHA_DEVICE float delta(int) const { return delta_; }
};

// Those of a block's queries, which lie along a lane's registers.
struct BlockStats {
  f32x4 lse_log2_[4], delta_[4];
  FMHA_DEVICE float lse_log2(int i) const { return lse_log2_[i / kRun][i % kRun]; }
  FMHA_DEVICE float delta(int i) const { return delta_[i / kRun][i % kRun]; }

  template <int columns>
  static FMHA_DEVICE BlockStats of(const WalkedStats<columns>& stats, int b, int half) {
    BlockStats block;
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      const int from = b * kEdge + acc_row(run * kRun, half);
      block.lse_log2_[run] = *reinterpret_cast<const f32x4*>(&stats.lse_log2[from]);
      block.delta_[run] = *reinterpret_cast<const f32x4*>(&stats.delta[from]);
    }
    return block;
  }
};

template <CdnaBwdSpec spec, CdnaBwdTile tile>
struct Owner {
  using C = Config<spec, tile>;
  using P = Pairs<spec, tile>;
  static constexpr DType dtype = spec.dtype;
  // gfx90a's matrix unit flushes f16 subnormals to 0: P lies higher there, by a power of two.
  static constexpr float p_scale = spec.dtype == DType::F16 && kArch == Arch::Gfx90a ? 4096.f : 1.f;

  Array<Frag, C::score_steps> own_score;
  Array<Frag, C::makes_ds ? C::value_steps : 1> own_value;
  Array<Acc, max(C::score_blocks, 1)> dscore;  // dQ^T or dK^T
  Array<Acc, max(C::value_blocks, 1)> dvalue;  // dV^T
  typename C::Score::LaneAddresses score_lane;
  // Rows of one length have the same addresses.
  static constexpr bool alike = spec.head_dim_qk == spec.head_dim_v;
  typename Choose<alike, Nothing, typename C::Value::LaneAddresses>::type own_value_lane;

  FMHA_DEVICE void clear() {
#pragma unroll
    for (int d = 0; d < C::score_blocks; ++d) dscore[d] = Acc{};
#pragma unroll
    for (int d = 0; d < C::value_blocks; ++d) dvalue[d] = Acc{};
    score_lane = C::Score::lane_addresses();
    if constexpr (!alike) own_value_lane = C::Value::lane_addresses();
  }
  FMHA_DEVICE const auto& value_lane() const {
    if constexpr (alike) return score_lane;
    else return own_value_lane;
  }

  // Block `b` of a stage. `edge`: some of its pairs are hidden, or past the lengths.
  template <class Stats>
  FMHA_DEVICE void add(const P& pairs, const typename C::Stage& stage, int b, const PairPlace& at, bool edge,
                       const Stats& stats) {
    Acc s = {}, slopes, dp = {};
#pragma unroll
    for (int c = 0; c < C::score_steps; ++c) {
      s = mma_step<dtype>(stage.score.row_frag(score_lane, b, c), own_score[c], s);
    }
    if constexpr (C::makes_ds) {
#pragma unroll
      for (int c = 0; c < C::value_steps; ++c) {
        dp = mma_step<dtype>(stage.value.row_frag(value_lane(), b, c), own_value[c], dp);
      }
    }

    // Reloaded: kept across products, parameters would fill the scalar registers.
    const FwdParams& p = reload_params<CdnaBwdParams>().bwd.fwd;
    if constexpr (spec.modifies) pairs.modify(s, slopes, at);
    const float to_log2 = spec.modifies ? kLog2E : p.softmax_scale * kLog2E;
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i] = v_exp_f32(v_fma_f32(s[i], to_log2, -stats.lse_log2(i)));
    // A hidden dP may be NaN, and 0 times that is NaN.
    if (edge) {
      pairs.hide(s, at);
      if constexpr (C::makes_ds) pairs.hide(dp, at);
    }
    uint32_t kept = 0;
    if constexpr (spec.dropout) kept = pairs.kept(at);

    if constexpr (C::makes_dv) {
      Acc probs = s;
      if constexpr (spec.dropout) {
#pragma unroll
        for (int i = 0; i < 16; ++i) probs[i] = kept >> i & 1 ? s[i] : 0.f;
      }
      if constexpr (p_scale != 1.f) probs *= p_scale;
      const BlockFrags frags = block_frags<dtype>(probs);
#pragma unroll
      for (int c = 0; c < C::steps_of_block; ++c) {
#pragma unroll
        for (int d = 0; d < C::value_blocks; ++d) {
          const Frag column = stage.value.column_frag(value_lane(), d, C::steps_of_block * b + c);
          dvalue[d] = mma_step<dtype>(column, frags[c], dvalue[d]);
        }
      }
    }
    if constexpr (C::makes_ds) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if constexpr (spec.dropout) dp[i] = kept >> i & 1 ? dp[i] * p.dropout_scale : 0.f;
        dp[i] = s[i] * (dp[i] - stats.delta(i));
        if constexpr (spec.modifies) dp[i] *= slopes[i];
      }
      const BlockFrags frags = block_frags<dtype>(dp);
#pragma unroll
      for (int c = 0; c < C::steps_of_block; ++c) {
#pragma unroll
        for (int d = 0; d < C::score_blocks; ++d) {
          const Frag column = stage.score.column_frag(score_lane, d, C::steps_of_block * b + c);
          dscore[d] = mma_step<dtype>(column, frags[c], dscore[d]);
        }
      }
    }
  }
};

}  // namespace fmha::cdna::bwd
