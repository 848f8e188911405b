// Dropout of a consumer thread's scores, decided by position alone.
#pragma once
#include <fmha/mma/sm90.cuh>
#include <fmha/philox.h>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/warp.cuh>

namespace fmha::sm90 {

namespace mma = fmha::mma::sm90;

// Which elements dropout zeros of a fragment of a block's `n` keys, known before the scores are.
//
// One call of the generator decides four keys of a row, and two neighbouring lanes hold two of them each. The
// even lane calls it for the upper row, the odd lane for the lower, and each hands the other its half: one call
// for a thread and 8-column group instead of two.
template <int n>
struct DroppedBits {
  static constexpr int groups_a_word = 16, num_words = ceil_div(n / 8, groups_a_word);
  // Of the thread's two rows, 16 8-column groups a word. Of group g the byte 2 (g % 2) has the first column, the byte
  // above it the second; in either the highest bit has the first two groups, and so on down.
  uint32_t words[2][num_words];

  // Of the first `count` keys. `i`, `batch_head`: of the two rows.
  template <int count>
  FMHA_DEVICE void decide(const FwdParams& p, const int32_t (&i)[2], const int32_t (&batch_head)[2], int32_t first_key) {
    static_assert(count % 16 == 0, "groups come in pairs");
    const int32_t lane = threadIdx.x % 4;
    const bool odd = lane & 1;
    // A word is dropped if it is not below the threshold: if the sum of it and this carries.
    const uint32_t complement = -p.dropout_threshold;
#pragma unroll
    for (int w = 0; w < ceil_div(count / 8, groups_a_word); ++w) {
      const int num_pairs = min(groups_a_word, count / 8 - w * groups_a_word) / 2;
      uint32_t bytes[2][4] = {};  // of this lane's row: the even lane's two keys, and the odd lane's
      int32_t quad = first_key / 4 + 2 * w * groups_a_word + lane / 2;
      // Four calls at a time are enough beside each other; all of a block's at once are more than the instruction cache
      // next to the warp holds.
      constexpr int calls = 4;
#pragma unroll 1
      for (int g = 0; g < 2 * num_pairs; g += calls) {
#pragma unroll
        for (int c = 0; c < calls; ++c, quad += 2) {
          const Array<uint32_t, 4> decided = dropout_words(p, odd ? batch_head[1] : batch_head[0], odd ? i[1] : i[0], quad);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            uint32_t& byte = bytes[k / 2][2 * (c % 2) + k % 2];
            byte = ptx::shift_in_carry(byte, decided[k], complement);
          }
        }
      }
      uint32_t called[2];
#pragma unroll
      for (int l = 0; l < 2; ++l) {
        called[l] = (bytes[l][0] + (bytes[l][1] << 8) + (bytes[l][2] << 16) + (bytes[l][3] << 24)) << (8 - round_up(num_pairs, calls / 2));
      }
      const uint32_t other = ptx::shfl_xor(odd ? called[0] : called[1], 1), own = odd ? called[1] : called[0];
      words[0][w] = odd ? other : own;
      words[1][w] = odd ? own : other;
    }
  }

  // Ones over group g of row r, its two columns 16 bits each, where they are dropped.
  FMHA_DEVICE uint32_t mask(int r, int g) const {
    const uint32_t pair = words[r][g / groups_a_word] << g % groups_a_word / 2;
    return ptx::prmt(pair, pair, g % 2 == 0 ? 0x9988 : 0xbbaa);  // the sign of a byte all over a byte
  }

  // P of 16 bits without what is dropped.
  template <int depth>
  FMHA_DEVICE void drop(mma::RegisterTile<uint16_t, depth>& probs, int count) const {
#pragma unroll
    for (int i = 0; i < depth / 4; ++i) {
      if (i < count / 4) probs.elems[i / 4][i % 4] &= ~mask(i % 2, i / 2);
    }
  }
  // P before it is packed.
  template <int count>
  FMHA_DEVICE void drop(mma::Accumulator<count>& probs) const {
#pragma unroll
    for (int e = 0; e < probs.num_elems; ++e) {
      if (mask(probs.row(e), e / 4) >> 16 * (e & 1) & 1) probs[e] = 0.f;
    }
  }
};

}  // namespace fmha::sm90
