// A launch that evaluates a mask as code once for all heads and writes one bit for each query and key, a row of words
// for each query, as masks as data have them. No later kernel then evaluates the function.
#pragma once
#include <fmha/mask_data.h>
#include <fmha/score.h>
#include <fmha/tile_list.h>

namespace fmha {

struct FunctionBits {
  // A warp computes `words` words for each of 32 queries; each lane has one query.
  static constexpr int32_t words = 8, rows = 32;

  const FwdParams& p;
  const MaskDataParams& masks;

  // Writes the words of every query that the sequence has. `num_words` is the length of a row in words, a multiple of
  // four.
  FMHA_DEVICE void run(QLayout q_layout, KvKind kv_layout, int32_t num_words) const {
    const int32_t warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t parts = max(ceil_div(num_words, words), 1), groups = max(ceil_div(p.seqlen_q, rows), 1);
    const int32_t group = warp / parts, i_batch = group / groups;
    const SeqSpan span = resolve_seq(p, q_layout, kv_layout, min(i_batch, p.batch - 1));
    const int32_t first_row = (group - i_batch * groups) * rows, first_word = (warp - group * parts) * words;
    const Range own = {first_row, min(first_row + rows, span.seqlen_q)};
    const int32_t end_key = min(32 * (first_word + words), span.seqlen_k);
    if (i_batch >= p.batch || own.empty() || end_key <= 32 * first_word) return;
    const Functions functions = Functions::of(p, span, 0);
    const int32_t row = min(first_row + lane, own.end - 1);
    const int64_t place = i_batch * masks.bits.batch + row * masks.bits.row + first_word;
    int32_t* to = const_cast<int32_t*>(masks.bits.data) + place;
    // Bounds of the function, first over all of the warp's words and then over each word, make most pairs' evaluation
    // unnecessary.
    const expr::Bound all = functions.shows_of(own, {32 * first_word, end_key});
    const bool is_known = all.lo >= 1 || all.hi <= 0;
    uint32_t four[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int32_t w = 0; w < words; ++w) {
      const int32_t first = 32 * (first_word + w);
      expr::Bound seen = all;
      if (!is_known && first < end_key) seen = functions.shows_of(own, {first, min(first + 32, end_key)});
      uint32_t shown = seen.lo >= 1 ? ~0u : 0u;
      if (seen.lo < 1 && seen.hi > 0 && first < end_key) {
        shown = 0;
#pragma unroll
        for (int32_t j = 0; j < 32; ++j) shown |= uint32_t(functions.shows({row, first, 0, j})) << j;
      }
      // Keeps the last four words in order. An array that a variable indexes would go to local memory.
      four[0] = four[1];
      four[1] = four[2];
      four[2] = four[3];
      four[3] = shown;
      // Lanes beyond the last row write the last row's words again.
      if (w % 4 == 3 && first_word + w < num_words) {
        *reinterpret_cast<uint4*>(to + w - 3) = {four[0], four[1], four[2], four[3]};
      }
    }
  }
};

}  // namespace fmha
