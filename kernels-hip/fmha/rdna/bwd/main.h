// Backward on WMMA (fmha/cdna/bwd/job.h). A wave owns 16 rows; the 32 walked rows of a block are two products' rows.
#pragma once
#include <fmha/cdna/bwd/walk.h>
#include <fmha/rdna/epilogue.h>

namespace fmha::rdna::bwd {

using namespace fmha::cdna::bwd;
using cdna::bwd::Job;

// Matrices laid out like the forward's K tile and transposed V tile: any `columns` rows of `dim` elements.
template <DType dtype, int dim>
constexpr CdnaSpec kRowsSpec = {dtype, dtype, OutputKind::Wide, dim, dim, VLayout::RowMajor, MaskKind::Full,
                                false, false, false};
template <MatrixBwdTile tile>
constexpr RdnaTile kRowsTile = {tile.rows, tile.columns, tile.load, tile.store, 1, false};

// Writes rows and columns of such matrices to LDS, from memory.
template <DType dtype, MatrixBwdTile tile, int dim, bool by_row, bool by_column>
struct Walked : WalkedForms<typename rdna::Config<kRowsSpec<dtype, dim>, kRowsTile<tile>>::K,
                            typename rdna::Config<kRowsSpec<dtype, dim>, kRowsTile<tile>>::V, by_row, by_column> {
  using OfRows = rdna::Config<kRowsSpec<dtype, dim>, kRowsTile<tile>>;

  FMHA_DEVICE void copy(const TensorRows& from) {
    const Rows rows = {from.data, from.row_bytes, from.elem_bytes, from.num_rows, from.num_elems};
    if constexpr (by_row) copy_k<kRowsSpec<dtype, dim>, kRowsTile<tile>>(this->rows, rows);
    if constexpr (by_column) copy_v<kRowsSpec<dtype, dim>, kRowsTile<tile>>(this->columns, rows, false);
  }
};

template <MatrixBwdSpec spec, MatrixBwdTile tile>
struct Config {
  static constexpr int num_threads = tile.rows / kEdge * kWaveSize;
  static constexpr bool makes_ds = sums_scores(tile.sums), makes_dv = sums_values(tile.sums);
  static constexpr bool makes_dp = needs_dp(tile.sums), queries_own = owns_queries(tile.sums);
  static_assert(tile.stages == 1, "a block is copied where it is computed with");
  static_assert(2 * tile.columns <= num_threads, "LSE and delta are copied by a thread each");

  static constexpr int score_blocks = makes_ds ? spec.head_dim_qk / kEdge : 0;
  static constexpr int value_blocks = makes_dv ? spec.head_dim_v / kEdge : 0;

  // Own rows stay in registers if they and the sums leave enough of a lane's 256
  // registers for pairs and operands; otherwise they are read again for each block.
  static constexpr int most_kept = spec.modifies || spec.masks ? 128 : 160, sums = (score_blocks + value_blocks) * kAccElems;
  static constexpr bool keeps_score = sums + spec.head_dim_qk / 4 <= most_kept;
  static constexpr bool keeps_value = sums + keeps_score * spec.head_dim_qk / 4 + spec.head_dim_v / 4 <= most_kept;

  using Score = Walked<spec.dtype, tile, spec.head_dim_qk, true, makes_ds>;
  using Value = Walked<spec.dtype, tile, spec.head_dim_v, makes_dp, makes_dv>;
  using Lds = WalkedLds<Score, Value, tile>;
  using Stage = typename Lds::Stage;
  static_assert(sizeof(Lds) == tile.lds_bytes, "host and device disagree");
};

// A block of walked rows on its way to LDS: only its address, since it is copied without staying in registers.
template <MatrixBwdSpec spec, MatrixBwdTile tile>
struct BlockCopy {
  using C = Config<spec, tile>;
  const Job& job;
  int32_t i_head, first;

  FMHA_DEVICE BlockCopy(const MatrixBwdParams&, const Job& job) : job(job) {}

