// The CDNA forward kernel's choices and every number that follows from them.
#pragma once
#include <fmha/cdna/tile.h>
#include <fmha/mma/cdna.h>

namespace fmha::cdna {

FMHA_DEVICE constexpr bool is_power_of_two(int x) { return (x & (x - 1)) == 0; }

// A matrix in LDS, rows of 16-byte chunks, laid out so that eight lanes that read one chunk column
// of eight adjacent rows meet all 32 banks. A power of two of chunks a row is permuted inside its
// row; any other number gets an odd pitch.
template <int num_rows, int row_bytes>
struct LdsMatrix {
  static constexpr int chunks = row_bytes / kFragBytes;
  static constexpr bool permuted = is_power_of_two(chunks);
  static constexpr int pitch = permuted ? chunks : chunks | 1;
  static constexpr int period = chunks < 8 ? chunks : 8;     // chunks that are exchanged
  static constexpr int rows_per_line = 8 / period;           // a line is all banks: 128 bytes

  alignas(16) uint8_t bytes[num_rows * pitch * kFragBytes];

  // Rows d and d + 8 are turned differently too: the transposing writer's lanes are eight rows apart.
  static FMHA_DEVICE int turn(int row) { return (row / rows_per_line + row / 8) % period; }

  static FMHA_DEVICE int offset(int row, int chunk) {
    if constexpr (!permuted) return (row * pitch + chunk) * kFragBytes;
    return (row * pitch + (chunk / period * period) + (chunk % period ^ turn(row))) * kFragBytes;
  }

  // This lane's fragment of step `c` of rows 32 * block ... In all but the last line it is the same
  // for every block and every fourth step but for a constant: four addresses serve all reads.
  FMHA_DEVICE const Frag& frag(int block, int c) const {
    const int row = lane_col(), chunk = 2 * c, half = lane_half();
    int at;
    if constexpr (permuted && period >= 2) {
      const int block_turn = (block * kEdge / rows_per_line + block * kEdge / 8) % period;
      const int low = (chunk % period ^ block_turn) ^ (half ^ turn(row));
      at = (row * pitch + low) * kFragBytes + (block * kEdge * pitch + chunk / period * period) * kFragBytes;
    } else {
      at = (row * pitch + half) * kFragBytes + (block * kEdge * pitch + chunk) * kFragBytes;
    }
    return *reinterpret_cast<const Frag*>(&bytes[at]);
  }
};

template <FwdSpec spec, CdnaTile tile>
struct Config {
  static constexpr int qk_bytes = size_bytes(spec.dtype_qk);
  static constexpr int v_bytes = size_bytes(spec.dtype_v);
  static constexpr int num_waves = tile.block_m / kEdge;
  static constexpr int num_threads = num_waves * kWaveSize;

  static constexpr int qk_row_bytes = spec.head_dim_qk * qk_bytes;
  static constexpr int qk_steps = ceil_div(qk_row_bytes, kStepBytes);
  static constexpr int v_row_bytes = spec.head_dim_v * v_bytes;
  static constexpr int d_blocks = ceil_div(spec.head_dim_v, kEdge);
  static constexpr int head_dim_v_padded = d_blocks * kEdge;
  static constexpr int n_tiles = tile.block_n / kEdge;
  static constexpr int pv_steps = tile.block_n * v_bytes / kStepBytes;
  static constexpr int pv_steps_per_tile = pv_steps / n_tiles;

  using KMatrix = LdsMatrix<tile.block_n, qk_steps * kStepBytes>;
  using VMatrix = LdsMatrix<head_dim_v_padded, tile.block_n * v_bytes>;  // transposed, keys in KeyOrder

  struct Stage {
    KMatrix k;
    VMatrix v;
  };
  // While tile n is finished, K of tile n + 1 is read and the tiles after both are written.
  static constexpr int stages = 2;
  struct Lds {
    Stage stage[stages];
  };
  static_assert(sizeof(Lds) <= (kArch == Arch::Gfx950 ? 160 : 64) * 1024, "K and V do not fit the LDS");

  // A power of two that fills FP8's range with P.
  static constexpr float p_scale_log2 = spec.dtype_v == DType::E4m3Fnuz ? 7.f
                                        : spec.dtype_v == DType::E4m3Fn ? 8.f
                                        : is_fp8(spec.dtype_v)          ? 15.f
                                                                        : 0.f;
};

}  // namespace fmha::cdna
