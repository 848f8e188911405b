// Split-KV: how many keys a part of a sequence has.
#pragma once
#include <fmha/num.h>

namespace fmha {

// Keys of one part, in whole blocks, of a sequence whose longest companion is split into `num_parts`. A shorter
// sequence has as many parts with fewer keys, so that the number of CTAs that share its keys does not depend on the
// bound of the lengths.
FMHA_DEVICE constexpr int32_t keys_of_a_part(int32_t seqlen_k, int32_t num_parts, int32_t block_n) {
  return round_up(max(ceil_div(seqlen_k, num_parts), 1), block_n);
}

}  // namespace fmha
