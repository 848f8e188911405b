// Compile-time choices of the CDNA forward kernel, and the numbers derived from them.
#pragma once
#include <fmha/cdna/tile.h>
#include <fmha/isa/sched.h>
#include <fmha/mma/cdna.h>

namespace fmha::cdna {

FMHA_DEVICE constexpr bool is_power_of_two(int x) { return (x & (x - 1)) == 0; }

// Number of 16-byte chunks in one row of LDS banks: 32 banks of 4 bytes; gfx950 has 64 banks.
constexpr int kChunksPerBankRow = kArch == Arch::Gfx950 ? 16 : 8;

// The low bits of `x` that number a bank row's chunks, in reverse order.
FMHA_DEVICE constexpr int reversed(uint32_t x) {
  constexpr int low_bits = kChunksPerBankRow == 16 ? 4 : 3;
  return int(__builtin_bitreverse32(x) >> (32 - low_bits));
}

// A matrix in LDS: rows of 16-byte chunks, unpadded, with an XOR swizzle against bank conflicts. kChunksPerBankRow
// lanes touch every bank once when they write adjacent chunks (or every other chunk of several rows), and when they
// read the same column of chunks of adjacent rows. With `piece_rows` > 0 that also holds when each lane writes one row
// of a piece of `piece_rows` rows, for any power of two of adjacent pieces.
//
// Each bit of the row's number flips one bit of a chunk's position in its bank row. Where a row is shorter than a bank
// row, the lowest bits do so without a swizzle; the XOR takes care of the others. Pieces flip the position's bits in
// reverse order, so that more pieces split a bank row into halves, then quarters, and the chunks fill what is left.
//
// Lanes that write two rows `apart` rows from each other at once, half a bank row of each, would meet in one half of it
// where all rows begin on halves: then every second run of `apart` rows has its pairs of rows exchanged.
template <int num_rows, int row_bytes, int piece_rows = 0, int apart = 0>
struct LdsMatrix {
  static constexpr int swizzle_period = max(kChunksPerBankRow, piece_rows * kChunksPerBankRow);
  static constexpr int chunks = row_bytes / kFragBytes;
  static constexpr int in_step = min(chunks & -chunks, kChunksPerBankRow);  // chunks of a row that share a bank row
  static constexpr int rows_per_line = kChunksPerBankRow / in_step;
  // The XOR stays inside a bank row, or inside part of one where a matrix row may end within it.
  static constexpr int swizzled_chunks = is_power_of_two(chunks) ? kChunksPerBankRow : in_step;
  static_assert(is_power_of_two(chunks) || piece_rows == 0, "such rows are swizzled_chunks in themselves alone");

  alignas(16) uint8_t bytes[num_rows * row_bytes];

  static FMHA_DEVICE constexpr int swizzle(int row) {
    if constexpr (piece_rows == 0) return row % kChunksPerBankRow / rows_per_line;
    const uint32_t exchanging = uint32_t(row) & -uint32_t(rows_per_line);
    return reversed(exchanging ^ exchanging / piece_rows);
  }

  // Which chunk of the row is stored at position `chunk`; only where the swizzle stays within a row.
  static FMHA_DEVICE constexpr int chunk_at(int row, int chunk) {
    static_assert(piece_rows == 0, "chunks are swizzled_chunks between rows");
    return chunk ^ swizzle(row);
  }

  // The row of LDS in which row `row` of the matrix lies.
  static FMHA_DEVICE constexpr int place_of_row(int row) {
    if constexpr (apart == 0 || rows_per_line != 2) return row;
    else return row ^ row / apart % 2;
  }

  static FMHA_DEVICE constexpr int offset(int row, int chunk) {
    return ((place_of_row(row) * chunks + chunk) ^ swizzle(row)) * kFragBytes;
  }

