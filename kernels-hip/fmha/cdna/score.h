// The scores of an MFMA accumulator between Q K^T and the softmax.
#pragma once
#include <fmha/amd/score.h>
#include <fmha/cdna/tile.h>
#include <fmha/mma/cdna.h>

namespace fmha::cdna {

using Tanh = BranchlessTanh<VectorUnit>;

// The query of a lane, and the ends of the keys by length.
struct ScorePlace {
  int32_t i_batch, i_head, query, seqlen_q, seqlen_k;
};

// A lane's scores: of one query, keys along the registers.
struct BlockOfScores {
  static constexpr int count = 16;
  Acc& scores;
  int32_t query, first_key;

  FMHA_DEVICE float at(int e) const { return scores[e]; }
  FMHA_DEVICE void set(int e, float x) { scores[e] = x; }
  FMHA_DEVICE void add(int e, float x) { scores[e] += x; }
  FMHA_DEVICE void multiply_slope(int, float) {}
  FMHA_DEVICE void forget_place() {}
  FMHA_DEVICE Pair pair(int e) const { return {query, first_key + acc_row(e, 0)}; }
};

// Converts a block of raw scores to natural scores. `first_key` is the lane's first key.
template <bool hides = true>
FMHA_DEVICE void modify_block(Acc& scores, const CdnaParams& params, const ScorePlace& at, float scale,
                              int32_t first_key) {
  scores *= scale;
  const SeqSpan span = {at.i_batch, 0, 0, at.seqlen_q, 0, at.seqlen_k};
  apply_given<Tanh, hides>(BlockOfScores{scores, at.query, first_key}, params.fwd, DType(params.dtype_bias), span, at.i_head);
}

}  // namespace fmha::cdna
