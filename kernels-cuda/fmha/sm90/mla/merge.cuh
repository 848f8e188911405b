// The parts of a row, merged by their log-sum-exp into O and LSE. The learnable sink, which no part has taken in, joins here.
//
// A CTA merges one row: of its four groups of 128 threads, four columns to a thread, each takes every fourth part. A row of one
// sequence and 128 parts is 256 KB, which a single warp would wait for most of the time.
#pragma once
#include <fmha/common/recompute_row.cuh>
#include <fmha/kv_parts.h>
#include <fmha/ptx/grid.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/range.h>
#include <fmha/seq.h>

namespace fmha::mla {

constexpr int kMergeGroups = 4, kMergeGroup = 128;
constexpr int kMergeThreads = kMergeGroups * kMergeGroup;

struct MergeSmem {
  float o[kMergeGroups][4][kMergeGroup];
};

// Parts of `part_keys` keys each.
template <FwdSpec spec, int32_t part_keys>
FMHA_DEVICE void merge(const FwdParams& p, const KvParts& parts) {
  static_assert(spec.head_dim_v == 4 * kMergeGroup, "sm90_mla_merge: four columns to a thread");
  __shared__ MergeSmem smem;
  ptx::wait_for_grids_before();
  const int32_t lane = threadIdx.x % 32, group = threadIdx.x / kMergeGroup, member = threadIdx.x % kMergeGroup;
  const int64_t at_row = blockIdx.x, batch_head = at_row / p.seqlen_q;
  const int32_t i = int32_t(at_row - batch_head * p.seqlen_q);
  const int32_t i_batch = int32_t(batch_head / p.num_heads_q), i_head = int32_t(batch_head - int64_t(i_batch) * p.num_heads_q);
  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
  if (i >= span.seqlen_q) return;
  // What the forward kernel has written: a sequence without keys has one part.
  const int32_t num_parts = max(ceil_div(span.seqlen_k, part_keys), 1);
  const int64_t part_rows = int64_t(p.batch) * p.num_heads_q * p.seqlen_q;

  // Natural: times log2(e) a finite LSE or sink may be more than f32 holds. Every warp computes the same.
  const float sink = spec.sink ? scalar_of(p.sink, 0, i_head, -infinity()) : -infinity();
  float top = sink;
  for (int32_t n = lane; n < num_parts; n += 32) top = max(top, parts.lse[n * part_rows + at_row]);
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) top = max(top, ptx::shfl_xor(top, step));
  // The last place of so large an LSE hides the sum that it is of, and with it what a part weighs.
  if (fabsf(top) < infinity() && fabsf(top * kLog2E) >= kLargestShift) {
    if (threadIdx.x / 32 == 0) {
      RecomputedRow<spec> again{p, span, i_head, i};
      again.run();
    }
    return;
  }
  const float reference = finite_or_zero(top);
  float sum = 0.f;
  for (int32_t n = lane; n < num_parts; n += 32) sum += exp2_of((parts.lse[n * part_rows + at_row] - reference) * kLog2E);
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) sum += ptx::shfl_xor(sum, step);
  if constexpr (spec.sink) sum += exp2_of((sink - reference) * kLog2E);
  // The weights' sum comes off before O is added up, which else may leave f32 where the merged O does not.
  const float per_sum = sum == 0.f ? 0.f : 1.f / sum;

  float o[4] = {};
#pragma unroll 8
  for (int32_t n = group; n < num_parts; n += kMergeGroups) {
    const float part_lse = parts.lse[n * part_rows + at_row];
    // A part without a visible key is neutral, whatever lies there.
    if (part_lse == -infinity()) continue;
    const float weight = exp2_of((part_lse - reference) * kLog2E) * per_sum;
    const float4 of_part = *reinterpret_cast<const float4*>(parts.o + (n * part_rows + at_row) * parts.row + 4 * member);
    o[0] += weight * of_part.x;
    o[1] += weight * of_part.y;
    o[2] += weight * of_part.z;
    o[3] += weight * of_part.w;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) smem.o[group][c][member] = o[c];
  __syncthreads();
  // Column `threadIdx.x`: its sums of the groups, in their order.
  float total = 0.f;
#pragma unroll
  for (int g = 0; g < kMergeGroups; ++g) total += smem.o[g][threadIdx.x % 4][threadIdx.x / 4];
  store_elem<spec.dtype_o>(p.o.data, row_offset(p.o, span.storage_batch, span.q_row + i, i_head) + threadIdx.x, total);
  if constexpr (spec.write_lse) {
    if (threadIdx.x == 0) p.lse[lse_offset(p, span, i_head, i)] = sum == 0.f ? -infinity() : top + log2_of(sum) * kLn2;
  }
}

}  // namespace fmha::mla
