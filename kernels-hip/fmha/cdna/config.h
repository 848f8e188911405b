// The CDNA forward kernel's choices and every number that follows from them.
#pragma once
#include <fmha/cdna/tile.h>
#include <fmha/isa/sched.h>
#include <fmha/mma/cdna.h>

namespace fmha::cdna {

FMHA_DEVICE constexpr bool is_power_of_two(int x) { return (x & (x - 1)) == 0; }

// Chunks of 16 bytes in a line of LDS, which is as wide as all banks: 32, or gfx950's 64.
constexpr int kLine = kArch == Arch::Gfx950 ? 16 : 8;

// As many low bits of `x` as number the chunks of a line, in reverse order.
FMHA_DEVICE constexpr int reversed(uint32_t x) {
  constexpr int low_bits = kLine == 16 ? 4 : 3;
  return int(__builtin_bitreverse32(x) >> (32 - low_bits));
}

// A matrix in LDS, rows of 16-byte chunks without gaps. kLine lanes meet all banks when they write adjacent chunks, or
// every other one of several rows, and when they read one column of chunks of adjacent rows. With `piece_rows`, they also
// do when they write one row each of pieces of so many rows: of 2^k adjacent pieces 2^-k of a line's chunks, for any k.
//
// For that each bit of a row's number flips one bit of its chunks' places in a line: the first ones do so of themselves
// where a row is shorter than a line, the others by an exchange of chunks. Pieces flip the places' bits in reverse
// order: more pieces take a line's halves, then its quarters, and more chunks what lies inside those.
template <int num_rows, int row_bytes, int piece_rows = 0>
struct LdsMatrix {
  static constexpr int turning_rows = max(kLine, piece_rows * kLine);
  static constexpr int chunks = row_bytes / kFragBytes;
  static constexpr int in_step = min(chunks & -chunks, kLine);  // with lines: so many chunks of a row never part
  static constexpr int rows_per_line = kLine / in_step;
  // Chunks are exchanged in lines; in parts of them where a row may end inside a line.
  static constexpr int exchanged = is_power_of_two(chunks) ? kLine : in_step;
  static_assert(is_power_of_two(chunks) || piece_rows == 0, "such rows are exchanged in themselves alone");

  alignas(16) uint8_t bytes[num_rows * row_bytes];

  static FMHA_DEVICE constexpr int turn(int row) {
    if constexpr (piece_rows == 0) return row % kLine / rows_per_line;
    const uint32_t exchanging = uint32_t(row) & -uint32_t(rows_per_line);
    return reversed(exchanging ^ exchanging / piece_rows);
  }

  // The chunk of a row that stands at place `chunk` of it, where none leaves its row.
  static FMHA_DEVICE constexpr int chunk_at(int row, int chunk) {
    static_assert(piece_rows == 0, "chunks are exchanged between rows");
    return chunk ^ turn(row);
  }

  static FMHA_DEVICE constexpr int offset(int row, int chunk) {
    return ((row * chunks + chunk) ^ turn(row)) * kFragBytes;
  }

  // The place `rows` rows below the one at `at`, where `rows` shares no bit with its row. What is not exchanged is an
  // addition, which costs no instruction.
  static FMHA_DEVICE int below(int at, int rows) {
    const int part = exchanged_part(rows, 0);
    return (at ^ part) + (offset(rows, 0) - part);
  }

  // Where this lane's fragments begin. They serve all steps and blocks but for constants: the compiler is
  // kept from making a register of each.
  using LaneAddresses = Array<int, exchanged>;
  static FMHA_DEVICE LaneAddresses lane_addresses() {
    constexpr uint32_t used = exchanged_parts();
    const int thread = thread_idx_here(), from = offset(lane_col(thread), lane_half(thread));
    LaneAddresses at;
#pragma unroll
    for (int x = 0; x < exchanged; ++x) {
      if ((used >> x & 1) == 0) continue;
      at[x] = from ^ x * kFragBytes;
      computed_here(at[x]);
    }
    return at;
  }