  // The offset `rows` rows below the one at `at`; `rows` has no bit in common with that row's number. The part that
  // the XOR does not touch is added as an immediate offset of the LDS instruction, which is free.
  static FMHA_DEVICE int below(int at, int rows) {
    const int part = swizzled_part(rows, 0);
    return (at ^ part) + (offset(rows, 0) - part);
  }

  // Base addresses of this lane's fragments, one for each value of the XOR. All steps and blocks use them with
  // constant offsets; without `opaque_in_vgpr` the compiler would keep a register for each sum.
  using LaneAddresses = Array<int, swizzled_chunks>;
  static FMHA_DEVICE LaneAddresses lane_addresses() {
    constexpr uint32_t used = used_swizzles();
    const int thread = opaque_thread_idx(), from = offset(lane_col(thread), lane_half(thread));
    LaneAddresses at;
#pragma unroll
    for (int x = 0; x < swizzled_chunks; ++x) {
      if ((used >> x & 1) == 0) continue;
      at[x] = from ^ x * kFragBytes;
      opaque_in_vgpr(at[x]);
    }
    return at;
  }

  // Reads this lane's fragment of step `c` of rows 32 * block ...
  FMHA_DEVICE Frag frag(const LaneAddresses& lane, int block, int c) const {
    const int part = swizzled_part(block * kEdge, 2 * c);
    return *reinterpret_cast<const Frag*>(&bytes[lane[part / kFragBytes] + (offset(block * kEdge, 2 * c) - part)]);
  }

 private:
  static FMHA_DEVICE constexpr int swizzled_part(int row, int chunk) {
    return offset(row, chunk) % (swizzled_chunks * kFragBytes);
  }

  // Bit x: whether some fragment has a part of x chunks.
  static FMHA_DEVICE constexpr uint32_t used_swizzles() {
    uint32_t parts = 0;
    for (int block = 0; block < num_rows / kEdge; ++block) {
      for (int c = 0; c < chunks / 2; ++c) parts |= 1u << swizzled_part(block * kEdge, 2 * c) / kFragBytes;
    }
    return parts;
  }
};

// V, transposed when it is written to LDS: each row holds one head dimension, with keys in KeyOrder. A lane writes
// `piece_rows` rows.
template <int head_dim, int num_keys, int elem_bytes, int piece_rows>
struct TransposedOnWriting : LdsMatrix<head_dim, num_keys * elem_bytes, piece_rows> {
  using Matrix = LdsMatrix<head_dim, num_keys * elem_bytes, piece_rows>;

  // Four one-byte keys (a run) are a quarter of a chunk, and a wave that reads full cache lines of V writes only two
  // of a chunk's four runs at a time. So every other block of 32 rows stores its chunks with the halves swapped: the
  // runs of two blocks together cover all banks. The swap back is free where a matrix instruction takes half a
  // fragment; on gfx950 it takes two whole ones, so nothing is swapped there.
  static constexpr bool swaps_halves = elem_bytes == 1 && kArch != Arch::Gfx950;

  // Where a run of four keys of row `d` lies in LDS.
  static FMHA_DEVICE constexpr int place_of_run(int d, int i_run) {
    const int byte = i_run * kRun * elem_bytes;
    const int half = swaps_halves && d / kEdge % 2 ? kFragBytes / 2 : 0;
    return Matrix::offset(d, byte / kFragBytes) + (byte % kFragBytes ^ half);
  }

  FMHA_DEVICE Frag frag(const typename Matrix::LaneAddresses& lane, int block, int step) const {
    const Frag x = Matrix::frag(lane, block, step);
    return swaps_halves && block % 2 ? Frag{x[2], x[3], x[0], x[1]} : x;
  }
};

#if defined(__gfx950__)
// V in LDS as in memory, a row per key, transposed by ds_read_b64_tr: a 16-byte fragment of 32 columns is two
// reads of 8 bytes a lane; in each, half a wave covers four rows (eight of one-byte elements). Blocks of 32 elements
// are swizzled within a row, so that the rows that 32 lanes read at once cover all 64 banks.
template <int num_keys, int row_bytes, int elem_bytes>
struct TransposedOnReading {
  static constexpr int chunks = row_bytes / kFragBytes;
  static constexpr int block_bytes = kEdge * elem_bytes;  // of a row, a fragment's
  static constexpr int chunks_per_block = block_bytes / kFragBytes;
  static constexpr int rows_at_once = 8 / elem_bytes;
  static constexpr int period = row_bytes / block_bytes < rows_at_once ? row_bytes / block_bytes : rows_at_once;
  static constexpr int swizzle_period = elem_bytes == 1 ? 4 * kRun : kRun;

