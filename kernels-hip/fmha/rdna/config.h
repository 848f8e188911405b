// Numbers derived from the spec and the tile, and the layout of LDS.
#pragma once
#include <fmha/mma/rdna.h>
#include <fmha/rdna/tile.h>

namespace fmha::rdna {

using cdna::CdnaParams;
using cdna::CdnaSpec;
using cdna::LoadPath;
using cdna::OutputKind;
using cdna::StorePath;

// A matrix in LDS whose row stride keeps 16 lanes that read one place of 16 rows in different banks. Reads of 16
// bytes serve eight lanes a cycle, reads of 8 bytes 16 lanes; the stride is an odd number of such reads.
template <int rows, int row_elems, int elem_bytes>
struct LdsRows {
  static constexpr int pad = 8 * elem_bytes, stride = row_elems * elem_bytes + pad;
  alignas(16) uint8_t bytes[rows * stride];

  // Operand of lane l: elements 16 step .. + 15 of row 16 block + l % 16; on gfx12 half of them.
  template <DType dtype>
  FMHA_DEVICE Operand<dtype> operand(int lane_offset, int block, int step) const {
    static_assert(size_bytes(dtype) == elem_bytes, "an operand is of its matrix' type");
    const uint8_t* const from = &bytes[lane_offset + block * kEdge * stride + step * kEdge * elem_bytes];
    Operand<dtype> x;
    constexpr int words = Fragment<dtype>::words, at_once = words < 4 ? words : 4;
#pragma unroll
    for (int w = 0; w < words; w += at_once) {
      const auto piece = *reinterpret_cast<const Vec<uint32_t, at_once>*>(from + 4 * w);
#pragma unroll
      for (int i = 0; i < at_once; ++i) x[w + i] = piece[i];
    }
    return x;
  }

  // A lane's part of an LDS address.
  static FMHA_DEVICE int lane_offset(int thread) {
    return lane_col(thread) * stride + (kRepeats ? 0 : lane_half(thread) * kOperandElems * elem_bytes);
  }
};

template <CdnaSpec spec, RdnaTile tile>
struct Config {
  static constexpr int qk_bytes = size_bytes(spec.dtype_qk), v_bytes = size_bytes(spec.dtype_v);
  static constexpr int column_waves = tile.column_waves;  // that share the columns of their rows
  static constexpr int num_waves = tile.block_m / kEdge * column_waves, num_threads = num_waves * kWaveSize;
  static constexpr int n_blocks = tile.block_n / kEdge;    // of keys, of a tile
  static constexpr int wave_dim_qk = spec.head_dim_qk / column_waves, wave_dim_v = spec.head_dim_v / column_waves;
  static constexpr int d_blocks = wave_dim_v / kEdge;       // of O^T, of a wave
  static constexpr int qk_steps = wave_dim_qk / kEdge;
  static_assert(spec.head_dim_qk % (kEdge * column_waves) == 0 && spec.head_dim_v % (kEdge * column_waves) == 0,
                "a wave has whole blocks of columns");
  static constexpr bool by_element = tile.load == LoadPath::Element;
  // On gfx11 a lane has too few registers for operands of wide rows of Q besides O, so it keeps half of each.
  static constexpr bool halves_of_q = wave_dim_qk > 128;
  // Number of operands of V that are read ahead of their products. Without a limit the scheduler would read all, and
  // they would not fit the registers.
  static constexpr int blocks_ahead = wave_dim_qk + wave_dim_v > 448 ? 1 : wave_dim_qk + wave_dim_v > 256 ? 2 : 4;
  static constexpr int q_words = halves_of_q ? Fragment<spec.dtype_qk>::half_words : Fragment<spec.dtype_qk>::words;

  using K = LdsRows<tile.block_n, spec.head_dim_qk, qk_bytes>;
  // V transposed: each row holds one head dimension, with keys in the order of places (mma/rdna.h).
  using V = LdsRows<spec.head_dim_v, tile.block_n, v_bytes>;

  struct Lds {
    union {
      struct {
        K k;
        V v;
      };
      float o[num_waves][kEdge * kEdge];  // a block of O of each wave, once K and V are done with
    };
    int32_t zeroed[num_waves];  // whether a wave has replaced a value of V that is not finite
  };
  static_assert(sizeof(Lds) <= 64 * 1024, "K and V do not fit the LDS");

  // P is scaled by this power of two before it is rounded, so that FP8's range is used in full.
  static constexpr int p_scale_log2 = spec.dtype_v == DType::E4m3Fn ? 8 : is_fp8(spec.dtype_v) ? 15 : 0;
};

// Number of the wave among those that share their rows' columns.
template <class C>
FMHA_DEVICE int column_wave() {
  return C::column_waves == 1 ? 0 : v_readfirstlane_b32(thread_idx() / kWaveSize) % C::column_waves;
}

}  // namespace fmha::rdna
