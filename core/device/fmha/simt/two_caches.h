// Runs `fmha/row_two_caches.h`, two caches in one softmax, on a vendor's lanes, slowly.
#pragma once
#include <fmha/row_two_caches.h>
#include <fmha/simt/fwd.h>

namespace fmha::simt {

template <FwdSpec spec>
FMHA_DEVICE void fwd_two_caches(const FwdParams& p, const TwoCachesParams& caches) {
  for_each_row(num_fwd_rows(p), [&](int64_t at) { two_caches_row<spec, Lanes>(p, caches, at); });
}

}  // namespace fmha::simt
