// Dropout of a consumer thread's scores, decided by position alone.
#pragma once
#include <fmha/mma/sm90.cuh>
#include <fmha/philox.h>
#include <fmha/ptx/warp.cuh>

namespace fmha::sm90 {

namespace mma = fmha::mma::sm90;

// Zeros what dropout drops of a fragment of P. `i`, `batch_head`: of the thread's two rows.
//
// One call of the generator decides four keys of a row, and two neighbouring lanes hold two of them each. The
// even lane calls it for the upper row, the odd lane for the lower, and each hands the other its half: one call
// for a thread and 8-column group instead of two.
template <int n>
FMHA_DEVICE void drop(mma::Accumulator<n>& probs, const FwdParams& p, const int32_t (&i)[2],
                      const int32_t (&batch_head)[2], int32_t first_key) {
  constexpr int num_groups = n / 8, groups_a_word = 8;
  const int32_t lane = threadIdx.x % 4;
  const bool odd = lane & 1;
#pragma unroll
  for (int first = 0; first < num_groups; first += groups_a_word) {
    constexpr auto bits = 4;
    uint32_t mine = 0;  // four bits a group: of this lane's row, keys of both lanes
#pragma unroll
    for (int g = first; g < min(first + groups_a_word, num_groups); ++g) {
      Array<uint32_t, 4> words =
          dropout_words(p, odd ? batch_head[1] : batch_head[0], odd ? i[1] : i[0], first_key / 4 + 2 * g + lane / 2);
#pragma unroll
      for (int k = 0; k < 4; ++k) mine |= uint32_t(words[k] < p.dropout_threshold) << (bits * (g - first) + k);
    }
    const uint32_t other = ptx::shfl_xor(mine, 1);
    const uint32_t kept[2] = {odd ? other : mine, odd ? mine : other};
#pragma unroll
    for (int g = first; g < min(first + groups_a_word, num_groups); ++g) {
#pragma unroll
      for (int e = 4 * g; e < 4 * g + 4; ++e) {
        const int at = bits * (g - first) + (e & 1);
        if (!(kept[probs.row(e)] >> (odd ? at + 2 : at) & 1)) probs[e] = 0.f;
      }
    }
  }
}

}  // namespace fmha::sm90
