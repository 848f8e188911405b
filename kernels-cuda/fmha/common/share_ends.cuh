// Split-KV in equal shares (shares.cuh): where each stretch begins.
#pragma once
#include <fmha/num.h>

namespace fmha {

// The row of `total` blocks in stretches: the first `longer` of them have a block more than `each`.
struct Shares {
  int32_t each, longer;

  // To as many of `num_ctas` CTAs as have `least` blocks.
  FMHA_DEVICE static Shares of(int32_t total, int32_t num_ctas, int32_t least) {
    const int32_t takers = clamp(total / max(least, 1), 1, num_ctas);
    const int32_t each = total / takers;
    return {each, total - each * takers};
  }
  FMHA_DEVICE int32_t begin(int32_t cta) const { return cta * each + min(cta, longer); }
  // Number of the CTA that walks a block.
  FMHA_DEVICE int32_t owner(int32_t block) const {
    const int32_t of_longer = longer * (each + 1);
    return block < of_longer ? block / (each + 1) : longer + (block - of_longer) / max(each, 1);
  }
};

}  // namespace fmha
