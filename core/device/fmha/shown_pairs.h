// Masks as data, and a mask as code beside them, asked pair by pair.
#pragma once
#include <fmha/mask_data.h>
#include <fmha/score.h>

namespace fmha {

// Masks that decide on a pair, asked alone. `has_function`: a mask as code joins the masks as data.
template <bool has_function>
struct ShownPairs {
  static constexpr bool all = false, has_classes = false, has_tile_list = false;
  DataMasks masks;
  const FwdParams& p;

  FMHA_DEVICE bool sees(const SeqSpan& span, int32_t i_head, int32_t i, int32_t j) const {
    if constexpr (!has_function) return masks.sees(span, i_head, i, j);
    const DataMasks::Shown shown = masks.shown(span, i_head, i, j);
    return shown == DataMasks::Shown::Full ||
           (shown == DataMasks::Shown::Asked && Functions::of(p, span, i_head).shows({i, j}));
  }
};

}  // namespace fmha
