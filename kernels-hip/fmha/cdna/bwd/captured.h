// Gradients of captured tensors: a workgroup owns queries, as for dQ, and adds to sums in memory what each pair of a
// query and a key adds to the elements that its score reads. Scores and dP are computed once more for it.
//
// A lane keeps the sum of the element to which it added last. Where a score reads one element of a head, each wave
// makes one addition to memory.
#pragma once
#include <fmha/amd/score.h>
#include <fmha/isa/atomic.h>
#include <fmha/isa/lane.h>

namespace fmha::cdna::bwd {

// A lane's sums that are not in memory yet, one for each captured element that the score reads.
struct CapturedSums {
  static constexpr int reads = code::kNumReads > 0 ? code::kNumReads : 1;
  int64_t element[reads];
  float sum[reads];

  FMHA_DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < reads; ++n) {
      element[n] = 0;
      sum[n] = 0.f;
    }
  }
  // Adds to element `at` of `sums`. A sum of 0 belongs to no element.
  FMHA_DEVICE void add(float* sums, int32_t n, int64_t at, float gradient) {
    if (at != element[n]) {
      if (sum[n] != 0.f) global_atomic_add_f32(sums + element[n], sum[n]);
      element[n] = at;
      sum[n] = 0.f;
    }
    sum[n] += gradient;
  }
  // Adds the remaining sums to memory. All lanes must call it.
  FMHA_DEVICE void finish(float* sums) {
#pragma unroll
    for (int n = 0; n < code::kNumReads; ++n) {
      const uint64_t lanes = v_cmp_ballot(sum[n] != 0.f);
      if (lanes == 0) continue;
      const int first = __builtin_ctzll(lanes);
      const int32_t low = v_readlane_b32(int32_t(element[n]), first);
      const int32_t high = v_readlane_b32(int32_t(element[n] >> 32), first);
      const int64_t of_first = int64_t(uint64_t(uint32_t(high)) << 32 | uint32_t(low));
      if (v_cmp_ballot(sum[n] != 0.f && element[n] != of_first) == 0) {
#pragma unroll
        for (int step = kWaveSize / 2; step > 0; step /= 2) {
          sum[n] += ds_bpermute_b32(thread_idx() % kWaveSize ^ step, sum[n]);
        }
        if (thread_idx() % kWaveSize == 0) global_atomic_add_f32(sums + of_first, sum[n]);
      } else if (sum[n] != 0.f) {
        global_atomic_add_f32(sums + element[n], sum[n]);
      }
    }
  }
};

// Adds what a pair contributes: `ds`, the gradient of its score as the softmax sees it, times the derivative of the
// score with respect to each captured element. `y` is the scaled product.
template <class Tanh>
FMHA_DEVICE void add_captured(CapturedSums& sums, const BwdParams& p, const SeqSpan& span, int32_t i_head, Pair pair,
                              float y, float ds) {
  const Functions functions = Functions::of(p.fwd, span, i_head);
  const float gradient = ds * slope_behind_functions<Tanh>(functions, p.fwd, span, i_head, pair, y);
  functions.slopes(pair, y, [&](int32_t n, int64_t at, float slope) __attribute__((always_inline)) {
    // 0 times an infinite derivative counts as 0: a hidden pair contributes nothing.
    sums.add(p.captured_sums, n, at, ds == 0.f ? 0.f : gradient * slope);
  });
}

}  // namespace fmha::cdna::bwd
