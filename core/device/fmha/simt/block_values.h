// Runs `fmha/block_values.h` on a vendor's lanes.
#pragma once
#include <fmha/block_values.h>
#include <fmha/simt/lanes.h>

namespace fmha::simt {

template <BlockValuesSpec spec>
FMHA_DEVICE void write_values(const FwdParams& p, const BlockScaleParams& scales, const BlockValuesParams& to) {
  const block_values::Write<spec> of = {p, scales, to};
  for_each_element(of.num_units(), [&](int64_t unit) { of.write(unit); });
}

}  // namespace fmha::simt
