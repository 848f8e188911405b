// Loads tiles from global memory to registers and stores them to LDS: K keeps its layout, V is transposed, so that both
// products read their operands as 16-byte fragments.
#pragma once
#include <fmha/cdna/config.h>
#include <fmha/isa/buffer.h>
#include <fmha/isa/sched.h>

namespace fmha::cdna {

// Rows of a matrix in global memory. Reads outside of them, or beyond the first `row_bytes` of a row, return 0 and
// touch no memory. At most 2^31 bytes can be addressed.
struct Rows {
  const uint8_t* data;
  int64_t stride_bytes;
  int32_t num_rows;
  int32_t row_bytes;
};

// Size for a buffer descriptor that ends with the last of `rows`.
FMHA_DEVICE int32_t described_bytes(const Rows& rows) {
  constexpr int64_t kMost = 0x7fffffff;
  return rows.num_rows > 0 ? int32_t(min((rows.num_rows - 1) * rows.stride_bytes + rows.row_bytes, kMost)) : 0;
}

template <int words>
using Words = Array<uint32_t, words>;

// Reads `words` dwords at (row, byte) through a descriptor. Rows start and end on dwords.
template <int words, bool whole_reads>
class VectorReader {
 public:
  FMHA_DEVICE explicit VectorReader(const Rows& rows)
      : from_(buffer_descriptor(rows.data, described_bytes(rows))),
        stride_bytes_(int32_t(rows.stride_bytes)),
        row_bytes_(rows.row_bytes) {}

  // Byte offset of a position in a row; `rows` rows further down add as many strides, also to the out-of-range mark.
  static FMHA_DEVICE int32_t place(const Rows& rows, int32_t row, int32_t byte) {
    return byte < rows.row_bytes ? row * int32_t(rows.stride_bytes) + byte : kOutOfRange;
  }
  static FMHA_DEVICE int32_t below(const Rows& rows, int32_t num_rows) { return num_rows * int32_t(rows.stride_bytes); }

  FMHA_DEVICE Words<words> read(int32_t row, int32_t byte) const {
    return read_below(byte < row_bytes_ ? row * stride_bytes_ + byte : kOutOfRange, 0, byte);
  }

  FMHA_DEVICE Words<words> read_below(int32_t place, int32_t rows, int32_t byte) const {
    const int32_t offset = place + rows * stride_bytes_;
    Words<words> x;
    if constexpr (words == 4) {
      const u32x4 loaded = buffer_load_dwordx4(from_, offset);
#pragma unroll
      for (int w = 0; w < 4; ++w) x[w] = loaded[w];
    } else if constexpr (words == 2) {
      const u32x2 loaded = buffer_load_dwordx2(from_, offset);
      x[0] = loaded[0], x[1] = loaded[1];
    } else {
      x[0] = buffer_load_dword(from_, offset);
    }
    if constexpr (!whole_reads) {
      // The dwords beyond this row's end belong to the next row and may hold NaN.
#pragma unroll
      for (int w = 1; w < words; ++w) x[w] = byte + 4 * w < row_bytes_ ? x[w] : 0;
    }
    return x;
  }

#if defined(__gfx950__)
  // Loads 16 bytes a lane to LDS, from address `to` on. Rows end at multiples of 16 bytes.
  FMHA_DEVICE void read_to_lds(int32_t place, int32_t rows, uint32_t to) const {
    buffer_load_dwordx4_lds(from_, place + rows * stride_bytes_, to);
  }
#endif

 private:
  BufferDescriptor from_;
  int32_t stride_bytes_, row_bytes_;
};

// Reader of rows that end inside a dword: it reads element by element.
template <int words, int elem_bytes>
class TailReader {
 public:
  FMHA_DEVICE explicit TailReader(const Rows& rows)
      : from_(buffer_descriptor(rows.data, described_bytes(rows))),
        stride_bytes_(int32_t(rows.stride_bytes)),
        row_bytes_(rows.row_bytes) {}

