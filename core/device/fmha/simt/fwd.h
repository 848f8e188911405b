// Runs `fmha/row_fwd.h` on a vendor's lanes (`fmha/simt/lanes.h`): it computes every spec of the contract, slowly.
#pragma once
#include <fmha/row_fwd.h>
#include <fmha/simt/lanes.h>

namespace fmha::simt {

template <FwdSpec spec, class Masks = NoMasks, class Elems = StoredElems>
FMHA_DEVICE void fwd(const FwdParams& p, const Masks& masks = {}, const Elems& elems = {}) {
  for_each_row(num_fwd_rows(p), [&](int64_t at) { fwd_row<spec, Lanes>(p, at, masks, elems); });
}

}  // namespace fmha::simt
