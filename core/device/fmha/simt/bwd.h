// Runs `fmha/row_bwd.h` on a vendor's lanes (`fmha/simt/lanes.h`): it computes every backward spec of the contract,
// slowly.
#pragma once
#include <fmha/row_bwd.h>
#include <fmha/simt/fwd.h>

namespace fmha::simt {

// First launch: LSE and delta of the queries.
template <BwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void bwd_stats(const BwdParams& p, const Masks& masks = {}) {
  for_each_row(num_query_rows(p), [&](int64_t at) { fmha::bwd_stats<spec, Lanes>(p, at, masks); });
}

// Second launch: every gradient.
template <BwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void bwd(const BwdParams& p, const Masks& masks = {}) {
  for_each_row(num_bwd_rows<spec>(p), [&](int64_t at) { bwd_row<spec, Lanes>(p, at, masks); });
}

// Third launch, if captured tensors have gradients: one element a lane.
template <BwdSpec spec>
FMHA_DEVICE void bwd_captured(const BwdParams& p) {
  for_each_element(p.captured_elems, [&](int64_t at) { bwd_captured_element(p, at); });
}

}  // namespace fmha::simt
