// The forward kernel over MXFP8 and NVFP4: a tile of scales beside each tile of Q, K and V, and products that take both
// (kind::mxf8f6f4.block_scale, kind::mxf4nvf4.block_scale). The scales are an argument of their own.
#pragma once
#include <fmha/sm100/fwd/fwd_masked.cuh>
#include <fmha/sm100/fwd/scales.cuh>

namespace fmha::sm100 {

template <FwdSpec spec, Sm100Tile tile>
FMHA_DEVICE void fwd_scaled(const FwdParams& p, const Maps& maps, const TileSchedule& schedule,
                            const BlockScaleParams& scales) {
  static_assert(is_scaled(tile), "sm100: elements with scales");
  fwd<spec, tile>(p, maps, schedule, EveryKey{}, BlockScales{scales});
}

// Attention over MXFP8 and NVFP4 under masks as data and a mask as code.
template <FwdSpec spec, Sm100Tile tile, bool has_function>
FMHA_DEVICE void fwd_masked_scaled(const FwdParams& p, const Maps& maps, const TileSchedule& schedule,
                                   const MaskDataParams& masks, const TileList& list, const BlockScaleParams& scales) {
  static_assert(is_scaled(tile), "sm100: elements with scales");
  fwd_masked<spec, tile, has_function>(p, maps, schedule, masks, list, BlockScales{scales});
}

}  // namespace fmha::sm100
