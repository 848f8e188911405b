// The forward kernel over MXFP8: a tile of scales beside each tile of Q, K and V, and products that take both
// (kind::mxf8f6f4.block_scale). The scales are an argument of their own.
#pragma once
#include <fmha/sm100/fwd/fwd.cuh>
#include <fmha/sm100/fwd/scales.cuh>

namespace fmha::sm100 {

template <FwdSpec spec, Sm100Tile tile>
FMHA_DEVICE void fwd_scaled(const FwdParams& p, const Maps& maps, const TileSchedule& schedule,
                            const BlockScaleParams& scales) {
  static_assert(is_scaled(tile), "sm100: elements with scales");
  fwd<spec, tile>(p, maps, schedule, EveryKey{}, BlockScales{scales});
}

}  // namespace fmha::sm100
