// Dropout by position: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011), the same bits on every device.
#pragma once
#include <fmha/params.h>

namespace fmha {

FMHA_DEVICE Array<uint32_t, 4> philox4x32_10(Array<uint32_t, 4> counter, uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * counter[0];
    const uint64_t b = uint64_t(0xCD9E8D57u) * counter[2];
    counter = {{uint32_t(b >> 32) ^ counter[1] ^ key0, uint32_t(b),
                uint32_t(a >> 32) ^ counter[3] ^ key1, uint32_t(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Index `i_batch * num_heads_q + i_head` of a sequence and head, counted in the whole that the call is a part of. The
// functions below call it `batch_head`; their i and j count within the call.
FMHA_DEVICE int32_t head_of_whole(const FwdParams& p, int32_t i_batch, int32_t i_head) {
  return p.dropout_first_head + i_batch * p.dropout_num_heads + i_head;
}

// Random words of a group of four keys for query i: the group `j_quad` after that of the call's
// first key. If that key is the first of its group, these are keys 4 * j_quad .. 4 * j_quad + 3.
FMHA_DEVICE Array<uint32_t, 4> dropout_words(const FwdParams& p, int32_t batch_head, int32_t i, int32_t j_quad) {
  const int32_t quad = j_quad + p.dropout_first_quad, query = i + p.dropout_first_query;
  return philox4x32_10({{uint32_t(quad), uint32_t(query), uint32_t(batch_head), p.dropout_offset}},
                       p.dropout_key_low, p.dropout_key_high);
}

FMHA_DEVICE bool dropout_keeps(const FwdParams& p, int32_t batch_head, int32_t i, int32_t j) {
  const int32_t key = j + p.dropout_key_of_quad;
  return dropout_words(p, batch_head, i, key / 4)[key % 4] < p.dropout_threshold;
}

}  // namespace fmha
