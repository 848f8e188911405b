// Backward kernel on MFMA.
#pragma once
#include <fmha/cdna/bwd/load.h>
#include <fmha/cdna/bwd/walk.h>
#include <fmha/cdna/epilogue.h>
#include <fmha/cdna/score.h>

namespace fmha::cdna::bwd {

// Computes C += A B over one step of 32 bytes of the inner dimension.
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

// Addresses of a lane's operands in LDS.
template <MatrixBwdSpec spec, class C>
struct WalkedLanes {
  typename C::Score::LaneAddresses score_;
  // Whether rows of Q and K are as long as rows of V and dO, so that the offsets in both are equal.
  static constexpr bool alike = spec.head_dim_qk == spec.head_dim_v;
  [[no_unique_address]] typename Maybe<!alike, typename C::Value::LaneAddresses>::type value_;

  FMHA_DEVICE void find() {
    score_ = C::Score::lane_addresses();
    if constexpr (!alike) value_ = C::Value::lane_addresses();
  }
  FMHA_DEVICE const auto& score() const { return score_; }
  FMHA_DEVICE const auto& value() const {
    if constexpr (alike) return score_;
    else return value_;
  }
};

template <MatrixBwdSpec kSpec, MatrixBwdTile kTile>
struct OnMfma {
  static constexpr MatrixBwdSpec spec = kSpec;
  static constexpr MatrixBwdTile tile = kTile;
  using C = Config<spec, tile>;
  using Acc = fmha::Acc;
  using Load = BlockLoad<spec, tile>;
  using Lanes = WalkedLanes<spec, C>;

  static constexpr int edge = kEdge;   // own rows of a wave, and elements of their gradients in an accumulator
  static constexpr int acc_elems = 16;  // of a lane
  // Power of two by which P is scaled on gfx90a in f16: its matrix unit flushes subnormals to 0.
  static constexpr float p_scale = spec.dtype == DType::F16 && kArch == Arch::Gfx90a ? 4096.f : 1.f;

  static FMHA_DEVICE int lane_col(int thread) { return fmha::lane_col(thread); }
  static FMHA_DEVICE int lane_half(int thread) { return fmha::lane_half(thread); }
  // Row, within a walked block, that register `i` of an accumulator holds.
  static FMHA_DEVICE constexpr int walked_row(int i, int half) { return acc_row(i, half); }

  // Brings an accumulator of sums into runs of four adjacent elements; the function below says where they lie.
  static FMHA_DEVICE const Acc& in_runs(const Acc& acc) { return acc; }
  static FMHA_DEVICE constexpr int row_of_run(int i, int half) { return acc_row(i, half); }
  template <DType dtype>
  static FMHA_DEVICE void store_run(uint8_t* to, float a, float b, float c, float d) {
    store_run_of_o<dtype>(to, a, b, c, d);
  }
  template <DType dtype>
  static FMHA_DEVICE void store_elem(uint8_t* to, float x) {
    store_elem_of_o<dtype>(to, x);
  }

  using Tanh = cdna::Tanh;

  // The row that a lane owns, as the B operand of scores; the next type is for dP.
  using OwnScore = Array<Frag, C::score_steps>;
  using OwnValue = Array<Frag, C::value_steps>;
  template <int steps>
  static FMHA_DEVICE void load_own(Array<Frag, steps>& own, const TensorRows& rows) {
    bwd::load_own<tile.load>(own, rows);
  }

  template <class Matrix, class Lane, int steps>
  static FMHA_DEVICE PairValues product(const Matrix& walked, const Lane& lane, int b, const Array<Frag, steps>& own) {
    PairValues x = {};
#pragma unroll
    for (int c = 0; c < steps; ++c) x = mma_step<spec.dtype>(walked.row_frag(lane, b, c), own[c], x);
    return x;
  }

  // Adds to `sums` the visited rows of block `b`, transposed, times P or dS.
  template <class Matrix, class Lane, int blocks>
  static FMHA_DEVICE void add_to(Array<Acc, blocks>& sums, const Matrix& walked, const Lane& lane, int b,
                                 const PairValues& x) {
    const BlockFrags frags = block_frags<spec.dtype>(x);
#pragma unroll
    for (int c = 0; c < C::steps_of_block; ++c) {
#pragma unroll
      for (int d = 0; d < blocks; ++d) {
        const Frag column = walked.column_frag(lane, d, C::steps_of_block * b + c);
        sums[d] = mma_step<spec.dtype>(column, frags[c], sums[d]);
      }
    }
  }

  // LSE and delta of a block's queries, which lie along a lane's registers.
  struct BlockStats {
    f32x4 lse_log2_[4], delta_[4];
    FMHA_DEVICE float lse_log2(int i) const { return lse_log2_[i / kRun][i % kRun]; }
    FMHA_DEVICE float delta(int i) const { return delta_[i / kRun][i % kRun]; }

    static FMHA_DEVICE BlockStats of(const WalkedStats<tile.columns>& stats, int b, int half) {
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
};

}  // namespace fmha::cdna::bwd
