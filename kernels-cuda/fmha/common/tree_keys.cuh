// Tree masks for speculative tokens, where a token may have several successors. A sequence's last keys, as many as it
// has queries, are those tokens' own: a query sees those whose bits are set, and it sees all earlier keys.
#pragma once
#include <fmha/num.h>
#include <fmha/seq.h>
#include <fmha/tree_mask.h>

namespace fmha {

struct TreeKeys {
  static constexpr bool all = false, has_classes = false;
  const TreeMask& mask;

  // Reads the last existing bit for rows and keys beyond the sequence, which other tests hide.
  FMHA_DEVICE bool sees(const SeqSpan& span, int32_t, int32_t i, int32_t j) const {
    const int32_t bit = min(j + span.seqlen_q - span.seqlen_k, span.seqlen_q - 1);
    if (bit < 0) return true;
    const int64_t row = int64_t(span.storage_batch) * mask.rows + span.q_row + min(i, span.seqlen_q - 1);
    return uint32_t(mask.words[row * mask.row_words + bit / 32]) >> (bit % 32) & 1;
  }
};

}  // namespace fmha
