// Computes dQ from the f32 sums that CTAs of keys have added up in global memory: scales each sum and rounds it once.
#pragma once
#include <fmha/bwd.h>
#include <fmha/num.h>
#include <fmha/ptx/warp.cuh>
#include <fmha/simt/bwd.h>

namespace fmha {

// One CTA for each block of queries of a head. A row that contains a NaN or an infinity from a hidden key is
// recomputed. `Sums` describes the sums' layout: `rows` queries a block, `block_of` where a block's sums begin,
// `index_of` an element's index in them.
template <BwdSpec spec, class Sums>
FMHA_DEVICE void finish_dq(const BwdParams& p) {
  const int32_t heads = p.fwd.batch * p.fwd.num_heads_q, head = blockIdx.x % heads;
  const int32_t i_batch = head / p.fwd.num_heads_q, i_head = head % p.fwd.num_heads_q;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const int32_t first = blockIdx.x / heads * Sums::rows;
  if (first >= span.seqlen_q) return;
  const float* sums = Sums::block_of(p, span, i_head, first);
#pragma unroll 1
  for (int32_t row = threadIdx.x / 32; row < Sums::rows && first + row < span.seqlen_q; row += blockDim.x / 32) {
    const int64_t at = row_offset(p.dq, span.storage_batch, int64_t(span.q_row) + first + row, i_head);
    bool finite = true;
#pragma unroll
    for (int32_t c = threadIdx.x % 32; c < spec.fwd.head_dim_qk; c += 32) {
      const float sum = sums[Sums::index_of(row, c)];
      finite &= fabsf(sum) < infinity();
      store_elem<spec.dtype_grad>(const_cast<void*>(static_cast<const void*>(p.dq.data)), at + c, sum * p.fwd.softmax_scale);
    }
    if constexpr (hides_pairs(spec.fwd)) {
      if (__any_sync(ptx::kAllLanes, !finite)) bwd_query_row<spec, simt::Warp>(p, span, i_head, first + row);
    }
  }
}

}  // namespace fmha
