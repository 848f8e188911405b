// The derived numbers and the LDS of the backward kernels on MFMA (job.h). A wave owns 32 rows; P and dS, packed in
// place, are the B operand of the sums (mma/cdna.h).
#pragma once
#include <fmha/cdna/bwd/job.h>
#include <fmha/cdna/config.h>

namespace fmha::cdna::bwd {

template <class Rows, class Columns>
struct WalkedAddresses {
  typename Rows::LaneAddresses rows;
  typename Columns::LaneAddresses columns;
};

// A thread loads a 16-byte chunk of four rows, and writes them to LDS by rows and, transposed, by columns.
// Lanes that write at once have rows of two runs whose columns share a chunk: eight rows apart in KeyOrder.
template <int dim, int num_rows>
using WalkedRows = LdsMatrix<num_rows, dim * kElemBytes, 0, 2 * kRun>;
template <int dim, int num_rows>
using WalkedColumns = TransposedOnWriting<dim, num_rows, kElemBytes, kFragBytes / kElemBytes>;

template <int dim, int num_rows, bool by_row, bool by_column>
struct Walked : WalkedForms<WalkedRows<dim, num_rows>, WalkedColumns<dim, num_rows>, by_row, by_column> {
  using Rows = WalkedRows<dim, num_rows>;
  using Columns = WalkedColumns<dim, num_rows>;

  using LaneAddresses = WalkedAddresses<Rows, Columns>;
  static FMHA_DEVICE LaneAddresses lane_addresses() { return {Rows::lane_addresses(), Columns::lane_addresses()}; }

  // Fragment of rows 32 * block ..., step `c` of their elements.
  FMHA_DEVICE Frag row_frag(const LaneAddresses& lane, int block, int c) const {
    return this->rows.frag(lane.rows, block, c);
  }
  // Fragment of elements 32 * d ..., step `c` of the rows.
  FMHA_DEVICE Frag column_frag(const LaneAddresses& lane, int d, int c) const {
    return this->columns.frag(lane.columns, d, c);
  }
};

template <MatrixBwdSpec spec, MatrixBwdTile tile>
struct Config {
  static constexpr int num_waves = tile.rows / kEdge, num_threads = num_waves * kWaveSize;
  static constexpr bool makes_ds = sums_scores(tile.sums), makes_dv = sums_values(tile.sums);
  static constexpr bool makes_dp = needs_dp(tile.sums), queries_own = owns_queries(tile.sums);
  static_assert(spec.head_dim_qk % 64 == 0 && spec.head_dim_v % 64 == 0, "rows are padded to whole lines of banks");
  static_assert(2 * tile.columns <= num_threads / 2, "a half of the waves loads LSE and delta, a thread each");
  static_assert(num_waves % 2 == 0, "one half of the waves loads scores' rows, the other values'");

  static constexpr int score_steps = spec.head_dim_qk * kElemBytes / kStepBytes;
  static constexpr int value_steps = spec.head_dim_v * kElemBytes / kStepBytes;
  static constexpr int score_blocks = makes_ds ? spec.head_dim_qk / kEdge : 0;
  static constexpr int value_blocks = makes_dv ? spec.head_dim_v / kEdge : 0;
  static constexpr int steps_of_block = kEdge * kElemBytes / kStepBytes;

  using Score = Walked<spec.head_dim_qk, tile.columns, true, makes_ds>;
  using Value = Walked<spec.head_dim_v, tile.columns, makes_dp, makes_dv>;
  using Lds = WalkedLds<Score, Value, tile>;
  using Stage = typename Lds::Stage;
  static_assert(sizeof(Lds) == tile.lds_bytes, "host and device disagree");
};

}  // namespace fmha::cdna::bwd
