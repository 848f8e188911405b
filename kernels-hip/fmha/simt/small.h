// `fmha/row_small.h` on waves: small outputs of the forward, behind whichever kernel writes O. A wave to a row.
#pragma once
#include <fmha/mask_data.h>
#include <fmha/row_small.h>
#include <fmha/simt/bwd.h>

namespace fmha::simt {

template <FwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void small_rows(const FwdParams& p, const SmallParams& small, const Masks& masks = {}) {
  const int64_t at = row_of_wave();
  if (at < num_small_rows(p)) small_row<spec, Wave>(p, small, at, masks);
}

template <FwdSpec spec>
FMHA_DEVICE void small_heads(const FwdParams& p, const SmallParams& small) {
  const int64_t at = row_of_wave();
  if (at < p.num_heads_q) small_head<spec, Wave>(p, small, int32_t(at));
}

template <FwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void small_keys(const FwdParams& p, const SmallParams& small, const Masks& masks = {}) {
  const int64_t at = row_of_wave();
  if (at < num_small_keys(p)) small_key<spec, Wave>(p, small, at, masks);
}

}  // namespace fmha::simt
