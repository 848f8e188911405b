// Split-KV's second kernel: the parts of a row, merged by their log-sum-exp into O and LSE. The learnable sink, which no
// part has taken in, joins here.
//
// A warp merges one row: its lanes read the parts' LSE side by side for the maximum and the sum, then every part's O in
// turn, with all weights known, so that no load waits for another.
#pragma once
#include <fmha/common/recompute_row.cuh>
#include <fmha/kv_parts.h>
#include <fmha/num.h>
#include <fmha/online_softmax.h>
#include <fmha/ptx/warp.cuh>
#include <fmha/range.h>
#include <fmha/seq.h>

namespace fmha::split {

constexpr int32_t kWarp = 32;

template <FwdSpec spec, DType stored, class Keys>
FMHA_DEVICE void merge_row(const FwdParams& p, const KvParts& parts, int32_t i_batch, int32_t i_head, int32_t i,
                           const Keys& keys) {
  constexpr int32_t columns = ceil_div(spec.head_dim_v, kWarp);
  const int32_t lane = threadIdx.x % kWarp;
  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
  if (i >= span.seqlen_q) return;
  // What the forward kernel has written: a sequence without keys has one part.
  const int32_t num_parts = max(ceil_div(span.seqlen_k, parts.keys), 1);
  const int64_t row = (int64_t(i_batch) * p.num_heads_q + i_head) * p.seqlen_q + i;
  const int64_t part_rows = int64_t(p.batch) * p.num_heads_q * p.seqlen_q;

  // Natural: times log2(e) a finite LSE or sink may be more than f32 holds.
  const float sink = spec.sink ? scalar_of(p.sink, 0, i_head, -infinity()) : -infinity();
  float top = sink;
  for (int32_t n = lane; n < num_parts; n += kWarp) top = max(top, parts.lse[n * part_rows + row]);
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) top = max(top, ptx::shfl_xor(top, step));
  // The last place of so large an LSE hides the sum that it is of, and with it what a part weighs.
  if (fabsf(top) < infinity() && fabsf(top * kLog2E) >= kLargestShift) {
    RecomputedRow<spec, stored, Keys> again{p,    span, i_head, i, span.storage_batch, span.q_row + i, {0, span.seqlen_k},
                                            keys};
    again.run();
    return;
  }
  const float reference = finite_or_zero(top);
  float sum = 0.f;
  for (int32_t n = lane; n < num_parts; n += kWarp)
    sum += exp2_of((parts.lse[n * part_rows + row] - reference) * kLog2E);
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) sum += ptx::shfl_xor(sum, step);
  if constexpr (spec.sink) sum += exp2_of((sink - reference) * kLog2E);
  // The weights' sum comes off before O is added up, which else may leave f32 where the merged O does not.
  const float per_sum = sum == 0.f ? 0.f : 1.f / sum;

  Array<float, columns> o = {};
#pragma unroll 4
  for (int32_t n = 0; n < num_parts; ++n) {
    const float part_lse = parts.lse[n * part_rows + row];
    // A part without a visible key is neutral, whatever lies there.
    if (part_lse == -infinity()) continue;
    const float weight = exp2_of((part_lse - reference) * kLog2E) * per_sum;
    const int64_t at = (n * part_rows + row) * parts.row;
#pragma unroll
    for (int32_t c = 0; c < columns; ++c) {
      const int32_t d = c * kWarp + lane;
      if (d < spec.head_dim_v) o[c] += weight * parts.o[at + d];
    }
  }

  float factor = 1.f;
  if constexpr (is_fp8(spec.dtype_o)) factor *= p.scale_o ? *p.scale_o : 1.f;
  const int64_t at = row_offset(p.o, span.storage_batch, span.q_row + i, i_head);
#pragma unroll
  for (int32_t c = 0; c < columns; ++c) {
    const int32_t d = c * kWarp + lane;
    if (d < spec.head_dim_v) store_elem<spec.dtype_o>(p.o.data, at + d, o[c] * factor);
  }
  if constexpr (spec.write_lse) {
    if (lane == 0) p.lse[lse_offset(p, span, i_head, i)] = sum == 0.f ? -infinity() : top + log2_of(sum) * kLn2;
  }
}

// Any grid of whole warps: each takes rows until none is left.
template <FwdSpec spec, DType stored, class Keys = EveryKey>
FMHA_DEVICE void merge(const FwdParams& p, const KvParts& parts, const Keys& keys = {}) {
  const int64_t num_warps = int64_t(gridDim.x) * (blockDim.x / kWarp);
  const int64_t num_rows = int64_t(p.batch) * p.num_heads_q * p.seqlen_q;
  for (int64_t at = int64_t(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp; at < num_rows; at += num_warps) {
    const int64_t batch_head = at / p.seqlen_q;
    merge_row<spec, stored>(p, parts, int32_t(batch_head / p.num_heads_q), int32_t(batch_head % p.num_heads_q),
                            int32_t(at % p.seqlen_q), keys);
  }
}

}  // namespace fmha::split
