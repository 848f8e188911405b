// dQ from sums in memory, to which CTAs of keys have added: scaled and rounded once.
#pragma once
#include <fmha/bwd.h>
#include <fmha/num.h>
#include <fmha/ptx/warp.cuh>
#include <fmha/simt/bwd.h>
#include <fmha/sm100/bwd/config.cuh>

namespace fmha::sm100::bwd {

// A CTA to a block of queries of a head, a warp to two rows at a time: eight lanes read four columns of both, which
// lie side by side, so that a warp reads and writes whole 32 bytes. Rows that a hidden NaN or infinity has reached
// are computed again, under `masks` beside the band.
template <BwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void finish_dq(const BwdParams& p, const Masks& masks = {}) {
  using Sums = DqSums<spec>;
  const int32_t heads = p.fwd.batch * p.fwd.num_heads_q, head = blockIdx.x % heads;
  const int32_t i_batch = head / p.fwd.num_heads_q, i_head = head % p.fwd.num_heads_q;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const int32_t first = blockIdx.x / heads * Sums::rows, num_rows = min(Sums::rows, span.seqlen_q - first);
  const float* sums = Sums::block_of(p, span, i_head, first);
  const int32_t lane = threadIdx.x % 32, second = lane / 4 % 2;
#pragma unroll 1
  for (int32_t two = threadIdx.x / 32 * 2; two < num_rows; two += blockDim.x / 32 * 2) {
    const int32_t row = two + second;
    const int64_t at = row_offset(p.dq, span.storage_batch, int64_t(span.q_row) + first + row, i_head);
    bool finite = true;
#pragma unroll
    for (int32_t c = lane / 8 * 4 + lane % 4; c < spec.fwd.head_dim_qk; c += 16) {
      if (row >= num_rows) break;
      const float sum = sums[Sums::index_of(row, c)];
      finite &= fabsf(sum) < infinity();
      store_elem<spec.dtype_grad>(const_cast<void*>(static_cast<const void*>(p.dq.data)), at + c, sum * p.fwd.softmax_scale);
    }
    if constexpr (spec.fwd.mask != MaskKind::Full) {
      const uint32_t found = __ballot_sync(ptx::kAllLanes, !finite);
#pragma unroll 1
      for (int32_t k = 0; k < 2; ++k) {
        if (found >> 4 * k & 0x0f0f0f0fu) bwd_query_row<spec, simt::Warp>(p, span, i_head, first + two + k, masks);
      }
    }
  }
}

}  // namespace fmha::sm100::bwd