  // This lane's fragment of step `c` of rows 32 * block ...
  FMHA_DEVICE Frag frag(const LaneAddresses& lane, int block, int c) const {
    const int part = exchanged_part(block * kEdge, 2 * c);
    return *reinterpret_cast<const Frag*>(&bytes[lane[part / kFragBytes] + (offset(block * kEdge, 2 * c) - part)]);
  }

 private:
  static FMHA_DEVICE constexpr int exchanged_part(int row, int chunk) {
    return offset(row, chunk) % (exchanged * kFragBytes);
  }

  // Bit x: whether some fragment has a part of x chunks.
  static FMHA_DEVICE constexpr uint32_t exchanged_parts() {
    uint32_t parts = 0;
    for (int block = 0; block < num_rows / kEdge; ++block) {
      for (int c = 0; c < chunks / 2; ++c) parts |= 1u << exchanged_part(block * kEdge, 2 * c) / kFragBytes;
    }
    return parts;
  }
};

// V transposed as it is written, keys along rows in KeyOrder, `piece_rows` rows a lane.
template <int head_dim, int num_keys, int elem_bytes, int piece_rows>
struct TransposedOnWriting : LdsMatrix<head_dim, num_keys * elem_bytes, piece_rows> {
  using Matrix = LdsMatrix<head_dim, num_keys * elem_bytes, piece_rows>;

  // A run of one-byte keys is a quarter of a chunk, and a wave that reads whole lines of memory may have no more than
  // two of the four. So every other block of rows has the halves of its chunks exchanged: two blocks' runs meet all
  // banks. It costs nothing where a matrix instruction takes half a fragment; gfx950's takes two whole ones.
  static constexpr bool exchanges_halves = elem_bytes == 1 && kArch != Arch::Gfx950;

  // Of four keys of row `d`.
  static FMHA_DEVICE constexpr int place_of_run(int d, int i_run) {
    const int byte = i_run * kRun * elem_bytes;
    const int half = exchanges_halves && d / kEdge % 2 ? kFragBytes / 2 : 0;
    return Matrix::offset(d, byte / kFragBytes) + (byte % kFragBytes ^ half);
  }

  FMHA_DEVICE Frag frag(const typename Matrix::LaneAddresses& lane, int block, int step) const {
    const Frag x = Matrix::frag(lane, block, step);
    return exchanges_halves && block % 2 ? Frag{x[2], x[3], x[0], x[1]} : x;
  }
};

#if defined(__gfx950__)
// V in LDS as it lies in memory, keys along rows, read transposed: a 16-byte fragment of 32 columns is two
// reads of 8 bytes a lane, each of four rows (of one-byte elements eight) a half of the wave. Blocks of 32 elements
// are exchanged inside a row, so that the rows that 32 lanes read at once meet all 64 banks.
template <int num_keys, int row_bytes, int elem_bytes>
struct TransposedOnReading {
  static constexpr int chunks = row_bytes / kFragBytes;
  static constexpr int block_bytes = kEdge * elem_bytes;  // of a row, a fragment's
  static constexpr int chunks_per_block = block_bytes / kFragBytes;
  static constexpr int rows_at_once = 8 / elem_bytes;
  static constexpr int period = row_bytes / block_bytes < rows_at_once ? row_bytes / block_bytes : rows_at_once;
  static constexpr int turning_rows = elem_bytes == 1 ? 4 * kRun : kRun;

  alignas(16) uint8_t bytes[num_keys * row_bytes];

  // Row n of those that a half of the wave reads at once: one run of keys, or two that are adjacent in KeyOrder.
  static FMHA_DEVICE constexpr int key_of(int n) { return n % kRun + n / kRun * 2 * kRun; }
  static FMHA_DEVICE constexpr int turn(int key) {
    const int n = key % kRun + key / (2 * kRun) % 2 * kRun % rows_at_once;
    return n / (rows_at_once / period);
  }
  static FMHA_DEVICE constexpr int chunk_at(int key, int chunk) { return chunk ^ turn(key) * chunks_per_block; }

