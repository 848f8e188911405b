// The CDNA forward kernel's choices and every number that follows from them.
#pragma once
#include <fmha/cdna/tile.h>
#include <fmha/isa/sched.h>
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

  // Linear in the bits of the row, so that a sum of rows without a carry turns by both their turns. Rows d
  // and d + 8 are turned differently too: the transposing writer's lanes are eight rows apart.
  static FMHA_DEVICE constexpr int turn(int row) { return (row / rows_per_line ^ row / 8) % period; }

  static FMHA_DEVICE constexpr int offset(int row, int chunk) {
    if constexpr (!permuted) return (row * pitch + chunk) * kFragBytes;
    return (row * pitch + (chunk / period * period) + (chunk % period ^ turn(row))) * kFragBytes;
  }

  // The place `rows` rows below the one at `at`, where `rows` shares no bit with its row.
  static FMHA_DEVICE int below(int at, int rows) {
    return (permuted ? at ^ turn(rows) * kFragBytes : at) + rows * pitch * kFragBytes;
  }

  // Where this lane's fragments begin. They serve all steps and blocks but for constants: the compiler is
  // kept from making a register of each.
  static constexpr int num_lane_addresses = permuted && period >= 2 ? period / 2 : 1;
  using LaneAddresses = Array<int, num_lane_addresses>;
  static FMHA_DEVICE LaneAddresses lane_addresses() {
    LaneAddresses at;
#pragma unroll
    for (int x = 0; x < num_lane_addresses; ++x) {
      const int low = num_lane_addresses > 1 || permuted ? (2 * x) ^ lane_half() ^ turn(lane_col()) : lane_half();
      at[x] = (lane_col() * pitch + low) * kFragBytes;
      computed_here(at[x]);
    }
    return at;
  }

  // This lane's fragment of step `c` of rows 32 * block ...
  FMHA_DEVICE const Frag& frag(const LaneAddresses& lane, int block, int c) const {
    const int chunk = 2 * c;
    if constexpr (!permuted) {
      return *reinterpret_cast<const Frag*>(&bytes[lane[0] + (block * kEdge * pitch + chunk) * kFragBytes]);
    } else {
      const int which = (chunk % period ^ turn(block * kEdge)) / 2;
      return *reinterpret_cast<const Frag*>(
          &bytes[lane[which] + (block * kEdge * pitch + chunk / period * period) * kFragBytes]);
    }
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

  // A slot is a matrix instruction, or the two of one operand of 16 bytes.
  static constexpr int qk_at_once = Mma<spec.dtype_qk>::steps_at_once;
  static constexpr int pv_at_once = Mma<spec.dtype_v>::steps_at_once;
  static constexpr int slots_per_tile = ceil_div(qk_steps, qk_at_once);
  static constexpr int qk_slots = slots_per_tile * n_tiles;
  static constexpr int pv_slots = ceil_div(pv_steps, pv_at_once) * d_blocks;

  // Slots by which LDS reads run ahead of the matrix unit. A step's slots are a multiple, so that a
  // register holds the same slot's operand in every step.
  // gfx950's instructions are half as long; a mask's edges take the registers of the other two.
  static constexpr int wanted_ahead = kArch == Arch::Gfx950 && spec.mask == MaskKind::Full ? 4 : 2;
  static constexpr int most_ahead = min(wanted_ahead, min(qk_slots, pv_slots));
  static constexpr int slots_ahead = most_ahead >= 4 && (qk_slots + pv_slots) % 4 == 0   ? 4
                                     : most_ahead >= 2 && (qk_slots + pv_slots) % 2 == 0 ? 2
                                                                                         : 1;

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
