// A word of a list of query blocks: the number of the block, and for each half of the tile's keys which of the block's
// queries see it.
#pragma once
#include <fmha/portable.h>

namespace fmha {

// The masks' result for a block of queries and half of a tile's keys: pairs must be tested, no query sees a key, or all
// queries see all keys.
enum class HalfSeen { Asked, None, Whole };

struct ListedBlock {
  static constexpr int kBits = 27;
  static constexpr int32_t kWhole = int32_t(HalfSeen::Whole) << kBits | int32_t(HalfSeen::Whole) << (kBits + 2);

  int32_t word;

  static FMHA_DEVICE int32_t seen(HalfSeen of_half, int half) { return int32_t(of_half) << (kBits + 2 * half); }
  FMHA_DEVICE int32_t block() const { return word & ((1 << kBits) - 1); }
  FMHA_DEVICE HalfSeen seen_by(int half) const { return HalfSeen(word >> (kBits + 2 * half) & 3); }
  FMHA_DEVICE bool is_whole() const { return (word & ~((1 << kBits) - 1)) == kWhole; }
};

}  // namespace fmha
