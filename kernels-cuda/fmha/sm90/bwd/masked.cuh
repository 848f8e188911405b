// The backward under masks as data and a mask as code: its roles walk the blocks of queries that a list has for
// each key block and head.
#pragma once
#include <fmha/sm90/bwd/listed.cuh>
#include <fmha/sm90/bwd/main.cuh>
#include <fmha/sm90/bwd/preprocess.cuh>
#include <fmha/sm90/bwd/repair.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile, bool has_function>
FMHA_DEVICE void masked_main(const BwdParams& p, const Maps& maps, const Sm90BwdSchedule& schedule,
                             const MaskDataParams& masks, const TileList& list) {
  // Masks that hide a pair may hide a NaN. A kernel whose spec has no mask does not test for hidden NaNs.
  static_assert(spec.fwd.mask != MaskKind::Full, "sm90 backward: masks as data hide keys");
  static_assert(!keeps_dq_apart(tile) && !in_clusters(tile) && !tile.head_parts,
                "sm90 backward: lists are of one CTA's key block, whose sums of dQ are no one's own");
  main<spec, tile>(p, maps, schedule, AllKeysHere{}, ShownBlocks<has_function, spec.deterministic>{{DataMasks{masks}, p.fwd}, list});
}

template <BwdSpec spec, Sm90BwdTile tile, bool has_function>
FMHA_DEVICE void masked_preprocess(const BwdParams& p, const Sm90BwdSchedule& schedule, const MaskDataParams& masks) {
  preprocess<spec, tile>(p, schedule, ShownPairs<has_function>{DataMasks{masks}, p.fwd});
}

template <BwdSpec spec, Sm90BwdTile tile, bool has_function>
FMHA_DEVICE void masked_repair(const BwdParams& p, const Sm90BwdSchedule& schedule, const MaskDataParams& masks) {
  repair<spec, tile>(p, schedule, ShownPairs<has_function>{DataMasks{masks}, p.fwd});
}

}  // namespace fmha::sm90::bwd
