// Which columns of a thread's row are visible, one bit each.
#pragma once
#include <fmha/portable.h>

namespace fmha::sm100 {

// Bits of the visible columns of a row, n columns from `first` on.
template <int n>
struct ShownColumns {
  static_assert(n % 32 == 0, "words have 32 columns");
  static constexpr int num_words = n / 32;
  uint32_t words[num_words];

  FMHA_DEVICE static ShownColumns all(bool shown) {
    ShownColumns x;
#pragma unroll
    for (int w = 0; w < num_words; ++w) x.words[w] = shown ? ~0u : 0u;
    return x;
  }
  FMHA_DEVICE bool has(int e) const { return words[e / 32] >> e % 32 & 1; }
  // The lowest `count` bits, which may be below 0 or above 32.
  FMHA_DEVICE static uint32_t below(int32_t count) {
    return count <= 0 ? 0u : count >= 32 ? ~0u : (1u << count) - 1;
  }
  // Adds the columns from `begin` to `end`.
  FMHA_DEVICE void add(int32_t begin, int32_t end) {
#pragma unroll
    for (int w = 0; w < num_words; ++w) words[w] |= below(end - 32 * w) & ~below(begin - 32 * w);
  }
  FMHA_DEVICE void leave(const ShownColumns& others) {
#pragma unroll
    for (int w = 0; w < num_words; ++w) words[w] &= others.words[w];
  }
};

}  // namespace fmha::sm100