  FMHA_DEVICE void issue(const MatrixBwdParams&, int32_t head_of_group, int32_t block) {
    i_head = job.first_head + head_of_group;
    first = block * tile.columns;
  }
  FMHA_DEVICE void store(typename C::Stage& stage) const {
    const MatrixBwdParams& params = reload_params<MatrixBwdParams>();
    const FwdParams& p = params.bwd.fwd;
    const int32_t qk = params.head_dim_qk, v = params.head_dim_v;
    if constexpr (C::queries_own) {
      stage.score.copy(key_rows(p.k, job, first, qk));
      stage.value.copy(key_rows(p.v, job, first, v));
    } else {
      stage.score.copy(query_rows(p.q, job, i_head, first, qk));
      stage.value.copy(query_rows(params.bwd.dout, job, i_head, first, v));
      const int thread = opaque_thread_idx(), row = thread % tile.columns;
      if (thread >= 2 * tile.columns) return;
      // LSE and delta exist for whole blocks of 32 queries; later blocks of a tile are beyond the lengths, and are
      // skipped.
      const int32_t query = min(first + row, int32_t(params.bwd.stats_batch) - 1);
      const int64_t at = stats_offset(params.bwd, job.span, i_head, query);
      if (thread < tile.columns) stage.stats.lse_log2[row] = params.bwd.lse_log2[at];
      else stage.stats.delta[row] = params.bwd.delta[at];
    }
  }
};

template <MatrixBwdSpec kSpec, MatrixBwdTile kTile>
struct OnWmma {
  static constexpr MatrixBwdSpec spec = kSpec;
  static constexpr MatrixBwdTile tile = kTile;
  using C = Config<spec, tile>;
  using Acc = rdna::Acc;
  using Load = BlockCopy<spec, tile>;

  static constexpr int edge = kEdge;  // own rows of a wave, and elements of their gradients in an accumulator
  static constexpr int acc_elems = kAccElems;
  static constexpr float p_scale = 1.f;

  static FMHA_DEVICE int lane_col(int thread) { return rdna::lane_col(thread); }
  static FMHA_DEVICE int lane_half(int thread) { return rdna::lane_half(thread); }
  // Row of register `i` within a block that the loop visits.
  static FMHA_DEVICE constexpr int walked_row(int i, int half) {
    return i / kAccElems * kEdge + acc_row(i % kAccElems, half);
  }

  // Brings an accumulator of sums into runs of four adjacent elements; the function below says where they lie.
  static FMHA_DEVICE Array<float, kAccElems> in_runs(const Acc& acc) { return rows_in_order(acc); }
  static FMHA_DEVICE constexpr int row_of_run(int i, int half) { return 8 * half + i; }
  template <DType dtype>
  static FMHA_DEVICE void store_run(uint8_t* to, float a, float b, float c, float d) {
    rdna::store_run<dtype>(to, a, b, c, d);
  }
  template <DType dtype>
  static FMHA_DEVICE void store_elem(uint8_t* to, float x) {
    fmha::store_elem<dtype>(to, 0, x);
  }

  using Tanh = ExactTanh;

  // Empty type: a lane's addresses are computed where they are used.
  struct Lanes {
    FMHA_DEVICE void find() {}
    FMHA_DEVICE Nothing score() const { return {}; }
    FMHA_DEVICE Nothing value() const { return {}; }
  };

  // Reads `elems` elements of an owned row as `words` words of an operand per lane, in the form that the forward's code
  // takes.
  template <int elems, int words>
  struct OwnRead : rdna::Config<kRowsSpec<spec.dtype, elems>, kRowsTile<tile>> {
    static constexpr int q_words = words;
  };
  template <int elems, int words>
  static FMHA_DEVICE void read_own(Array<Vec<uint32_t, words>, elems / kEdge>& to, const Rows& rows) {
    load_q<kRowsSpec<spec.dtype, elems>, kRowsTile<tile>, OwnRead<elems, words>>(to, rows,
                                                                                 lane_col(opaque_thread_idx()));
  }