  FMHA_DEVICE Words<words> read(int32_t row, int32_t byte) const {
    Words<words> x;
#pragma unroll
    for (int w = 0; w < words; ++w) {
      x[w] = 0;
#pragma unroll
      for (int b = 0; b < 4; b += elem_bytes) {
        const int32_t at = byte + 4 * w + b;
        const int32_t offset = at < row_bytes_ ? row * stride_bytes_ + at : kOutOfRange;
        x[w] |= (elem_bytes == 1 ? buffer_load_ubyte(from_, offset) : buffer_load_ushort(from_, offset)) << (8 * b);
      }
    }
    return x;
  }

 private:
  BufferDescriptor from_;
  int32_t stride_bytes_, row_bytes_;
};

FMHA_DEVICE Frag frag_of(const Words<4>& x) { return Frag{x[0], x[1], x[2], x[3]}; }

// Q of one wave: each lane's query, in fragments.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void load_q(Array<Frag, Config<spec, tile>::qk_steps>& q, Rows rows, int32_t row) {
  using C = Config<spec, tile>;
  using Reader = VectorReader<4, tile.load == LoadPath::Chunks>;
  const Reader reader(rows);
  const int half = lane_half(opaque_thread_idx());
#pragma unroll
  for (int c = 0; c < C::qk_steps; ++c) {
    q[c] = frag_of(reader.read(row, c * kStepBytes + half * kFragBytes));
  }
}

// A K tile in flight: loaded by all threads, 16 bytes at a time. Loads and stores are split into parts that the main
// loop interleaves with matrix instructions.
template <CdnaSpec spec, CdnaTile tile>
class KLoad {
  using C = Config<spec, tile>;
  static constexpr int chunks_per_row = C::qk_steps * 2;
  static constexpr int num_chunks = tile.block_n * chunks_per_row;
  static constexpr int per_thread = ceil_div(num_chunks, C::num_threads);
  using Reader = VectorReader<4, tile.load == LoadPath::Chunks>;

 public:
  static constexpr int issue_parts = per_thread, store_parts = per_thread;

  template <int part>
  FMHA_DEVICE void issue(const Rows& rows, typename C::KMatrix&, uint32_t) {
    const Reader reader(rows);
    const int id = part * C::num_threads + thread_idx();
    const int byte = id % chunks_per_row * kFragBytes;
    // If parts are not adjacent, the thread's position differs from part to part, and from_ holds only the tile's
    // offset.
    chunk_[part] = adjacent ? reader.read_below(from_, part * rows_per_part, byte)
                            : reader.read_below(Reader::place(rows, id / chunks_per_row, byte) + from_, 0, byte);
  }

  FMHA_DEVICE void store(typename C::KMatrix& k, int part) const {
    const int id = part * C::num_threads + thread_idx();
    if (num_chunks % C::num_threads != 0 && id >= num_chunks) return;
    const int at = adjacent ? k.below(place_, part * rows_per_part)
                            : k.offset(id / chunks_per_row, id % chunks_per_row);
    *reinterpret_cast<Frag*>(&k.bytes[at]) = frag_of(chunk_[part]);
  }

  // Computes addresses once, before the first load: all tiles have the strides of `rows`.
  FMHA_DEVICE void find_addresses(const Rows& rows) {
    const int thread = opaque_thread_idx(), row = thread / chunks_per_row, chunk = thread % chunks_per_row;
    from_ = adjacent ? Reader::place(rows, row, chunk * kFragBytes) : 0;
    place_ = C::KMatrix::offset(row, chunk);
  }

  // Moves the addresses by `tiles` whole tiles, forwards or backwards.
  FMHA_DEVICE void move(const Rows& rows, int32_t tiles) { from_ += Reader::below(rows, tiles * tile.block_n); }

  // Called in every step, so that the compiler recomputes dependent values instead of keeping registers.
  FMHA_DEVICE void rematerialise_addresses() { opaque_in_vgpr(from_), opaque_in_vgpr(place_); }

 private:
  // Each part lies a whole number of rows below the previous one, and their row numbers have no bit in common.
  static constexpr int rows_per_part = C::num_threads / chunks_per_row;
  static constexpr bool adjacent = is_power_of_two(C::num_threads) && is_power_of_two(chunks_per_row);

  Words<4> chunk_[per_thread];
  int32_t from_;
  int place_;
};

