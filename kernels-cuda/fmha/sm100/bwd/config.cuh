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

// Number of keys of a CTA, which are the rows of its products.
constexpr int kBlock = mma::sm100::kRows;
// Number of columns of tensor memory.
constexpr int kColumns = 512;

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
// Registers a thread after setmaxnreg; warpgroup by warpgroup they sum to the 512 of a launch of 512 threads. The issue
// and load roles of a wide head, which walk dQ in two parts, spill with 72.
template <bool is_wide>
struct Regs {
  static constexpr int reduce = is_wide ? 88 : 104, compute = 168, other = is_wide ? 88 : 72;
  static_assert(reduce + 2 * compute + other <= 512, "sm100: registers of all threads, within those of the launch");
};

// A head dimension as shared-memory tiles have it, in whole spans of 128 bytes; TMA writes zeros beyond the tensor. The
// function below gives it as products and tensor memory have it.
FMHA_DEVICE constexpr int tile_dim(int dim) { return round_up(dim, 64); }
FMHA_DEVICE constexpr int product_dim(int dim) { return round_up(dim, 32); }

// Maps of `(dim, row, head, batch)`; a column-major V's of `(row, dim, head, batch)`.
struct Maps {
  TensorMap q, k, v, dout;
};

// A CTA's share in the gradients of its keys: all, or one of two parts in separate CTAs.
enum class Part { All, DkDq, Dv };
constexpr bool has_dv(Part part) { return part != Part::DkDq; }
constexpr bool has_dk(Part part) { return part != Part::Dv; }

// How a problem's head dimensions are computed. dK and dV of 128 keys and a wide head leave tensor memory for S and dP
// of 64 queries. Where they do not even leave that, two CTAs compute the gradients of a block of keys.
template <BwdSpec spec>
struct Shape {
  static constexpr int dim_qk = product_dim(spec.fwd.head_dim_qk), dim_v = product_dim(spec.fwd.head_dim_v);
  static constexpr bool is_wide = spec.fwd.head_dim_qk > kBlock;
  static constexpr int queries = is_wide ? 64 : kBlock;  // of a block
  static constexpr int half = queries / 2;               // queries of a block that one compute warpgroup has
  static constexpr bool in_two = is_wide && 2 * queries + dim_qk + dim_v > kColumns;
  // Number of products in which dQ is computed. A wide head's dQ is transposed: each product has 128 elements of the
  // head, one a lane, by 64 queries. The last 128 elements may overlap the first.
  static constexpr int dq_parts = is_wide ? 2 : 1;
  // Parity of a step's phase at the barriers of a part of dQ.
  FMHA_DEVICE static uint32_t dq_parity(int32_t step, int dq_part) { return (step * dq_parts + dq_part) & 1; }
  FMHA_DEVICE static constexpr int first_of(int dq_part) {
    return dq_part == 0 ? 0 : tile_dim(spec.fwd.head_dim_qk) - kBlock;
  }
};

// Columns of tensor memory. Lanes are keys; those of dQ are queries, or elements of a wide head. P lies over S in two
// parts, each over the columns that its warpgroup has read; dQ lies over dP. A CTA that computes only dV has two places
// for S. Columns that a wide head leaves free hold an operand A, two elements a column, which saves room and reads of
// shared memory: V for dP, or in a CTA of dV alone K for S.
template <BwdSpec spec, Part part>
struct TmemPlan {
  using Of = Shape<spec>;
  static constexpr int s_slots = has_dk(part) ? 1 : 2;
  static constexpr int dp = s_slots * Of::queries, dq = dp, dv = dp + (has_dk(part) ? Of::queries : 0);
  static constexpr int dk = dv + (has_dv(part) ? Of::dim_v : 0), v = dk + (has_dk(part) ? Of::dim_qk : 0), k = v;
  static constexpr bool has_k = part == Part::Dv;
  static constexpr bool has_v = has_dk(part) && Of::is_wide && v + Of::dim_v / 2 <= kColumns;
  static constexpr int end = v + (has_k ? Of::dim_qk / 2 : has_v ? Of::dim_v / 2 : 0);
  FMHA_DEVICE static constexpr int s(int slot) { return slot * Of::queries; }
  FMHA_DEVICE static constexpr int p(int slot, int half) { return s(slot) + half * Of::half; }

  static_assert(end <= kColumns && (Of::is_wide || Of::dim_qk <= Of::queries), "tensor memory holds every sum");
};