  // Of this lane's bytes in each of the blocks that are exchanged.
  using LaneAddresses = Array<int, period>;
  static FMHA_DEVICE LaneAddresses lane_addresses() {
    constexpr int lanes_per_row = 2 * elem_bytes;
    const int thread = thread_idx_here(), lane = thread % 16;
    const int key = lane_half(thread) * kRun + key_of(lane / lanes_per_row);
    LaneAddresses at;
#pragma unroll
    for (int x = 0; x < period; ++x) {
      at[x] = key * row_bytes + (x ^ turn(key)) * block_bytes + thread / 16 % 2 * (block_bytes / 2) +
              lane % lanes_per_row * 8;
      computed_here(at[x]);
    }
    return at;
  }

  // Columns 32 * d ... of keys kStepBytes / elem_bytes * step ..., in KeyOrder.
  FMHA_DEVICE Frag frag(const LaneAddresses& lane, int d, int step) const {
    const uint8_t* const from = &bytes[lane[d % period] + d / period * period * block_bytes +
                                       step * KeyOrder<elem_bytes>::per_step * row_bytes];
    const u32x2 low = read((const FMHA_LDS uint8_t*)from);
    const u32x2 high = read((const FMHA_LDS uint8_t*)(from + KeyOrder<elem_bytes>::per_step / 2 * row_bytes));
    return Frag{low[0], low[1], high[0], high[1]};
  }

 private:
  static FMHA_DEVICE u32x2 read(const FMHA_LDS uint8_t* from) {
    if constexpr (elem_bytes == 1) return ds_read_b64_tr_b8(from);
    return ds_read_b64_tr_b16(from);
  }
};
#else
template <int num_keys, int row_bytes, int elem_bytes>
struct TransposedOnReading {
  static constexpr int turning_rows = 1;
};
#endif

template <bool condition, class A, class B>
struct Choose {
  using type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using type = B;
};

template <CdnaSpec spec, CdnaTile tile>
struct Config {
  static constexpr int qk_bytes = size_bytes(spec.dtype_qk);
  static constexpr int v_bytes = size_bytes(spec.dtype_v);
  static constexpr int num_waves = tile.block_m / kEdge;
  static constexpr int num_threads = num_waves * kWaveSize;

  // Rows as padded: what a call's rows lack of it reads as 0.
  static constexpr int qk_steps = spec.head_dim_qk * qk_bytes / kStepBytes;
  static constexpr int d_blocks = spec.head_dim_v / kEdge;
  static_assert(spec.head_dim_qk % kEdge == 0 && spec.head_dim_v % kEdge == 0, "rows are padded to whole blocks");
  static constexpr int n_tiles = tile.block_n / kEdge;
  static constexpr int pv_steps = tile.block_n * v_bytes / kStepBytes;

  // A slot is a matrix instruction, or the two of one operand of 16 bytes.
  static constexpr int qk_at_once = Mma<spec.dtype_qk>::steps_at_once;
  static constexpr int pv_at_once = Mma<spec.dtype_v>::steps_at_once;
  static constexpr int slots_per_tile = ceil_div(qk_steps, qk_at_once);
  static constexpr int qk_slots = slots_per_tile * n_tiles;
  static constexpr int pv_slots = ceil_div(pv_steps, pv_at_once) * d_blocks;

  // Packed f32 instructions do the work of two, but not beside a matrix instruction: the compiler parts those that
  // stand right behind one. They pay where vector work is the longer part.
  static constexpr bool packs_f32 = kArch == Arch::Gfx950 && is_fp8(spec.dtype_qk) && is_fp8(spec.dtype_v);

