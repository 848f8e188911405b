// The Blackwell backward kernel's derived numbers, shared memory, tensor memory, barriers and roles.
#pragma once
#include <fmha/common/pipeline.cuh>
#include <fmha/common/score_pair.cuh>
#include <fmha/mma/sm100.cuh>
#include <fmha/ptx/mbarrier.cuh>
#include <fmha/ptx/tma.cuh>
#include <fmha/sm100_bwd_host.h>

namespace fmha::sm100::bwd {

using mma::SmemTile;
using ptx::Barrier;
using ptx::TensorMap;

// Keys of a CTA, and queries of a block that it walks: the rows of a product.
constexpr int kBlock = mma::sm100::kRows;

// One warpgroup adds dQ to memory; two compute P and dS, each for half of a block's queries; the last one holds roles
// of one warp each.
enum class Role { Reduce, Compute, Issue, Load, Idle };
constexpr int kReduceWarps = 4, kComputeWarps = 8;
FMHA_DEVICE constexpr Role role_of(int32_t warp) {
  if (warp < kReduceWarps) return Role::Reduce;
  if (warp < kReduceWarps + kComputeWarps) return Role::Compute;
  const int32_t other = warp - kReduceWarps - kComputeWarps;
  return other == 0 ? Role::Issue : other == 1 ? Role::Load : Role::Idle;
}
// Queries of a block that one compute warpgroup has.
constexpr int kHalf = kBlock / 2;

// Registers a thread after setmaxnreg; warpgroup by warpgroup they sum to the 512 of a launch of 512 threads.
constexpr int kReduceRegs = 104, kComputeRegs = 168, kOtherRegs = 72;
static_assert(kReduceRegs + 2 * kComputeRegs + kOtherRegs <= 512, "sm100: registers of all threads, within those of the launch");

// A head dimension as the tiles have it, of whole spans of 128 bytes: TMA fills with zeros what the tensor lacks. And
// as products and tensor memory have it.
FMHA_DEVICE constexpr int tile_dim(int dim) { return round_up(dim, 64); }
FMHA_DEVICE constexpr int product_dim(int dim) { return round_up(dim, 32); }

// Maps of `(dim, row, head, batch)`; a column-major V's of `(row, dim, head, batch)`.
struct Maps {
  TensorMap q, k, v, dout;
};

// Columns of tensor memory. Lanes are keys; those of dQ are queries. P lies over S in two parts, each over the
// columns that its warpgroup has read; dQ lies over dP.
template <BwdSpec spec>
struct TmemPlan {
  static constexpr int columns = 512;
  static constexpr int dim_qk = product_dim(spec.fwd.head_dim_qk), dim_v = product_dim(spec.fwd.head_dim_v);
  static constexpr int s = 0, dp = kBlock, dq = dp, dv = 2 * kBlock, dk = dv + dim_v;
  FMHA_DEVICE static constexpr int p(int half) { return s + half * kHalf; }

  static_assert(dk + dim_qk <= columns && dim_qk <= kBlock, "tensor memory holds S, dP, dV and dK");
};

// Place of a block's sums of dQ in memory: four columns of every query, then the next four, so that a warp's
// additions are side by side.
template <BwdSpec spec>
struct DqSums {
  static constexpr int rows = kBlock, dim = TmemPlan<spec>::dim_qk;
  FMHA_DEVICE static float* block_of(const BwdParams& p, const SeqSpan& span, int32_t i_head, int32_t first_query) {
    return p.dq_sums + stats_offset(p, span, i_head, first_query) * dim;
  }
  FMHA_DEVICE static int32_t index_of(int32_t row, int32_t column) { return (column / 4 * rows + row) * 4 + column % 4; }
};

template <BwdSpec spec, Sm100BwdTile tile>
struct Smem {
  static_assert(tile.stages_q >= 2, "the next block's scores are started before this one's Q has been read");
  static constexpr int dim_qk = tile_dim(spec.fwd.head_dim_qk), dim_v = tile_dim(spec.fwd.head_dim_v);
  using ScoreTile = SmemTile<uint16_t, kBlock, dim_qk>;
  using ValueTile = SmemTile<uint16_t, kBlock, dim_v>;
  using DsTile = SmemTile<uint16_t, kBlock, kBlock>;
  // A column-major V lies as its rows do: elements, keys.
  static constexpr bool v_columns = spec.fwd.v_layout == VLayout::ColMajor;
  using KeyValueTile = SmemTile<uint16_t, v_columns ? dim_v : kBlock, v_columns ? kBlock : dim_v>;

  ScoreTile k;
  KeyValueTile v;
  ScoreTile q[tile.stages_q];
  ValueTile dout[tile.stages_dout];
  DsTile ds;                             // keys, queries
  QueryStats<kBlock> stats[tile.stages_q];  // of Q's block
  Barrier k_full;                        // the bytes of K, or the load role's arrival after it zeroed rows
  Barrier v_full;                        // the bytes of V
  Barrier q_full[tile.stages_q];         // the same of Q, and the bytes of its rows' statistics
  Barrier q_empty[tile.stages_q];        // Q's products are computed; one arrival per compute warp, for statistics
  Barrier dout_full[tile.stages_dout];   // the same of dO
  Barrier dout_empty[tile.stages_dout];  // the products that read dO are computed
  Barrier raw;                           // the bytes of a tile of which rows are to be zeroed
  Barrier s_full;                        // S is computed
  Barrier p_full;                        // P is stored: one arrival per compute warp
  Barrier dp_full;                       // dP is computed, and every product issued before it
  Barrier ds_full;                       // dS is stored, and dP has been read: one arrival per compute warp
  Barrier dq_full;                       // dQ is computed
  Barrier dq_read;                       // one arrival per reduce warp
  Barrier grads_full;                    // dK and dV are summed
  Barrier done;                          // tensor memory has been read: one arrival per compute and reduce warp
  uint32_t tmem;                         // address of the 512 columns
  uint32_t found[2][kBlock / 32];        // rows of dV and of dK that are not finite, a bit each
};

// Named barriers; 0 is that of __syncthreads.
constexpr int kComputeBarrier = 1;

}  // namespace fmha::sm100::bwd
