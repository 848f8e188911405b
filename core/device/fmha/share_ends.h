// Split-KV in equal shares: where each stretch of all sequences' blocks of keys begins, and its part of a tile.
#pragma once
#include <fmha/portable.h>

namespace fmha {

// Division of a sequence of `total` blocks into stretches: the first `longer` stretches have one block more than
// `each`.
struct Shares {
  int32_t each, longer;

  // Divides blocks into at most `most` shares, each with at least `least` blocks.
  FMHA_DEVICE static Shares of(int32_t total, int32_t most, int32_t least) {
    const int32_t takers = clamp(total / max(least, 1), 1, most);
    const int32_t each = total / takers;
    return {each, total - each * takers};
  }
  FMHA_DEVICE int32_t begin(int32_t taker) const { return taker * each + min(taker, longer); }
  // Number of the stretch that has a block.
  FMHA_DEVICE int32_t owner(int32_t block) const {
    const int32_t of_longer = longer * (each + 1);
    return block < of_longer ? block / (each + 1) : longer + (block - of_longer) / max(each, 1);
  }
};

// Number of the part that a stretch has of a tile, one of the `tiles` of sequence `i_batch`: part n of a tile is that
// of stretch s and sequence b with s + b = n, and the n-th parts of all tiles lie side by side.
template <class Number = int32_t>
FMHA_DEVICE Number part_of_tile(int32_t stretch, int32_t i_batch, int32_t tiles, int32_t tile) {
  return Number(stretch + i_batch) * tiles + tile;
}

}  // namespace fmha
