// Masks as data in tiled kernels: a warp classifies each tile (all, some or no pairs visible), and tests single pairs
// only in tiles that are visible in part.
#pragma once
#include <fmha/mask_classes.h>
#include <fmha/num.h>
#include <fmha/ptx/collective.cuh>

namespace fmha {

// Operations on the lanes of a warp.
struct WarpLanes {
  static constexpr int32_t count = 32;
  static FMHA_DEVICE int32_t index() { return threadIdx.x % 32; }
  static FMHA_DEVICE int32_t uniform(int32_t x) { return x; }
  static FMHA_DEVICE uint32_t ballot(bool x) { return ptx::vote_ballot(x); }
};

struct DataKeys : MaskClasses<WarpLanes> {
  static constexpr bool all = false, has_classes = true;
};

}  // namespace fmha
