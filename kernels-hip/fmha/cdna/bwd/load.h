// Walked rows from memory to registers to LDS, and own rows from memory to the registers that keep them.
#pragma once
#include <fmha/cdna/bwd/config.h>
#include <fmha/cdna/load.h>

namespace fmha::cdna::bwd {

// Rows of a tensor, from one of a (sequence, head) on: element by element at any address and stride.
struct TensorRows {
  const uint8_t* data;
  int64_t row_bytes, elem_bytes;  // from row to row, from element to element of a row
  int32_t num_rows, num_elems;    // beyond: 0

  FMHA_DEVICE TensorRows from(int32_t row) const {
    return {data + row * row_bytes, row_bytes, elem_bytes, num_rows - row, num_elems};
  }
};

// What loads read through: 16 bytes at (row, byte), 0 outside.
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

// The own rows of a wave: its lane's row, as the B operand of scores or of dP.
template <LoadPath load, int steps>
FMHA_DEVICE void load_own(Array<Frag, steps>& own, const TensorRows& rows) {
  const Reader<load> reader(rows);
  const int thread = opaque_thread_idx();
#pragma unroll
  for (int c = 0; c < steps; ++c) {
    own[c] = reader.read(lane_col(thread), c * kStepBytes + lane_half(thread) * kFragBytes);
  }
}

// A block of walked rows in flight, loaded by `threads` threads of which this is number `thread`: pieces of four
// adjacent rows, 16 bytes of each.
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

  // A group of lanes reads a line of a row, the next group the rows whose runs share a 16-byte chunk of a column with
  // theirs: the lanes that write to LDS at once touch every bank once.
  static FMHA_DEVICE Piece piece(int id) {
    const int rest = id / (group * runs_of_chunk);
    const int i_run = id / group % runs_of_chunk + rest / groups_per_row * runs_of_chunk;
    return {i_run, KeyOrder<kElemBytes>::first_key(i_run), id % group + rest % groups_per_row * group};
  }

  Frag piece_[per_thread][kRun];
};

}  // namespace fmha::cdna::bwd
