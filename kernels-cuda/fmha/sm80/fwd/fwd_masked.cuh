// The forward kernel under masks as data. A warp classifies each block for its rows once: a fully hidden block costs
// only its loads, and a fully visible block needs no test of its pairs.
#pragma once
#include <fmha/common/data_keys.cuh>
#include <fmha/sm80/fwd/fwd.cuh>

namespace fmha::sm80 {

template <FwdSpec spec, Sm80Tile tile>
FMHA_DEVICE void fwd_masked(const FwdParams& p, const TileSchedule& schedule, const MaskDataParams& masks) {
  // Masks as data may hide a NaN of V. A kernel whose spec has no mask does not test for hidden NaNs.
  static_assert(spec.mask != MaskKind::Full, "sm80: masks as data hide keys");
  static_assert(tile.split_keys == 0 && !tile.pack_gqa, "sm80: whole sequences, rows of one head");
  fwd<spec, tile>(p, schedule, DataKeys{DataMasks{masks}});
}

}  // namespace fmha::sm80
