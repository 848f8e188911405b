// Which keys of its band a query sees: all of them, or fewer (tree_keys.cuh).
#pragma once
#include <fmha/seq.h>

namespace fmha {

struct EveryKey {
  static constexpr bool all = true;
  FMHA_DEVICE bool sees(const SeqSpan&, int32_t, int32_t) const { return true; }
};

}  // namespace fmha
