// Runs `fmha/simt/fwd.h` with scales by blocks, which are a separate kernel argument.
#pragma once
#include <fmha/block_scales.h>
#include <fmha/simt/fwd.h>

namespace fmha::simt {

template <FwdSpec spec>
FMHA_DEVICE void scaled_fwd(const FwdParams& p, const BlockScaleParams& scales) {
  fwd<spec>(p, NoMasks{}, ScaledElems{scales});
}

}  // namespace fmha::simt