  // Slots by which LDS reads run ahead of the matrix unit. A step's slots are a multiple, so that a
  // register holds the same slot's operand in every step.
  // gfx950's 16-bit instructions are half as long.
  static constexpr int wanted_ahead = kArch == Arch::Gfx950 && qk_at_once == 1 && pv_at_once == 1 ? 4 : 2;
  static constexpr int most_ahead = min(wanted_ahead, min(qk_slots, pv_slots));
  static constexpr int slots_ahead = most_ahead >= 4 && (qk_slots + pv_slots) % 4 == 0   ? 4
                                     : most_ahead >= 2 && (qk_slots + pv_slots) % 2 == 0 ? 2
                                                                                         : 1;

  static constexpr bool by_element = tile.load == LoadPath::Element;
  // Whether one tile comes after another, with no overlap.
  static constexpr bool is_simple = by_element || spec.dropout;

  using KMatrix = LdsMatrix<tile.block_n, qk_steps * kStepBytes>;
  using VAsItLies = TransposedOnReading<tile.block_n, spec.head_dim_v * v_bytes, v_bytes>;

  // Whether rows go straight to LDS: all threads have an equal number of chunks, and each of them two places in a row
  // at most.
  template <class Matrix>
  static constexpr bool goes_direct(int chunks) {
    return kArch == Arch::Gfx950 && tile.load == LoadPath::Chunks && !is_simple && is_power_of_two(chunks) &&
           num_threads % chunks == 0 && 2 * num_threads % (Matrix::turning_rows * chunks) == 0 &&
           tile.block_n * chunks % num_threads == 0;
  }
  static constexpr bool direct_k = goes_direct<KMatrix>(qk_steps * 2);
  // One-byte rows of 32 would be read with two lanes to a bank.
  static constexpr bool direct_v = spec.v_layout == VLayout::RowMajor && spec.head_dim_v * v_bytes >= 64 &&
                                   goes_direct<VAsItLies>(spec.head_dim_v * v_bytes / kFragBytes);

  // Of V's rows in memory, the piece that a lane transposes: the widest that gives every thread work. A lane of
  // column-major V has but one row.
  static constexpr int num_v_pieces(int words) {
    return tile.block_n / kRun * (spec.head_dim_v * v_bytes / (4 * words));
  }
  static constexpr int v_piece_words = num_v_pieces(4) >= num_threads ? 4 : num_v_pieces(2) >= num_threads ? 2 : 1;
  static constexpr int v_piece_dims = spec.v_layout == VLayout::RowMajor ? 4 * v_piece_words / v_bytes : 0;
  using VTransposed = TransposedOnWriting<spec.head_dim_v, tile.block_n, v_bytes, v_piece_dims>;
  using VMatrix = typename Choose<direct_v, VAsItLies, VTransposed>::type;

  struct Stage {
    KMatrix k;
    VMatrix v;
  };
  // While tile n is finished, K of tile n + 1 is read and the tiles after both are written.
  static constexpr int stages = is_simple ? 1 : 2;
  struct Lds {
    union {
      Stage stage[stages];
      float o[num_waves][kEdge * kEdge];  // a block of O of each wave, once K and V are done with
    };
  };
  static_assert(sizeof(Lds) <= (kArch == Arch::Gfx950 ? 160 : 64) * 1024, "K and V do not fit the LDS");

  // A power of two that fills FP8's range with P, and lifts f16's P above what gfx90a's matrix unit reads as 0.
  static constexpr float p_scale_log2 = spec.dtype_v == DType::E4m3Fnuz ? 7.f
                                        : spec.dtype_v == DType::E4m3Fn ? 8.f
                                        : is_fp8(spec.dtype_v)          ? 15.f
                                        : spec.dtype_v == DType::F16 && kArch == Arch::Gfx90a ? 12.f
                                                                                              : 0.f;
};

}  // namespace fmha::cdna
