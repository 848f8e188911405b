// The forward kernel under masks as data and a mask as code: its roles walk the blocks of keys that a list has for
// each tile.
#pragma once
#include <fmha/common/shown_blocks.cuh>
#include <fmha/sm90/fwd/fwd.cuh>

namespace fmha::sm90 {

template <FwdSpec spec, Sm90Tile tile, bool has_function>
FMHA_DEVICE void fwd_masked(const FwdParams& p, const Maps& maps, const TileSchedule& schedule,
                            const MaskDataParams& masks,
                            const TileList& list) {
  // Masks that hide a key may hide a NaN of V. A kernel whose spec has no mask does not test for hidden NaNs.
  static_assert(spec.mask != MaskKind::Full, "sm90: masks as data hide keys");
  static_assert(tile.split_keys == 0, "sm90: whole sequences");
  static_assert(!is_fp8(spec.dtype_qk), "sm90: under masks as data types of 16 bits");
  static_assert(spec.code != CodeKind::Mask && spec.code != CodeKind::Both, "sm90: lists ask the mask");
  const ShownBlocks<has_function> keys{{DataMasks{masks}, p}, list};
  fwd<spec, tile>(p, maps, schedule, {}, AllKeysHere{}, keys);
}

}  // namespace fmha::sm90
