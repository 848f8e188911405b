// Merges partial results over the same rows by their LSE: a thread has one element of O. Weights
// are divided by their own sum, since the rounded LSE may be far from the logarithm of that sum:
// for equal parts at -1e30 it equals that of each. With Merge::Sum there is no LSE: O is the
// parts' f32 sum, in order, rounded once; with Merge::AddTo O's old content is the first term.
#pragma once
#include <fmha/exp_sum.h>
#include <fmha/isa/lane.h>
#include <fmha/num.h>
#include <fmha/params.h>
#include <fmha/rows.h>

namespace fmha {

template <CombineSpec spec>
FMHA_DEVICE void combine(const CombineParams& p) {
  const int64_t id = int64_t(workgroup_idx()) * kRowThreads + thread_idx();
  const int64_t num_rows = int64_t(p.batch) * p.num_heads_q * p.seqlen_q;
  const int64_t row = id / spec.head_dim_v;
  if (row >= num_rows) return;
  const int32_t dim = int32_t(id % spec.head_dim_v);
  const int32_t i = int32_t(row % p.seqlen_q);
  const int32_t i_head = int32_t(row / p.seqlen_q % p.num_heads_q);
  const int32_t i_batch = int32_t(row / p.seqlen_q / p.num_heads_q);

  const int64_t at = i_batch * p.part.batch + i * p.part.row + i_head * p.part.head + dim;
  const int64_t to = i_batch * p.o.batch + i * p.o.row + i_head * p.o.head + dim;
  if constexpr (spec.merge != Merge::ByLse) {
    // The sum starts from -0, which leaves every first term unchanged, also -0; without terms the sum is 0.
    float total = spec.merge == Merge::AddTo ? load_elem<spec.dtype_o>(p.o.data, to) : p.num_parts == 0 ? 0.f : -0.f;
    for (int32_t n = 0; n < p.num_parts; ++n) total += load_elem<spec.dtype_part>(p.parts[n].o, at);
    store_elem<spec.dtype_o>(p.o.data, to, total);
    return;
  }
  ExpSum sum;
  float o = 0.f;
  for (int32_t n = 0; n < p.num_parts; ++n) {
    const float part_lse = p.parts[n].lse[row];
    if (part_lse == -infinity()) continue;  // neutral, whatever its O holds
    const ExpSum::Weights weights = sum.add(part_lse);
    o = o * weights.old + weights.other * load_elem<spec.dtype_part>(p.parts[n].o, at);
  }
  store_elem<spec.dtype_o>(p.o.data, to, o * sum.normaliser());
  if (p.lse && dim == 0) p.lse[row] = sum.log();
}

}  // namespace fmha