// Packs element j of each of four rows: a column of a 4 x n tile of elements of `elem_bytes` bytes.
template <int elem_bytes, int words>
FMHA_DEVICE Words<elem_bytes> column_of(const Words<words> (&rows)[kRun], int j) {
  if constexpr (elem_bytes == 2) {
    const uint32_t halves = j % 2 ? 0x07060302 : 0x05040100;
    return {{v_perm_b32(rows[1][j / 2], rows[0][j / 2], halves), v_perm_b32(rows[3][j / 2], rows[2][j / 2], halves)}};
  } else {
    // The words hold columns j and j + 1 of two rows each. The next call computes the same words, and the compiler
    // shares the work.
    const uint32_t two_columns = j % 4 < 2 ? 0x05010400 : 0x07030602, halves = j % 2 ? 0x07060302 : 0x05040100;
    const uint32_t upper = v_perm_b32(rows[1][j / 4], rows[0][j / 4], two_columns);
    const uint32_t lower = v_perm_b32(rows[3][j / 4], rows[2][j / 4], two_columns);
    return {{v_perm_b32(lower, upper, halves)}};
  }
}

template <int elem_bytes, class Matrix>
FMHA_DEVICE void store_run(Matrix& v, int place, Words<elem_bytes> run) {
  uint8_t* to = &v.bytes[place];
  if constexpr (elem_bytes == 2) {
    *reinterpret_cast<u32x2*>(to) = u32x2{run[0], run[1]};
  } else {
    *reinterpret_cast<uint32_t*>(to) = run[0];
  }
}

template <CdnaSpec spec, CdnaTile tile, VLayout layout = spec.v_layout>
class VLoad;

// V `[key, dim]`: a thread reads a piece of four adjacent keys and writes its columns.
template <CdnaSpec spec, CdnaTile tile>
class VLoad<spec, tile, VLayout::RowMajor> {
  using C = Config<spec, tile>;
  static constexpr int num_runs = tile.block_n / kRun;

  static constexpr int words = C::v_piece_words, dims = C::v_piece_dims;
  static constexpr int pieces_per_row = spec.head_dim_v / dims;
  static constexpr int num_pieces = C::num_v_pieces(words);
  static constexpr int per_thread = ceil_div(num_pieces, C::num_threads);
  using Reader = VectorReader<words, tile.load == LoadPath::Chunks>;

 public:
  static constexpr int issue_parts = per_thread * kRun, store_parts = per_thread * dims;

  template <int part>
  FMHA_DEVICE void issue(const Rows& rows, typename C::VMatrix&, uint32_t) {
    const Reader reader(rows);
    constexpr int c = part / kRun, r = part % kRun;
    piece_[c][r] = reader.read_below(from_[c], r, piece(c).i_piece * 4 * words);
  }

  FMHA_DEVICE void store(typename C::VMatrix& v, int part) const {
    const int c = part / dims, j = part % dims;
    if (num_pieces % C::num_threads != 0 && c * C::num_threads + thread_idx() >= num_pieces) return;
    store_run<C::v_bytes>(v, v.below(place_[c], j), column_of<C::v_bytes>(piece_[c], j));
  }

  // Finds the addresses of rows in the way that KLoad does.
  FMHA_DEVICE void find_addresses(const Rows& rows) {
    const int thread = opaque_thread_idx();
#pragma unroll
    for (int c = 0; c < per_thread; ++c) {
      const Piece at = piece(c, thread);
      from_[c] = Reader::place(rows, at.first_key, at.i_piece * 4 * words);
      place_[c] = C::VMatrix::place_of_run(at.i_piece * dims, at.i_run);
    }
  }

  FMHA_DEVICE void move(const Rows& rows, int32_t tiles) {
#pragma unroll
    for (int c = 0; c < per_thread; ++c) from_[c] += Reader::below(rows, tiles * tile.block_n);
  }

  FMHA_DEVICE void rematerialise_addresses() {
#pragma unroll
    for (int c = 0; c < per_thread; ++c) opaque_in_vgpr(from_[c]), opaque_in_vgpr(place_[c]);
  }

 private:
  struct Piece {
    int i_run, first_key, i_piece;
  };

