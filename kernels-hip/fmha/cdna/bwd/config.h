// The derived numbers and the LDS of the backward kernels on MFMA.
//
// A wave owns 32 rows, to which nothing else adds: queries, whose dQ it sums, or keys of a KV head, whose dK and dV it
// sums over all query heads of the group. Its workgroup walks the rows of the other side in blocks. So no sum is kept
// in memory, GQA takes no atomics and every sum has one order; the price is that scores and dP are computed twice,
// seven products in place of five.
//
//   owner    own rows (registers)   walks (LDS)    scores and dP        sums
//   dQ       Q, dO                  K, V           S^T, dP^T            dQ^T += K^T dS^T
//   dK, dV   K, V                   Q, dO          S, dP                dV^T += dO^T P, dK^T += Q^T dS
//
// Either way an accumulator of scores has an own row in each lane and the walked rows along its registers, so that P
// and dS, packed in place, are the B operand of the sums (mma/cdna.h): neither goes through LDS. The walked rows lie in
// LDS twice, as they are for scores and dP, and transposed for the sums.
#pragma once
#include <fmha/bwd.h>
#include <fmha/cdna/bwd/tile.h>
#include <fmha/cdna/config.h>

namespace fmha::cdna::bwd {

// The walked rows are Q and dO, or K and V: what scores are made of, and what dP is made of.
constexpr int kElemBytes = 2;

constexpr bool owns_queries(BwdSums sums) { return sums == BwdSums::Dq; }
// dQ or dK.
constexpr bool sums_scores(BwdSums sums) { return sums != BwdSums::Dv; }
constexpr bool sums_values(BwdSums sums) { return sums == BwdSums::DkDv || sums == BwdSums::Dv; }

struct Nothing {};

template <class Rows, class Columns>
struct WalkedAddresses {
  typename Rows::LaneAddresses rows;
  typename Columns::LaneAddresses columns;
};

// Walked rows in LDS, in those of the two forms that products read: `by_row` for scores and dP, `by_column` for sums.
template <int dim, int num_rows, bool by_row, bool by_column>
struct Walked {
  static constexpr int row_bytes = dim * kElemBytes;
  // A thread loads four rows of one 16-byte chunk, and writes them as chunks of rows and as runs of columns.
  static constexpr int elems_of_chunk = kFragBytes / kElemBytes;
  // Lanes that write at once have rows of two runs whose columns share a chunk: eight rows apart in KeyOrder.
  using Rows = LdsMatrix<num_rows, row_bytes, 0, 2 * kRun>;
  using Columns = TransposedOnWriting<dim, num_rows, kElemBytes, elems_of_chunk>;
  static constexpr int steps = row_bytes / kStepBytes, blocks = dim / kEdge;
  static constexpr bool has_rows = by_row, has_columns = by_column;

  [[no_unique_address]] typename Choose<by_row, Rows, Nothing>::type rows;
  [[no_unique_address]] typename Choose<by_column, Columns, Nothing>::type columns;

  using LaneAddresses = WalkedAddresses<Rows, Columns>;
  static FMHA_DEVICE LaneAddresses lane_addresses() { return {Rows::lane_addresses(), Columns::lane_addresses()}; }

  // Rows 32 * block ..., step `c` of their elements.
  FMHA_DEVICE Frag row_frag(const LaneAddresses& lane, int block, int c) const {
    return rows.frag(lane.rows, block, c);
  }
  // Elements 32 * d ..., step `c` of the rows.
  FMHA_DEVICE Frag column_frag(const LaneAddresses& lane, int d, int c) const {
    return columns.frag(lane.columns, d, c);
  }
};

// LSE in log2 and delta of walked queries.
template <int columns>
struct WalkedStats {
  alignas(16) float lse_log2[columns];
  alignas(16) float delta[columns];
};

template <CdnaBwdSpec spec, CdnaBwdTile tile>
struct Config {
  static constexpr int num_waves = tile.rows / kEdge, num_threads = num_waves * kWaveSize;
  static constexpr bool makes_ds = sums_scores(tile.sums), makes_dv = sums_values(tile.sums);
  static constexpr bool queries_own = owns_queries(tile.sums);
  static_assert(spec.head_dim_qk % 64 == 0 && spec.head_dim_v % 64 == 0, "rows are padded to whole lines of banks");
  static_assert(2 * tile.columns <= num_threads / 2, "a half of the waves loads LSE and delta, a thread each");
  static_assert(num_waves % 2 == 0, "one half of the waves loads scores' rows, the other values'");

  static constexpr int score_steps = spec.head_dim_qk * kElemBytes / kStepBytes;
  static constexpr int value_steps = spec.head_dim_v * kElemBytes / kStepBytes;
  static constexpr int score_blocks = makes_ds ? spec.head_dim_qk / kEdge : 0;
  static constexpr int value_blocks = makes_dv ? spec.head_dim_v / kEdge : 0;
  static constexpr int blocks = tile.columns / kEdge;
  static constexpr int steps_of_block = kEdge * kElemBytes / kStepBytes;

  using Score = Walked<spec.head_dim_qk, tile.columns, true, makes_ds>;
  using Value = Walked<spec.head_dim_v, tile.columns, makes_ds, makes_dv>;
  struct Stage {
    Score score;
    Value value;
    [[no_unique_address]] typename Choose<queries_own, Nothing, WalkedStats<tile.columns>>::type stats;
  };
  struct Lds {
    Stage stage[tile.stages];
  };
  static_assert(sizeof(Lds) == tile.lds_bytes, "host and device disagree");
};

}  // namespace fmha::cdna::bwd
