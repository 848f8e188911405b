// The backward on mma.sync under masks as data. A warp classifies each block once for its rows, as in the forward:
// fully hidden, partly masked, or fully visible.
#pragma once
#include <fmha/common/data_keys.cuh>
#include <fmha/sm80/bwd/main.cuh>

namespace fmha::sm80::bwd {

template <BwdSpec spec, Sm80BwdTile tile>
FMHA_DEVICE void masked_main(const BwdParams& p, const MaskDataParams& masks) {
  // Masks as data may hide a NaN. A kernel whose spec has no mask does not test for hidden NaNs.
  static_assert(spec.fwd.mask != MaskKind::Full, "sm80: masks as data hide keys");
  static_assert(!adds_dq(tile), "sm80: what finishes dQ knows no masks");
  main<spec, tile>(p, DataKeys{DataMasks{masks}});
}

}  // namespace fmha::sm80::bwd
