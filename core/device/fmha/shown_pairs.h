// Masks as data, and a mask as code in addition, evaluated pair by pair.
#pragma once
#include <fmha/mask_data.h>
#include <fmha/score.h>

namespace fmha {

// Masks that decide on a pair, evaluated singly. `has_function`: a mask as code joins the masks as data.
template <bool has_function>
struct ShownPairs {
  static constexpr bool all = false, has_classes = false, has_tile_list = false;
  DataMasks masks;
  const FwdParams& p;

  FMHA_DEVICE bool sees(const SeqSpan& span, int32_t i_head, int32_t i, int32_t j) const {
    if constexpr (!has_function) return masks.sees(span, i_head, i, j);
    const DataMasks::Shown shown = masks.shown(span, i_head, i, j);
    // The function is evaluated without a branch around it: with one, pairs that it shows were hidden (clang 22,
    // gfx942; cause unknown).
    const int32_t shows = Functions::of(p, span, i_head).shows({i, j});
    return (int32_t(shown == DataMasks::Shown::Full) | (int32_t(shown == DataMasks::Shown::Asked) & shows)) != 0;
  }
};

}  // namespace fmha
