// Computes dQ from the f32 sums that CTAs of keys have added up in memory: scales each sum and rounds it once.
#pragma once
#include <fmha/bwd.h>
#include <fmha/num.h>
#include <fmha/ptx/warp.cuh>
#include <fmha/simt/bwd.h>
#include <fmha/sm100/bwd/config.cuh>

namespace fmha::sm100::bwd {

// Scales and rounds two rows of a block from `two` on: eight lanes read four columns of both, which lie side by side,
// so that a warp reads and writes whole 32 bytes. Returns a bit for each row that contains a NaN or an infinity.
template <BwdSpec spec>
FMHA_DEVICE uint32_t finish_rows(const BwdParams& p, const SeqSpan& span, const float* sums, int32_t i_head,
                                 int32_t first, int32_t two, int32_t num_rows) {
  using Sums = DqSums<spec>;
  const int32_t lane = threadIdx.x % 32, row = two + lane / 4 % 2;
  const int64_t at = row_offset(p.dq, span.storage_batch, int64_t(span.q_row) + first + row, i_head);
  bool finite = true;
#pragma unroll
  for (int32_t c = lane / 8 * 4 + lane % 4; c < spec.fwd.head_dim_qk; c += 16) {
    if (row >= num_rows) break;
    const float sum = sums[Sums::index_of(row, c)];
    finite &= fabsf(sum) < infinity();
    void* const dq = const_cast<void*>(static_cast<const void*>(p.dq.data));
    store_elem<spec.dtype_grad>(dq, at + c, sum * p.fwd.softmax_scale);
  }
  const uint32_t found = __ballot_sync(ptx::kAllLanes, !finite);
  return uint32_t((found & 0x0f0f0f0fu) != 0) | uint32_t((found & 0xf0f0f0f0u) != 0) << 1;
}

// Scales and rounds four rows of a wide head: a lane reads a column of all four.
template <BwdSpec spec>
FMHA_DEVICE uint32_t finish_wide_rows(const BwdParams& p, const SeqSpan& span, const float* sums, int32_t i_head,
                                      int32_t first, int32_t four, int32_t num_rows) {
  const int32_t lane = threadIdx.x % 32;
  uint32_t found = 0;
#pragma unroll
  for (int32_t c = lane; c < spec.fwd.head_dim_qk; c += 32) {
    float of[4];
    ptx::ld_global_v4_f32(of, sums + DqSums<spec>::index_of(four, c));
#pragma unroll
    for (int32_t k = 0; k < 4; ++k) {
      if (four + k >= num_rows) continue;
      found |= uint32_t(!(fabsf(of[k]) < infinity())) << k;
      const int64_t at = row_offset(p.dq, span.storage_batch, int64_t(span.q_row) + first + four + k, i_head);
      store_elem<spec.dtype_grad>(const_cast<void*>(static_cast<const void*>(p.dq.data)), at + c,
                                  of[k] * p.fwd.softmax_scale);
    }
  }
  uint32_t rows = 0;
#pragma unroll
  for (int32_t k = 0; k < 4; ++k) rows |= uint32_t(__any_sync(ptx::kAllLanes, found >> k & 1)) << k;
  return rows;
}

// Finishes dQ. Each CTA has a block of queries of a head; a warp processes two rows at a time, or four of a wide head.
// Rows that a hidden NaN or infinity has reached are recomputed, under `masks` and the band.
template <BwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void finish_dq(const BwdParams& p, const Masks& masks = {}) {
  using Sums = DqSums<spec>;
  constexpr int32_t rows = Shape<spec>::is_wide ? 4 : 2;  // of a warp at a time
  const int32_t heads = p.fwd.batch * p.fwd.num_heads_q, head = blockIdx.x % heads;
  const int32_t i_batch = head / p.fwd.num_heads_q, i_head = head % p.fwd.num_heads_q;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const int32_t first = blockIdx.x / heads * Sums::rows, num_rows = min(Sums::rows, span.seqlen_q - first);
  const float* sums = Sums::block_of(p, span, i_head, first);
#pragma unroll 1
  for (int32_t own = threadIdx.x / 32 * rows; own < num_rows; own += blockDim.x / 32 * rows) {
    uint32_t found;
    if constexpr (Shape<spec>::is_wide) {
      found = finish_wide_rows<spec>(p, span, sums, i_head, first, own, num_rows);
    } else {
      found = finish_rows<spec>(p, span, sums, i_head, first, own, num_rows);
    }
    if constexpr (spec.fwd.mask != MaskKind::Full) {
#pragma unroll 1
      for (int32_t k = 0; k < rows; ++k) {
        if (found >> k & 1) bwd_query_row<spec, simt::Warp>(p, span, i_head, first + own + k, masks);
      }
    }
  }
}

}  // namespace fmha::sm100::bwd
