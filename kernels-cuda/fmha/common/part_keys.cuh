// Split-KV: how many keys a part of a sequence has.
#pragma once
#include <fmha/num.h>

namespace fmha {

// Keys of a part, whole blocks, where the longest sequence's are `num_parts`: shorter ones have as many parts of
// fewer keys, so that a bound on the lengths does not decide how many CTAs share the keys there are.
FMHA_DEVICE constexpr int32_t keys_of_a_part(int32_t seqlen_k, int32_t num_parts, int32_t block_n) {
  return round_up(max(ceil_div(seqlen_k, num_parts), 1), block_n);
}

}  // namespace fmha
