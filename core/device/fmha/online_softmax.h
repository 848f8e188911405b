// The running softmax of one row (Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018), in base 2: scores arrive times log2(e).
#pragma once
#include <fmha/portable.h>

namespace fmha {

// The maximum is replaced by 0 in a row without visible keys: -inf - -inf would be NaN.
FMHA_DEVICE float finite_or_zero(float row_max) { return row_max == -infinity() ? 0.f : row_max; }

struct OnlineRow {
  float row_max = -infinity();  // of the scores so far, in log2
  float row_sum = 0.f;          // of exp2(score - row_max)

  // Factor of the output at the end; 0 for a row that has seen no key.
  FMHA_DEVICE float normaliser() const { return row_sum == 0.f ? 0.f : 1.f / row_sum; }

  // Natural log-sum-exp; -inf for a row that has seen no key.
  FMHA_DEVICE float lse() const {
    return row_sum == 0.f ? -infinity() : (row_max + log2_of(row_sum)) * kLn2;
  }
};

}  // namespace fmha
