// Partial results over the same rows, merged by their log-sum-exp: LSE = ln sum_n exp LSE_n, O = sum_n exp(LSE_n -
// LSE) O_n. A part whose LSE is -inf is neutral: its O is not read. Weights are divided by their own sum, since LSE
// itself, rounded, may be far from what they add up to: of equal parts at -1e30 it is that of each.
//
// Parts that are added (Merge::Sum) have no LSE: O is their f32 sum, in the order of the parts, rounded once. With
// Merge::AddTo the previous O is the first term.
//
// A warp merges one row. It is bound by the bytes of the parts' O, which it reads once, in order.
#pragma once
#include <fmha/exp_sum.h>
#include <fmha/num.h>
#include <fmha/seq.h>

namespace fmha::combine {

constexpr int32_t kWarp = 32;

template <CombineSpec spec>
FMHA_DEVICE void merge_row(const CombineParams& p, int32_t i_batch, int32_t i_head, int32_t i) {
  constexpr int32_t columns = ceil_div(spec.head_dim_v, kWarp);
  const int32_t lane = threadIdx.x % kWarp;
  const int64_t lse_at = (int64_t(i_batch) * p.num_heads_q + i_head) * p.seqlen_q + i;

  if constexpr (spec.merge != Merge::ByLse) {
    // The sum starts from -0, which leaves every first term unchanged, also -0; without terms the sum is 0.
    const float none = p.num_parts == 0 ? 0.f : -0.f;
    const int64_t from = row_offset(p.part, i_batch, i, i_head), to = row_offset(p.o, i_batch, i, i_head);
#pragma unroll
    for (int32_t c = 0; c < columns; ++c) {
      const int32_t d = c * kWarp + lane;
      if (d >= spec.head_dim_v) break;
      float total = spec.merge == Merge::AddTo ? load_elem<spec.dtype_o>(p.o.data, to + d) : none;
      for (int32_t n = 0; n < p.num_parts; ++n) total += load_elem<spec.dtype_part>(p.parts[n].o, from + d);
      store_elem<spec.dtype_o>(p.o.data, to + d, total);
    }
    return;
  }
  ExpSum sum;
  Array<float, columns> o = {};
  for (int32_t n = 0; n < p.num_parts; ++n) {
    const float part_lse = p.parts[n].lse[lse_at];
    if (part_lse == -infinity()) continue;
    const ExpSum::Weights weights = sum.add(part_lse);
    const int64_t at = row_offset(p.part, i_batch, i, i_head);
#pragma unroll
    for (int32_t c = 0; c < columns; ++c) {
      const int32_t d = c * kWarp + lane;
      if (d < spec.head_dim_v)
        o[c] = o[c] * weights.old + weights.other * load_elem<spec.dtype_part>(p.parts[n].o, at + d);
    }
  }

  const float factor = sum.normaliser();
  const int64_t at = row_offset(p.o, i_batch, i, i_head);
#pragma unroll
  for (int32_t c = 0; c < columns; ++c) {
    const int32_t d = c * kWarp + lane;
    if (d < spec.head_dim_v) store_elem<spec.dtype_o>(p.o.data, at + d, o[c] * factor);
  }
  if (p.lse && lane == 0) p.lse[lse_at] = sum.log();
}

// Any grid of whole warps: each warp processes rows until none is left.
template <CombineSpec spec>
FMHA_DEVICE void merge(const CombineParams& p) {
  const int64_t num_warps = int64_t(gridDim.x) * (blockDim.x / kWarp);
  const int64_t num_rows = int64_t(p.batch) * p.num_heads_q * p.seqlen_q;
  for (int64_t at = int64_t(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp; at < num_rows; at += num_warps) {
    const int64_t batch_head = at / p.seqlen_q;
    merge_row<spec>(p, int32_t(batch_head / p.num_heads_q), int32_t(batch_head % p.num_heads_q),
                    int32_t(at % p.seqlen_q));
  }
}

}  // namespace fmha::combine
