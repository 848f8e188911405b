// `fmha/row_lists.h` on waves: lists of keys, slowly.
#pragma once
#include <fmha/row_lists.h>
#include <fmha/simt/fwd.h>

namespace fmha::simt {

// A wave to a row.
template <FwdSpec spec>
FMHA_DEVICE void fwd_lists(const FwdParams& p, const ListParams& lists) {
  const int32_t i_wave = v_readfirstlane_b32(thread_idx() / kWaveSize);
  const int64_t at = int64_t(workgroup_idx()) * kWavesPerGroup + i_wave;
  if (at < num_fwd_rows(p)) list_row<spec, Wave>(p, lists, at);
}

}  // namespace fmha::simt
