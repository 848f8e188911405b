// Random words of dropout for four adjacent keys, also where a call's first key is no multiple of four in the whole
// that the call is a part of.
#pragma once
#include <fmha/philox.h>

namespace fmha {

// The words of keys j .. j + 3 of the call for query i, j a multiple of 4; `batch_head`
// is head_of_whole's (philox.h). One call of the generator if the attention call begins
// at a group of four of the whole; otherwise two, whose words are shifted into place.
FMHA_DEVICE Array<uint32_t, 4> dropout_words_of_keys(const FwdParams& p, int32_t batch_head, int32_t i, int32_t j) {
  Array<uint32_t, 4> words = dropout_words(p, batch_head, i, j / 4);
  const int32_t first = p.dropout_key_of_quad;
  if (first) {
    const Array<uint32_t, 4> next = dropout_words(p, batch_head, i, j / 4 + 1);
    Array<uint32_t, 7> both = {{words[0], words[1], words[2], words[3], next[0], next[1], next[2]}};
#pragma unroll
    for (int r = 0; r < 5; ++r) both[r] = first & 2 ? both[r + 2] : both[r];
#pragma unroll
    for (int r = 0; r < 4; ++r) words[r] = first & 1 ? both[r + 1] : both[r];
  }
  return words;
}

}  // namespace fmha
