// `fmha/row_fwd.h` on waves: every spec of the contract, slowly.
#pragma once
#include <fmha/isa/lane.h>
#include <fmha/row_fwd.h>

namespace fmha::simt {

constexpr int kWavesPerGroup = 256 / kWaveSize;

struct Wave {
  static constexpr int32_t count = kWaveSize;
  static FMHA_DEVICE int32_t index() { return thread_idx() % kWaveSize; }
  static FMHA_DEVICE uint64_t ballot(bool x) { return v_cmp_ballot(x); }
  static FMHA_DEVICE float from(float x, int32_t lane) { return ds_bpermute_b32(lane, x); }
};

// A wave to a row.
template <FwdSpec spec, class Masks = NoMasks, class Elems = StoredElems>
FMHA_DEVICE void fwd(const FwdParams& p, const Masks& masks = {}, const Elems& elems = {}) {
  const int32_t i_wave = v_readfirstlane_b32(thread_idx() / kWaveSize);
  const int64_t at = int64_t(workgroup_idx()) * kWavesPerGroup + i_wave;
  if (at < num_fwd_rows(p)) fwd_row<spec, Wave>(p, at, masks, elems);
}

}  // namespace fmha::simt
