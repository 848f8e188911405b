// Masks of a pair in addition to the band: masks as data, or none. A row kernel is compiled for one of the two.
#pragma once
#include <fmha/seq.h>

namespace fmha {

// Stands for the masks of a call without masks as data.
struct NoMasks {
  static constexpr bool all = true;
  FMHA_DEVICE bool sees(const SeqSpan&, int32_t, int32_t, int32_t) const { return true; }
};

}  // namespace fmha
