// `fmha/row_lists_bwd.h` on waves: gradients over lists of keys, slowly. A wave to a row.
#pragma once
#include <fmha/row_lists_bwd.h>
#include <fmha/simt/bwd.h>

namespace fmha::simt {

template <BwdSpec spec>
FMHA_DEVICE void bwd_lists_stats(const BwdParams& p, const ListParams& lists) {
  bwd_stats<spec>(p, ListsOfRows{p.fwd, lists});
}

template <BwdSpec spec>
FMHA_DEVICE void bwd_lists(const BwdParams& p, const ListParams& lists) {
  const int64_t at = row_of_wave();
  if (at < num_bwd_rows<spec>(p)) bwd_lists_row<spec, Wave>(p, lists, at);
}

}  // namespace fmha::simt
