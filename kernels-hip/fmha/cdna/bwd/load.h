// Loads of walked rows through registers to LDS, and of own rows to the registers in which they stay.
#pragma once
#include <fmha/cdna/bwd/config.h>
#include <fmha/cdna/load.h>

namespace fmha::cdna::bwd {

// Reads 16 bytes at (row, byte) of a tensor's rows; bytes outside are 0.
template <LoadPath load>
class Reader {
 public:
  FMHA_DEVICE explicit Reader(const TensorRows& rows)
      : reader_(fmha::cdna::Rows{rows.data, rows.row_bytes, max(rows.num_rows, 0), rows.num_elems * kElemBytes}) {}
  FMHA_DEVICE Frag read(int32_t row, int32_t byte) const { return frag_of(reader_.read(row, byte)); }

 private:
  VectorReader<4, load == LoadPath::Chunks> reader_;
};

template <>
class Reader<LoadPath::Element> {
 public:
  FMHA_DEVICE explicit Reader(const TensorRows& rows) : rows_(rows) {}
  FMHA_DEVICE Frag read(int32_t row, int32_t byte) const {
    Frag x;
#pragma unroll
    for (int w = 0; w < 4; ++w) x[w] = elem(row, byte / 2 + 2 * w) | elem(row, byte / 2 + 2 * w + 1) << 16;
    return x;
  }

 private:
  FMHA_DEVICE uint32_t elem(int32_t row, int32_t at) const {
    if (row >= rows_.num_rows || at >= rows_.num_elems) return 0;
    return *reinterpret_cast<const uint16_t*>(rows_.data + row * rows_.row_bytes + at * rows_.elem_bytes);
  }
  TensorRows rows_;
};

// Loads the rows that a wave owns: each lane's row becomes the B operand of scores or of dP.
template <LoadPath load, int steps>
FMHA_DEVICE void load_own(Array<Frag, steps>& own, const TensorRows& rows) {
  const Reader<load> reader(rows);
  const int thread = opaque_thread_idx();
#pragma unroll
  for (int c = 0; c < steps; ++c) {
    own[c] = reader.read(lane_col(thread), c * kStepBytes + lane_half(thread) * kFragBytes);
  }
}

// A block of walked rows whose loads are in flight. `threads` threads load it, each in pieces of 16 bytes of four
// adjacent rows.
template <int dim, int columns, int threads, LoadPath load>
class WalkedLoad {
  static constexpr int num_runs = columns / kRun, pieces_per_row = dim * kElemBytes / kFragBytes;
  static constexpr int num_pieces = num_runs * pieces_per_row;
  static constexpr int elems = kFragBytes / kElemBytes;
  static constexpr int group = min(8, pieces_per_row), groups_per_row = pieces_per_row / group;
  static_assert(pieces_per_row % group == 0, "rows are padded to whole lines of banks");
  static constexpr int runs_of_chunk = kFragBytes / kRun / kElemBytes;

 public:
  static constexpr int per_thread = ceil_div(num_pieces, threads);

  FMHA_DEVICE void issue(const TensorRows& rows, int thread) {
    const Reader<load> reader(rows);
#pragma unroll
    for (int c = 0; c < per_thread; ++c) {
      const Piece at = piece(c * threads + thread);
#pragma unroll
      for (int r = 0; r < kRun; ++r) piece_[c][r] = reader.read(at.first_row + r, at.i_chunk * kFragBytes);
    }
  }

  template <class Matrix>
  FMHA_DEVICE void store(Matrix& to, int thread) const {
#pragma unroll
    for (int c = 0; c < per_thread; ++c) {
      const int id = c * threads + thread;
      if (num_pieces % threads != 0 && id >= num_pieces) return;
      const Piece at = piece(id);
      if constexpr (Matrix::has_rows) {
#pragma unroll
        for (int r = 0; r < kRun; ++r) {
          *reinterpret_cast<Frag*>(&to.rows.bytes[to.rows.offset(at.first_row + r, at.i_chunk)]) = piece_[c][r];
        }
      }
      if constexpr (Matrix::has_columns) {
        const int place = Matrix::Columns::place_of_run(at.i_chunk * elems, at.i_run);
        Words<4> rows[kRun];
#pragma unroll
        for (int r = 0; r < kRun; ++r) rows[r] = {{piece_[c][r][0], piece_[c][r][1], piece_[c][r][2], piece_[c][r][3]}};
#pragma unroll
        for (int j = 0; j < elems; ++j) {
          store_run<kElemBytes>(to.columns, to.columns.below(place, j), column_of<kElemBytes>(rows, j));
        }
      }
    }
  }

