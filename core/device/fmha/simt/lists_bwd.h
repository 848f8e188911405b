// Runs `fmha/row_lists_bwd.h`, the gradients over lists of keys, on a vendor's lanes, slowly.
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
  for_each_row(num_bwd_rows<spec>(p), [&](int64_t at) { bwd_lists_row<spec, Lanes>(p, lists, at); });
}

}  // namespace fmha::simt
