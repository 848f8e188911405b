// The fold of a row's parts, where keys are cut after a fixed number of them whatever the call (CONTRACT.md, "Order of
// the keys"): one part after another, from the last keys to the first, which is how tiles walk blocks.
//
// A kernel that walks all parts of its rows folds them as it goes (sm90/fwd/folded_output.cuh); else a launch behind
// the parts does (fold_parts.cuh). Both are made of the operations below, whose roundings are all written out, so a row
// has the same bits by either.
//
// A row of one part keeps that part's bits: the fold of no parts is -0, of which a weight of 0 is -0, and the weight of
// the first part is 1. O is normalised after each part. Unnormalised it could leave f32 where the row's O does not.
#pragma once
#include <fmha/num.h>
#include <fmha/online_softmax.h>

namespace fmha {

// A special LSE, a NaN that no instruction produces. A part stores it for a row that must be recomputed over the keys
// of all parts.
constexpr uint32_t kAgainBits = 0x7fc0f01du;

// Factors by which the merge multiplies the sum of the parts so far, and the next part.
struct FoldWeights {
  float old, part;
};

struct FoldedRow {
  float top = -infinity();  // the largest LSE
  float sum = 0.f;          // of exp(LSE - top)

  // Exponentials of the largest LSE before a part and of the part's own LSE, both relative to `next`, the larger of the
  // two. A part in which the row sees no key leaves the fold as it is.
  FMHA_DEVICE static FoldWeights exponentials(float top, float next, float lse) {
    if (lse == -infinity()) return {1.f, 0.f};
    const float reference = finite_or_zero(next);
    return {exp2_of(__fmul_rn(__fsub_rn(top, reference), kLog2E)),
            exp2_of(__fmul_rn(__fsub_rn(lse, reference), kLog2E))};
  }
  // Adds a part to the fold. `exponentials` are those of the fold so far and of the part.
  FMHA_DEVICE FoldWeights add(const FoldWeights& exponentials) {
    const float before = __fmul_rn(sum, exponentials.old);
    sum = __fadd_rn(before, exponentials.part);
    const float per_sum = __frcp_rn(sum);
    if (exponentials.part == 0.f && exponentials.old == 1.f) return {1.f, 0.f};
    return {__fmul_rn(before, per_sum), __fmul_rn(exponentials.part, per_sum)};
  }
  // Adds a part with log-sum-exp `lse` to the fold.
  FMHA_DEVICE FoldWeights take(float lse) {
    const float next = fmaxf(top, lse);
    const FoldWeights exps = exponentials(top, next, lse);
    top = next;
    return add(exps);
  }
  // Natural log-sum-exp of all parts.
  FMHA_DEVICE float lse() const { return sum == 0.f ? -infinity() : __fmaf_rn(log2_of(sum), kLn2, top); }
};

// A part's element of O for the merge: 0 if the row sees no key of the part, whatever memory holds.
FMHA_DEVICE float element_of_part(float normalised, bool seen) { return seen ? normalised : -0.f; }

FMHA_DEVICE float fold(float old, float part, const FoldWeights& weights) {
  return __fmaf_rn(weights.part, part, __fmul_rn(old, weights.old));
}

}  // namespace fmha
