// Scores of an indexer on MFMA (amd/index.h): products of 32 heads and 32 keys, 16 bytes of each lane at a time.
#pragma once
#include <fmha/amd/index.h>
#include <fmha/mma/cdna.h>

namespace fmha::cdna {

struct IndexUnit {
  using Acc = fmha::Acc;
  static constexpr int edge = kEdge, acc_elems = 16;
  // Number of parts of a row, which lanes with the same row or column hold.
  static constexpr int operand_halves = 2;

  static FMHA_DEVICE int operand_half() { return lane_half(); }
  static FMHA_DEVICE int acc_half() { return lane_half(); }
  static FMHA_DEVICE constexpr int row_of(int elem, int half) { return acc_row(elem, half); }
  // Place of a row in LDS such that each half of the wave has its rows in the order of its sums.
  static FMHA_DEVICE constexpr int place_of_row(int row) {
    return row / kRun % 2 * acc_elems + row / (2 * kRun) * kRun + row % kRun;
  }
  static FMHA_DEVICE float other_half(float x) { return fmha::other_half(x); }

  // Number of chunks of one instruction: gfx950 has one for two chunks of FP8, at twice the rate.
  template <DType dtype>
  static FMHA_DEVICE constexpr int chunks_at_once(int of_lane) {
    return of_lane % Mma<dtype>::steps_at_once == 0 ? Mma<dtype>::steps_at_once : 1;
  }

  template <DType dtype, int chunks>
  static FMHA_DEVICE Acc multiply(const Frag* a, const Frag* b, Acc c) {
#if defined(__gfx950__)
    if constexpr (chunks == 2) return mma_two_steps<dtype>(a[0], b[0], a[1], b[1], c);
    // One chunk of FP8 has two instructions of the older kind.
    constexpr int parts = is_fp8(dtype) ? 2 : 1;
#else
    constexpr int parts = Mma<dtype>::parts;
#endif
#pragma unroll
    for (int part = 0; part < parts; ++part) c = mma_part<dtype>(a[0], b[0], part, c);
    return c;
  }
};

template <IndexSpec spec, IndexTile tile>
FMHA_DEVICE void index_scores(const ChooseParams& p) {
  index::scores<IndexUnit, spec, tile>(p);
}

}  // namespace fmha::cdna
