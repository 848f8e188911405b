// Runs `fmha/row_lists.h`, the forward over lists of keys, on a vendor's lanes, slowly.
#pragma once
#include <fmha/row_lists.h>
#include <fmha/simt/fwd.h>

namespace fmha::simt {

template <FwdSpec spec>
FMHA_DEVICE void fwd_lists(const FwdParams& p, const ListParams& lists) {
  for_each_row(num_fwd_rows(p), [&](int64_t at) { list_row<spec, Lanes>(p, lists, at); });
}

}  // namespace fmha::simt