 private:
  struct Piece {
    int i_run, first_row, i_chunk;
  };

  // A group of lanes reads a line of a row; the next group reads the rows whose runs share a 16-byte
  // chunk of a column with these. Lanes that write to LDS at once then touch every bank once.
  static FMHA_DEVICE Piece piece(int id) {
    const int rest = id / (group * runs_of_chunk);
    const int i_run = id / group % runs_of_chunk + rest / groups_per_row * runs_of_chunk;
    return {i_run, KeyOrder<kElemBytes>::first_key(i_run), id % group + rest % groups_per_row * group};
  }

  Frag piece_[per_thread][kRun];
};

// Which walked rows a thread loads: the first half of the waves load the operand of scores, the second half that of dP.
template <MatrixBwdSpec spec, MatrixBwdTile tile>
struct BlockLoad {
  using C = Config<spec, tile>;
  static constexpr int threads = C::num_threads / 2;
  // Whether the rows of both operands have equal lengths; they are then loaded without a branch.
  static constexpr bool alike = spec.head_dim_qk == spec.head_dim_v;
  using ScoreLoad = WalkedLoad<spec.head_dim_qk, tile.columns, threads, tile.load>;
  using ValueLoad = WalkedLoad<spec.head_dim_v, tile.columns, threads, tile.load>;
  ScoreLoad score;
  ValueLoad value;
  bool loads_score, loads_stats;
  int thread;
  float stat;  // LSE of a walked query by one half of the threads that load them, delta by the other

  TensorRows rows;  // of the first head, from the sequence's first row on
  int64_t head_bytes;
  const float* stats;  // LSE or delta of them

  FMHA_DEVICE BlockLoad(const MatrixBwdParams& params, const Job& job) {
    const int thread_of_group = opaque_thread_idx(), i_wave = v_readfirstlane_b32(thread_of_group / kWaveSize);
    thread = thread_of_group % threads;
    loads_score = i_wave < C::num_waves / 2;
    loads_stats = !C::queries_own && i_wave < 2 * tile.columns / kWaveSize;
    const FwdParams& p = params.bwd.fwd;
    const int32_t dim = loads_score ? params.head_dim_qk : params.head_dim_v;
    if constexpr (C::queries_own) {
      rows = key_rows(loads_score ? p.k : p.v, job, 0, dim);
      head_bytes = 0;
    } else {
      const View& view = loads_score ? p.q : params.bwd.dout;
      rows = query_rows(view, job, job.first_head, 0, dim);
      head_bytes = view.head * kElemBytes;
      stats = (thread < tile.columns ? params.bwd.lse_log2 : params.bwd.delta) +
              stats_offset(params.bwd, job.span, job.first_head, 0);
    }
  }

  // Starts the loads of block `block` of the `i_head`-th head.
  FMHA_DEVICE void issue(const MatrixBwdParams& params, int32_t i_head, int32_t block) {
    const int32_t first = block * tile.columns;
    TensorRows from = rows;
    from.data += i_head * head_bytes;
    from = from.from(first);
    if (alike || loads_score) score.issue(from, thread);
    else value.issue(from, thread);
    if constexpr (!C::queries_own) {
      // LSE and delta exist for whole blocks of 32 queries; later
      // blocks of a tile are beyond the lengths, and skipped.
      const int32_t query = min(first + thread % tile.columns, int32_t(params.bwd.stats_batch) - 1);
      if (loads_stats) stat = stats[i_head * params.bwd.stats_head + query];
    }
  }
  FMHA_DEVICE void store(typename C::Stage& stage) const {
    if constexpr (alike && C::Score::has_rows == C::Value::has_rows && C::Score::has_columns == C::Value::has_columns) {
      score.store(loads_score ? stage.score : stage.value, thread);
    } else {
      if (loads_score) score.store(stage.score, thread);
      else if constexpr (alike) score.store(stage.value, thread);
      else value.store(stage.value, thread);
    }
    if constexpr (!C::queries_own) {
      if (loads_stats) (thread < tile.columns ? stage.stats.lse_log2 : stage.stats.delta)[thread % tile.columns] = stat;
    }
  }
};

}  // namespace fmha::cdna::bwd