// Place of a block's sums of dQ in memory. A warp's additions are side by side: four columns of every query, then the
// next four; or, of a wide head, whose lanes are columns, four queries' every column, then the next four queries.
template <BwdSpec spec>
struct DqSums {
  using Of = Shape<spec>;
  static constexpr int rows = Of::queries, dim = Of::dim_qk;
  FMHA_DEVICE static float* block_of(const BwdParams& p, const SeqSpan& span, int32_t i_head, int32_t first_query) {
    return p.dq_sums + stats_offset(p, span, i_head, first_query) * dim;
  }
  FMHA_DEVICE static int32_t index_of(int32_t row, int32_t column) {
    if constexpr (Of::is_wide) return (row / 4 * dim + column) * 4 + row % 4;
    else return (column / 4 * rows + row) * 4 + column % 4;
  }
};

// K and V in shared memory, where they are not in tensor memory.
template <class Tile, bool there>
struct KeysInSmem {
  Tile k;
};
template <class Tile>
struct KeysInSmem<Tile, false> {};
template <class Tile, bool there>
struct ValuesInSmem {
  Tile v;
};
template <class Tile>
struct ValuesInSmem<Tile, false> {};

template <BwdSpec spec>
using KeyTile = SmemTile<uint16_t, kBlock, tile_dim(spec.fwd.head_dim_qk)>;
// Tile of V in shared memory. A column-major V has rows of elements, with keys as columns.
template <BwdSpec spec>
constexpr bool kColumnMajor = spec.fwd.v_layout == VLayout::ColMajor;
template <BwdSpec spec, int dim_v = tile_dim(spec.fwd.head_dim_v)>
using KeyValueTile = SmemTile<uint16_t, kColumnMajor<spec> ? dim_v : kBlock, kColumnMajor<spec> ? kBlock : dim_v>;

template <BwdSpec spec, Sm100BwdTile tile, Part part>
struct Smem : KeysInSmem<KeyTile<spec>, !TmemPlan<spec, part>::has_k>,
              ValuesInSmem<KeyValueTile<spec>, has_dk(part) && !TmemPlan<spec, part>::has_v> {
  static_assert(tile.stages_q >= 2, "the next block's scores are started before this one's Q has been read");
  static constexpr int dim_qk = tile_dim(spec.fwd.head_dim_qk), dim_v = tile_dim(spec.fwd.head_dim_v);
  static constexpr int queries = Shape<spec>::queries, s_slots = TmemPlan<spec, part>::s_slots;
  using ScoreTile = SmemTile<uint16_t, queries, dim_qk>;
  using ValueTile = SmemTile<uint16_t, queries, dim_v>;
  using DsTile = SmemTile<uint16_t, kBlock, queries>;
  using Stats = QueryStats<queries>;

  ScoreTile q[tile.stages_q];
  ValueTile dout[tile.stages_dout];
  DsTile ds;                             // keys, queries
  Stats stats[tile.stages_q];            // of Q's block
  Barrier k_full;                        // the bytes of K, or the load role's arrival after it zeroed rows
  Barrier v_full;                        // the bytes of V
  Barrier operand_full;                  // K or V is in tensor memory: one arrival per compute warp
  Barrier q_full[tile.stages_q];         // the same of Q, and the bytes of its rows' statistics
  Barrier q_empty[tile.stages_q];        // Q's products are computed; one arrival per compute warp, for statistics
  Barrier dout_full[tile.stages_dout];   // the same of dO
  Barrier dout_empty[tile.stages_dout];  // the products that read dO are computed
  Barrier raw;                           // the bytes of a tile of which rows are to be zeroed
  Barrier s_full[s_slots];               // S is computed
  Barrier p_full[s_slots];               // S has been read, P is stored: one arrival per compute warp
  Barrier dp_full;                       // dP is computed, and every product issued before it
  Barrier ds_full;                       // dS is stored, and dP has been read: one arrival per compute warp
  Barrier dq_full;                       // dQ is computed, or one part of it
  Barrier dq_read;                       // one arrival per reduce warp
  Barrier grads_full;                    // dK and dV are summed
  Barrier done;                          // tensor memory has been read: one arrival per compute and reduce warp
  uint32_t tmem;                         // address of the 512 columns
  uint32_t found[2][kBlock / 32];        // rows that are not finite in what each compute warpgroup stores, a bit each
};

// Named barriers; 0 is that of __syncthreads.
constexpr int kComputeBarrier = 1;

}  // namespace fmha::sm100::bwd
