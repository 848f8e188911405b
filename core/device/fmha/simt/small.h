// Runs `fmha/row_small.h` on a vendor's lanes: small outputs of the forward, after whichever kernel writes O.
#pragma once
#include <fmha/row_small.h>
#include <fmha/shown_pairs.h>
#include <fmha/simt/lanes.h>

namespace fmha::simt {

template <FwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void small_rows(const FwdParams& p, const SmallParams& small, const Masks& masks = {}) {
  for_each_row(num_small_rows(p), [&](int64_t at) { small_row<spec, Lanes>(p, small, at, masks); });
}

template <FwdSpec spec>
FMHA_DEVICE void small_heads(const FwdParams& p, const SmallParams& small) {
  for_each_row(p.num_heads_q, [&](int64_t at) { small_head<spec, Lanes>(p, small, int32_t(at)); });
}

template <FwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void small_keys(const FwdParams& p, const SmallParams& small, const Masks& masks = {}) {
  for_each_row(num_small_keys(p), [&](int64_t at) { small_key<spec, Lanes>(p, small, at, masks); });
}

}  // namespace fmha::simt