  // A group of lanes reads adjacent pieces of a row, the next group the keys whose runs share a
  // 16-byte chunk with these. A wave has as many of a chunk's runs as still allow whole memory lines.
  static constexpr int group = min(8, pieces_per_row & -pieces_per_row), groups_per_row = pieces_per_row / group;
  static constexpr int runs_of_chunk = kFragBytes / kRun / C::v_bytes, runs_of_lines = kWaveSize * words / 32;
  static constexpr int runs = C::VMatrix::swaps_halves ? min(runs_of_chunk, runs_of_lines) : runs_of_chunk;
  // Groups that fill a line of LDS are adjacent. The rest of a row comes last, each group with adjacent chunks.
  static constexpr int groups_of_line = ceil_div(kChunksPerBankRow, group);
  static constexpr int in_sets = groups_per_row / groups_of_line * groups_of_line, chunks = num_runs / runs;

  static FMHA_DEVICE Piece piece(int c, int thread = thread_idx()) {
    const int id = c * C::num_threads + thread;
    const int rest = id / (group * runs), left_over = rest - in_sets * chunks;
    const bool is_in_set = in_sets > 0 && left_over < 0;
    const int i_group = is_in_set ? rest % max(in_sets, 1) : in_sets + left_over / chunks;
    const int i_chunk = is_in_set ? rest / max(in_sets, 1) : left_over % chunks;
    const int i_run = id / group % runs + i_chunk * runs;
    return {i_run, KeyOrder<C::v_bytes>::first_key(i_run), id % group + i_group * group};
  }

  Words<words> piece_[per_thread][kRun];
  int32_t from_[per_thread];
  int place_[per_thread];  // of the first column of a piece; `dims` is a power of two, the others lie below
};

// Column-major V `[dim, key]` needs no transposition; only the keys are reordered.
template <CdnaSpec spec, CdnaTile tile>
class VLoad<spec, tile, VLayout::ColMajor> {
  using C = Config<spec, tile>;
  static constexpr int keys = kFragBytes / C::v_bytes;
  static constexpr int chunks_per_row = tile.block_n / keys;
  static constexpr int num_chunks = spec.head_dim_v * chunks_per_row;
  static constexpr int per_thread = ceil_div(num_chunks, C::num_threads);

 public:
  static constexpr int issue_parts = 1, store_parts = per_thread;

  // The last tile may end inside a dword, so it is read element by element.
  template <int>
  FMHA_DEVICE void issue(Rows rows, typename C::VMatrix&, uint32_t) {
    if (rows.row_bytes >= tile.block_n * C::v_bytes) {
      rows.row_bytes = tile.block_n * C::v_bytes;
      issue_with<VectorReader<4, true>>(rows);
    } else {
      issue_with<TailReader<4, C::v_bytes>>(rows);
    }
  }

  FMHA_DEVICE void store(typename C::VMatrix& v, int part) const {
    const int id = part * C::num_threads + thread_idx();
    if (num_chunks % C::num_threads != 0 && id >= num_chunks) return;
    const Words<4>& x = chunk_[part];
    const int first_key = id % chunks_per_row * keys;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Keys of a row that one half of a wave has: 8 bytes that lie together in KeyOrder.
      const int i_run = KeyOrder<C::v_bytes>::run_of(first_key + half * kRun);
      const int place = C::VMatrix::place_of_run(id / chunks_per_row, i_run);
      *reinterpret_cast<u32x2*>(&v.bytes[place]) =
          C::v_bytes == 2 ? u32x2{x[2 * half], x[2 * half + 1]} : u32x2{x[half], x[half + 2]};
    }
  }

  FMHA_DEVICE void find_addresses(const Rows&) {}
  FMHA_DEVICE void move(const Rows&, int32_t) {}
  FMHA_DEVICE void rematerialise_addresses() {}

 private:
  template <class Reader>
  FMHA_DEVICE void issue_with(Rows rows) {
    const Reader reader(rows);
#pragma unroll
    for (int c = 0; c < per_thread; ++c) {
      const int id = c * C::num_threads + thread_idx();
      chunk_[c] = reader.read(id / chunks_per_row, id % chunks_per_row * kFragBytes);
    }
  }

  Words<4> chunk_[per_thread];
};

}  // namespace fmha::cdna