  alignas(16) uint8_t bytes[num_keys * row_bytes];

  // Row n of those that half a wave reads at once: one run of keys, or two runs that are adjacent in KeyOrder.
  static FMHA_DEVICE constexpr int key_of(int n) { return n % kRun + n / kRun * 2 * kRun; }
  static FMHA_DEVICE constexpr int swizzle(int key) {
    const int n = key % kRun + key / (2 * kRun) % 2 * kRun % rows_at_once;
    return n / (rows_at_once / period);
  }
  static FMHA_DEVICE constexpr int chunk_at(int key, int chunk) { return chunk ^ swizzle(key) * chunks_per_block; }

  // Base addresses of this lane's reads, one for each value of the XOR.
  using LaneAddresses = Array<int, period>;
  static FMHA_DEVICE LaneAddresses lane_addresses() {
    constexpr int lanes_per_row = 2 * elem_bytes;
    const int thread = opaque_thread_idx(), lane = thread % 16;
    const int key = lane_half(thread) * kRun + key_of(lane / lanes_per_row);
    LaneAddresses at;
#pragma unroll
    for (int x = 0; x < period; ++x) {
      at[x] = key * row_bytes + (x ^ swizzle(key)) * block_bytes + thread / 16 % 2 * (block_bytes / 2) +
              lane % lanes_per_row * 8;
      opaque_in_vgpr(at[x]);
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
  static constexpr int swizzle_period = 1;
};
#endif

template <CdnaSpec spec, CdnaTile tile>
struct Config {
  static constexpr int qk_bytes = size_bytes(spec.dtype_qk);
  static constexpr int v_bytes = size_bytes(spec.dtype_v);
  static constexpr int num_waves = tile.block_m / kEdge;
  static constexpr int num_threads = num_waves * kWaveSize;

  // Row lengths after padding: elements beyond a call's rows are read as 0.
  static constexpr int qk_steps = spec.head_dim_qk * qk_bytes / kStepBytes;
  static constexpr int d_blocks = spec.head_dim_v / kEdge;
  static_assert(spec.head_dim_qk % kEdge == 0 && spec.head_dim_v % kEdge == 0, "rows are padded to whole blocks");
  static constexpr int n_tiles = tile.block_n / kEdge;
  static constexpr int pv_steps = tile.block_n * v_bytes / kStepBytes;

  // A slot is the work with one 16-byte A operand: one matrix instruction, or two.
  static constexpr int qk_at_once = Mma<spec.dtype_qk>::steps_at_once;
  static constexpr int pv_at_once = Mma<spec.dtype_v>::steps_at_once;
  static constexpr int slots_per_tile = ceil_div(qk_steps, qk_at_once);
  static constexpr int qk_slots = slots_per_tile * n_tiles;
  static constexpr int pv_slots = ceil_div(pv_steps, pv_at_once) * d_blocks;

  // Packed f32 instructions do the work of two, but the compiler splits one that directly follows a matrix
  // instruction. They pay only where vector work takes longer than matrix work: FP8 on gfx950.
  static constexpr bool packs_f32 = kArch == Arch::Gfx950 && is_fp8(spec.dtype_qk) && is_fp8(spec.dtype_v);

  // Number of slots between an operand's read from LDS and its matrix instruction. It divides the slots of a step, so
  // that each register holds the same slot's operand in every step. gfx950's 16-bit instructions take half as long,
  // hence 4.
  static constexpr int wanted_ahead = kArch == Arch::Gfx950 && qk_at_once == 1 && pv_at_once == 1 ? 4 : 2;
  static constexpr int most_ahead = min(wanted_ahead, min(qk_slots, pv_slots));
  static constexpr int slots_ahead = most_ahead >= 4 && (qk_slots + pv_slots) % 4 == 0   ? 4
                                     : most_ahead >= 2 && (qk_slots + pv_slots) % 2 == 0 ? 2
                                                                                         : 1;

  static constexpr bool by_element = tile.load == LoadPath::Element;
  // Tiles are processed strictly one after another, without software pipelining.
  static constexpr bool is_simple = by_element || spec.dropout;

  using KMatrix = LdsMatrix<tile.block_n, qk_steps * kStepBytes>;
  using VRowMajor = TransposedOnReading<tile.block_n, spec.head_dim_v * v_bytes, v_bytes>;

  // Global-to-LDS loads without registers need an equal number of chunks for every thread, and at most two different
  // positions of a thread's chunks within its rows.
  template <class Matrix>
  static constexpr bool goes_direct(int chunks) {
    return kArch == Arch::Gfx950 && tile.load == LoadPath::Chunks && !is_simple && is_power_of_two(chunks) &&
           num_threads % chunks == 0 && 2 * num_threads % (Matrix::swizzle_period * chunks) == 0 &&
           tile.block_n * chunks % num_threads == 0;
  }
  static constexpr bool direct_k = goes_direct<KMatrix>(qk_steps * 2);
  // One-byte rows of 32 elements are left out: two lanes would read from one bank.
  static constexpr bool direct_v = spec.v_layout == VLayout::RowMajor && spec.head_dim_v * v_bytes >= 64 &&
                                   goes_direct<VRowMajor>(spec.head_dim_v * v_bytes / kFragBytes);

  // Width of the piece of V's rows that one lane transposes: the widest that leaves no thread idle. Column-major V
  // needs no transposition, so a lane has one row.
  static constexpr int num_v_pieces(int words) {
    return tile.block_n / kRun * (spec.head_dim_v * v_bytes / (4 * words));
  }
  static constexpr int v_piece_words = num_v_pieces(4) >= num_threads ? 4 : num_v_pieces(2) >= num_threads ? 2 : 1;
  static constexpr int v_piece_dims = spec.v_layout == VLayout::RowMajor ? 4 * v_piece_words / v_bytes : 0;
  using VTransposed = TransposedOnWriting<spec.head_dim_v, tile.block_n, v_bytes, v_piece_dims>;
  using VMatrix = typename Choose<direct_v, VRowMajor, VTransposed>::type;

  struct Stage {
    KMatrix k;
    VMatrix v;
  };
  // Double buffering: while tile n is finished, K of tile n + 1 is read, and K(n + 2) and V(n + 1) are written.
  static constexpr int stages = is_simple ? 1 : 2;
  struct Lds {
    union {
      Stage stage[stages];
      float o[num_waves][kEdge * kEdge];  // a block of O of each wave, once K and V are done with
    };
  };
  static_assert(sizeof(Lds) <= (kArch == Arch::Gfx950 ? 160 : 64) * 1024, "K and V do not fit the LDS");

  // P is scaled by this power of two before it is rounded: so that FP8's range is used in full,
  // and on gfx90a, whose matrix unit flushes f16 subnormals to 0, small probabilities stay normal.
  static constexpr float p_scale_log2 = spec.dtype_v == DType::E4m3Fnuz ? 7.f
                                        : spec.dtype_v == DType::E4m3Fn ? 8.f
                                        : is_fp8(spec.dtype_v)          ? 15.f
                                        : spec.dtype_v == DType::F16 && kArch == Arch::Gfx90a ? 12.f
                                                                                              : 0.f;
};

}  // namespace fmha::cdna