  // The row that a lane owns, as the B operand of scores or of dP.
  template <int dim, bool keeps>
  struct Own {
    Array<HalfOperand<spec.dtype>, dim / kEdge> halves;
    FMHA_DEVICE void load(const Rows& rows) { read_own<dim, Fragment<spec.dtype>::half_words>(halves, rows); }
    FMHA_DEVICE Operand<spec.dtype> operand(int c) const { return joined<spec.dtype>(halves[c]); }
  };
  template <int dim>
  struct Own<dim, false> {
    Rows rows;
    FMHA_DEVICE void load(const Rows& from) { rows = from; }
    FMHA_DEVICE Operand<spec.dtype> operand(int c) const {
      Array<Operand<spec.dtype>, 1> x;
      // Whether the row has ended, and an element's place, are
      // recomputed each time: kept results would fill scalar registers.
      uint32_t num_elems = rows.num_elems, low = uint32_t(rows.elem_bytes), high = uint32_t(rows.elem_bytes >> 32);
      opaque_in_sgpr(num_elems);
      if constexpr (tile.load == LoadPath::Element) opaque_in_sgpr(low), opaque_in_sgpr(high);
      const int64_t elem_bytes = tile.load == LoadPath::Element ? int64_t(uint64_t(high) << 32 | low) : kElemBytes;
      const int32_t elem = c * kEdge;
      read_own<kEdge, Fragment<spec.dtype>::words>(x, {rows.data + elem * elem_bytes, rows.row_bytes, elem_bytes, rows.num_rows,
                          int32_t(num_elems) - elem});
      return x[0];
    }
  };
  using OwnScore = Own<spec.head_dim_qk, C::keeps_score>;
  using OwnValue = Own<spec.head_dim_v, C::keeps_value>;
  template <int dim, bool keeps>
  static FMHA_DEVICE void load_own(Own<dim, keeps>& own, const TensorRows& rows) {
    own.load({rows.data, rows.row_bytes, rows.elem_bytes, rows.num_rows, rows.num_elems});
  }

  template <class Matrix, int dim, bool keeps>
  static FMHA_DEVICE PairValues product(const Matrix& walked, Nothing, int b, const Own<dim, keeps>& own) {
    const int lane = walked.rows.lane_offset(opaque_thread_idx());
    Acc x[2] = {};
#pragma unroll
    for (int c = 0; c < dim / kEdge; ++c) {
      const Operand<spec.dtype> of_own = own.operand(c);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        x[n] = mma<spec.dtype>(walked.rows.template operand<spec.dtype>(lane, 2 * b + n, c), of_own, x[n]);
      // The asm keeps products in place: otherwise they are moved after the
      // branches of the next loads, or on the mask, and all operands stay live.
      if (!keeps || c == dim / kEdge - 1) opaque_in_vgpr(x[0]), opaque_in_vgpr(x[1]);
      // Keeps the compiler from reading all operands ahead, for which there are not enough registers.
      if (!keeps || c % 2 == 1) sched_barrier();
    }
    return __builtin_shufflevector(x[0], x[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }

  // Adds to `sums` the visited rows of block `b`, transposed, times P or dS.
  template <class Matrix, int blocks>
  static FMHA_DEVICE void add_to(Array<Acc, blocks>& sums, const Matrix& walked, Nothing, int b, const PairValues& x) {
    const int lane = walked.columns.lane_offset(opaque_thread_idx());
    const Acc halves[2] = {__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const Operand<spec.dtype> operand = joined<spec.dtype>(packed_p<spec.dtype>(halves[n]));
#pragma unroll
      for (int d = 0; d < blocks; ++d) {
        sums[d] = mma<spec.dtype>(walked.columns.template operand<spec.dtype>(lane, d, 2 * b + n), operand, sums[d]);
        if (d % 2 == 1) sched_barrier();
      }
    }
  }

  // LSE and delta of a block's queries, read where they are used.
  struct BlockStats {
    const WalkedStats<tile.columns>& stats;
    int first;
    FMHA_DEVICE float lse_log2(int i) const { return stats.lse_log2[first + walked_row(i, 0)]; }
    FMHA_DEVICE float delta(int i) const { return stats.delta[first + walked_row(i, 0)]; }

    static FMHA_DEVICE BlockStats of(const WalkedStats<tile.columns>& stats, int b, int half) {
      return {stats, b * kBlockRows + walked_row(0, half)};
    }
  };
};

}  // namespace fmha::rdna::bwd
