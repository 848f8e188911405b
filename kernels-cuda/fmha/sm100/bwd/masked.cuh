// The backward under masks as data and a mask as code: its roles walk the blocks of queries that lists have for each
// block of keys and query head.
#pragma once
#include <fmha/sm100/bwd/main.cuh>
#include <fmha/sm100/common/shown_rows.cuh>

namespace fmha::sm100::bwd {

template <BwdSpec spec, Sm100BwdTile tile, bool has_function>
FMHA_DEVICE void masked_main(const BwdParams& p, const Maps& maps, const MaskDataParams& masks, const TileList& list) {
  // Masks may hide a NaN. A kernel whose spec has no mask does not test for hidden NaNs.
  static_assert(spec.fwd.mask != MaskKind::Full, "sm100 backward: masks as data hide keys");
  static_assert(spec.fwd.code != CodeKind::Mask && spec.fwd.code != CodeKind::Both,
                "sm100 backward: lists ask the mask");
  main<spec, tile>(p, maps, ShownRows<has_function, spec.deterministic>{{{DataMasks{masks}, p.fwd}, list}});
}

template <BwdSpec spec, bool has_function>
FMHA_DEVICE void masked_stats(const BwdParams& p, const MaskDataParams& masks) {
  simt::bwd_stats<spec>(p, ShownPairs<has_function>{DataMasks{masks}, p.fwd});
}

template <BwdSpec spec, bool has_function>
FMHA_DEVICE void masked_finish_dq(const BwdParams& p, const MaskDataParams& masks) {
  finish_dq<spec>(p, ShownPairs<has_function>{DataMasks{masks}, p.fwd});
}

}  // namespace fmha::sm100::bwd
