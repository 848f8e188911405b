// Decides which of a thread's probabilities dropout sets to zero, from their positions alone.
#pragma once
#include <fmha/common/philox_parts.cuh>
#include <fmha/mma/fragment.cuh>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/ptx/warp.cuh>

namespace fmha {

// Part of the random generator's work that one group of four keys has in common for every query of a head
// (dropout_quad). Each warp keeps those of 128 keys in shared memory.
struct alignas(16) DropoutQuad {
  Array<uint32_t, 4> words;
};
using DropoutQuads = DropoutQuad[32];

// Up to 23 bits in an f32 between 2^23 and 2^24: adding a power of two sets a bit that is not set yet. A predicated
// addition does so in the floating-point pipe, so that the integer pipe stays free for the generator's XORs.
struct CountedBits {
  float sum = 0x1p23f;

  FMHA_DEVICE void set_if_ge(int bit, uint32_t a, uint32_t b) { ptx::add_if_ge(sum, float(1 << bit), a, b); }
  template <int count>
  FMHA_DEVICE void shift() {
    sum = fmaf(sum, float(1 << count), 0x1p23f - 0x1p23f * (1 << count));
  }
  // Returns the bits as a word. Bits 23 and higher have no meaning.
  FMHA_DEVICE uint32_t word() const { return bits_of(sum); }
};

// Tells which elements of a fragment of `n` keys dropout sets to zero. It needs positions alone, so it is computed
// before the scores.
//
// One call of the generator decides four keys of a row, and two neighbouring lanes hold two of them each. The
// even lane calls it for the upper row, the odd lane for the lower, and each hands the other its half: one call
// for a thread and 8-column group instead of two.
template <int n>
struct DroppedBits {
  static constexpr int groups_a_word = 16, num_words = ceil_div(n / 8, groups_a_word);
  // Bits of the thread's two rows, 16 8-column groups to a word. Byte 2 (g % 2) holds the first column of group g,
  // the byte above it the second column. The highest bit of a byte belongs to the first two groups, the next bit to
  // the next two, and so on.
  uint32_t words[2][num_words];

  // Draws which probabilities of the block's first `count` keys dropout sets to zero. `i` and `batch_head` are the
  // queries and heads of the thread's two rows; with `one_head` all rows of the warp have one head.
  template <int count, bool one_head>
  FMHA_DEVICE void decide(const FwdParams& p, DropoutQuads& quads, const int32_t (&i)[2], const int32_t (&batch_head)[2],
                          int32_t first_key) {
    static_assert(count % 16 == 0, "groups come in pairs");
    const int32_t lane = threadIdx.x % 4;
    const bool odd = lane & 1;
    const int32_t own_head = odd ? batch_head[1] : batch_head[0];
    const Array<uint32_t, 2> row = dropout_row(p, own_head, odd ? i[1] : i[0]);
#pragma unroll
    for (int w = 0; w < ceil_div(count / 8, groups_a_word); ++w) {
      const int num_pairs = min(groups_a_word, count / 8 - w * groups_a_word) / 2;
      // Bits of this lane's row: the even lane's two keys, then the odd lane's; for each lane the lower half of a
      // word, then the upper half. Not [2][2]: NVRTC (12.9, 13.0, 13.3) gives the first row of such an array its
      // initial value and the other row 0.
      CountedBits called[4];
      const int32_t first_quad = first_key / 4 + 2 * w * groups_a_word;
      if constexpr (one_head) {
        __syncwarp();
        quads[threadIdx.x % 32].words = dropout_quad(p, own_head, first_quad + threadIdx.x % 32);
        __syncwarp();
      }
      int32_t quad = lane / 2;
      // Four calls of the generator at a time: their latencies overlap, and the code still fits the warp's instruction
      // cache, which all calls of a block would not.
      constexpr int calls = 4;
#pragma unroll 1
      for (int g = 0; g < 2 * num_pairs; g += calls, quad += 2 * calls) {
        Array<uint32_t, 4> decided[calls];
#pragma unroll
        for (int c = 0; c < calls; ++c)
          decided[c] = one_head ? quads[quad + 2 * c].words : dropout_quad(p, own_head, first_quad + quad + 2 * c);
        dropout_words(decided, p, row);
#pragma unroll
        for (CountedBits& half : called) half.template shift<calls / 2>();
#pragma unroll
        for (int c = 0; c < calls; ++c) {
#pragma unroll
          for (int k = 0; k < 4; ++k)
            called[k / 2 * 2 + c % 2].set_if_ge(8 * (k % 2) + calls / 2 - 1 - c / 2, decided[c][k], p.dropout_threshold);
        }
      }
      const uint32_t shift = 8 - round_up(num_pairs, calls / 2);
      uint32_t of_lane[2];
#pragma unroll
      for (int l = 0; l < 2; ++l) of_lane[l] = ptx::prmt(called[2 * l].word(), called[2 * l + 1].word(), 0x5410) << shift;
      const uint32_t other = ptx::shfl_xor(odd ? of_lane[0] : of_lane[1], 1), own = odd ? of_lane[1] : of_lane[0];
      words[0][w] = odd ? other : own;
      words[1][w] = odd ? own : other;
    }
  }

  // Two 16-bit masks, one for each of the thread's two columns in 8-column group g of row r: ones where dropout drops
  // the element.
  FMHA_DEVICE uint32_t mask(int r, int g) const {
    const uint32_t pair = words[r][g / groups_a_word] << g % groups_a_word / 2;
    return ptx::prmt(pair, pair, g % 2 == 0 ? 0x9988 : 0xbbaa);  // the sign of a byte all over a byte
  }

  // Sets dropped elements of a 16-bit P to 0.
  template <int depth>
  FMHA_DEVICE void drop(mma::RegisterTile<uint16_t, depth>& probs, int count) const {
#pragma unroll
    for (int i = 0; i < depth / 4; ++i) {
      if (i < count / 4) probs.elems[i / 4][i % 4] &= ~mask(i % 2, i / 2);
    }
  }
  // Applies dropout to P before it is packed.
  template <int count>
  FMHA_DEVICE void drop(mma::Accumulator<count>& probs) const {
#pragma unroll
    for (int e = 0; e < probs.num_elems; ++e) {
      if (mask(probs.row(e), e / 4) >> 16 * (e & 1) & 1) probs[e] = 0.f;
    }
  }
};

}  // namespace fmha
