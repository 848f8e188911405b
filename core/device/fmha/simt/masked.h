// Runs the forward and backward of `fmha/simt` under masks as data, which are a separate kernel argument.
#pragma once
#include <fmha/mask_data.h>
#include <fmha/simt/bwd.h>

namespace fmha::simt {

template <FwdSpec spec>
FMHA_DEVICE void masked_fwd(const FwdParams& p, const MaskDataParams& masks) {
  fwd<spec>(p, DataMasks{masks});
}

template <BwdSpec spec>
FMHA_DEVICE void masked_bwd_stats(const BwdParams& p, const MaskDataParams& masks) {
  bwd_stats<spec>(p, DataMasks{masks});
}

template <BwdSpec spec>
FMHA_DEVICE void masked_bwd(const BwdParams& p, const MaskDataParams& masks) {
  bwd<spec>(p, DataMasks{masks});
}

}  // namespace fmha::simt
