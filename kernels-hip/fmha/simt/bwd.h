// `fmha/row_bwd.h` on waves: every backward spec of the contract, slowly. A wave to a row.
#pragma once
#include <fmha/row_bwd.h>
#include <fmha/simt/fwd.h>

namespace fmha::simt {

FMHA_DEVICE int64_t row_of_wave() {
  return int64_t(workgroup_idx()) * kWavesPerGroup + v_readfirstlane_b32(thread_idx() / kWaveSize);
}

// The first launch.
template <BwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void bwd_stats(const BwdParams& p, const Masks& masks = {}) {
  const int64_t at = row_of_wave();
  if (at < num_query_rows(p)) fmha::bwd_stats<spec, Wave>(p, at, masks);
}

// The second.
template <BwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void bwd(const BwdParams& p, const Masks& masks = {}) {
  const int64_t at = row_of_wave();
  if (at < num_bwd_rows<spec>(p)) bwd_row<spec, Wave>(p, at, masks);
}

// The third, where captured tensors have gradients: an element a lane.
template <BwdSpec spec>
FMHA_DEVICE void bwd_captured(const BwdParams& p) {
  const int64_t at = row_of_wave() * kWaveSize + thread_idx() % kWaveSize;
  if (at < p.captured_elems) bwd_captured_element(p, at);
}

}  // namespace fmha::simt
