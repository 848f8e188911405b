// The forward kernel under masks as data and a mask as code: its roles walk the blocks of keys that a list has for
// each tile, cut ones first.
#pragma once
#include <fmha/sm100/common/shown_rows.cuh>
#include <fmha/sm100/fwd/fwd.cuh>

namespace fmha::sm100 {

template <FwdSpec spec, Sm100Tile tile, bool has_function>
FMHA_DEVICE void fwd_masked(const FwdParams& p, const Maps& maps, const TileSchedule& schedule,
                            const MaskDataParams& masks, const TileList& list) {
  // Masks that hide a key may hide a NaN of V. A kernel whose spec has no mask does not test for hidden NaNs.
  static_assert(spec.mask != MaskKind::Full, "sm100: masks as data hide keys");
  static_assert(tile.split_keys == 0 && !is_pair(tile), "sm100: one CTA sees whole sequences");
  static_assert(spec.code != CodeKind::Mask && spec.code != CodeKind::Both, "sm100: lists ask the mask");
  const ShownRows<has_function> seen{{{DataMasks{masks}, p}, list}};
  fwd<spec, tile>(p, maps, schedule, seen);
}

}  // namespace fmha::sm100
