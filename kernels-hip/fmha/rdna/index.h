// Scores of an indexer on WMMA (amd/index.h): products of 16 heads and 16 keys. gfx11 has the whole of a row's 16
// elements in a lane, so that a product has two chunks, and both halves of the wave the same; on gfx12 each half has a
// chunk, which in FP8 is two products.
#pragma once
#include <fmha/amd/index.h>
#include <fmha/mma/rdna.h>

namespace fmha::rdna {

struct IndexUnit {
  using Acc = fmha::rdna::Acc;
  static constexpr int edge = kEdge, acc_elems = kAccElems;
  // Parts of a row that lanes with the same row or column have.
  static constexpr int operand_halves = kRepeats ? 1 : 2;

  static FMHA_DEVICE int operand_half() { return kRepeats ? 0 : lane_half(); }
  static FMHA_DEVICE int acc_half() { return lane_half(); }
  static FMHA_DEVICE constexpr int row_of(int elem, int half) { return acc_row(elem, half); }
  // Place of a row where each half of the wave has its rows in the order of its sums.
  static FMHA_DEVICE constexpr int place_of_row(int row) { return place_of_key(row); }
  static FMHA_DEVICE float other_half(float x) { return fmha::rdna::other_half(x); }

  template <DType dtype>
  static FMHA_DEVICE constexpr int chunks_at_once(int) {
    return kRepeats ? 2 : 1;
  }

  template <DType dtype, int chunks>
  static FMHA_DEVICE Acc multiply(const u32x4* a, const u32x4* b, Acc c) {
    using Whole = Operand<dtype>;
    if constexpr (kRepeats) {
      return mma<dtype>(joined_chunks(a), joined_chunks(b), c);
    } else if constexpr (is_fp8(dtype)) {
      c = mma<dtype>(Whole{a[0][0], a[0][1]}, Whole{b[0][0], b[0][1]}, c);
      return mma<dtype>(Whole{a[0][2], a[0][3]}, Whole{b[0][2], b[0][3]}, c);
    } else {
      return mma<dtype>(a[0], b[0], c);
    }
  }

 private:
  static FMHA_DEVICE u32x8 joined_chunks(const u32x4* x) {
    return u32x8{x[0][0], x[0][1], x[0][2], x[0][3], x[1][0], x[1][1], x[1][2], x[1][3]};
  }
};

template <IndexSpec spec, IndexTile tile>
FMHA_DEVICE void index_scores(const ChooseParams& p) {
  index::scores<IndexUnit, spec, tile>(p);
}

}  // namespace fmha::rdna
