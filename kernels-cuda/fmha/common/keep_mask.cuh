// Writes dropout's keep mask: one byte for every query and key of a sequence, also for keys that the mask hides. The
// bytes depend on positions alone, so a separate launch writes them, and the forward kernel may skip hidden blocks.
#pragma once
#include <fmha/philox.h>
#include <fmha/seq.h>

namespace fmha {

// Writes the keep mask with any grid of whole warps. Each warp takes rows until none is left; a lane handles four keys,
// which share one call of the generator.
template <FwdSpec spec>
FMHA_DEVICE void write_keep_mask(const FwdParams& p) {
  constexpr int32_t warp = 32;
  const int64_t num_warps = int64_t(gridDim.x) * (blockDim.x / warp), num_rows = int64_t(p.batch) * p.num_heads_q * p.seqlen_q;
#pragma unroll 1
  for (int64_t at = int64_t(blockIdx.x) * (blockDim.x / warp) + threadIdx.x / warp; at < num_rows; at += num_warps) {
    const int32_t batch_head = int32_t(at / p.seqlen_q), i = int32_t(at % p.seqlen_q);
    const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, batch_head / p.num_heads_q);
    if (i >= span.seqlen_q) continue;
    uint8_t* row = p.keep_mask + at * p.seqlen_k;
#pragma unroll 1
    for (int32_t j = threadIdx.x % warp * 4; j < span.seqlen_k; j += warp * 4) {
      const int32_t head = head_of_whole(p, batch_head / p.num_heads_q, batch_head % p.num_heads_q);
      const Array<uint32_t, 4> words = dropout_words(p, head, i, j / 4);
#pragma unroll
      for (int32_t k = 0; k < 4; ++k)
        if (j + k < span.seqlen_k) row[j + k] = !spec.dropout || words[k] < p.dropout_threshold;
    }
  }
}

}  // namespace fmha
