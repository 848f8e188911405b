// A sum of exponentials of real numbers of any size, stored as exp(top) * sum with the largest exponent as `top`.
//
// Differences are taken before the multiplication by log2(e). Numbers within a factor of two of each other have an
// exact difference, however large they are (Sterbenz). In this order the compiler cannot contract the subtraction and
// the multiplication into one multiply-add, whose product would be exact while `top` is rounded.
#pragma once
#include <fmha/portable.h>

namespace fmha {

// exp(x - from); 0 for an x of -infinity, whatever `from` is.
FMHA_DEVICE float exp_of_difference(float x, float from) {
  return x == -infinity() ? 0.f : exp2_of((x - from) * kLog2E);
}

struct ExpSum {
  float top = -infinity();
  float sum = 0.f;

  // Factor of the weighted sum so far when another term is added, and the weight of that term.
  struct Weights {
    float old, other;
  };

  FMHA_DEVICE Weights merge(const ExpSum& x) {
    const float higher = max(top, x.top);
    const Weights weights = {exp_of_difference(top, higher), exp_of_difference(x.top, higher)};
    sum = sum * weights.old + x.sum * weights.other;
    top = higher;
    return weights;
  }
  FMHA_DEVICE Weights add(float x) { return merge({x, 1.f}); }

  // Factor of the weighted sum at the end; 0 if there are no terms.
  FMHA_DEVICE float normaliser() const { return sum == 0.f ? 0.f : 1.f / sum; }
  FMHA_DEVICE float log() const { return sum == 0.f ? -infinity() : top + log2_of(sum) * kLn2; }
};

}  // namespace fmha
