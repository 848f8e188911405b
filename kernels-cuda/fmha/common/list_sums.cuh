// Sums of dK and dV over lists of keys, in f32 in the workspace: a row of each for every key of the longest sequence.
#pragma once
#include <fmha/params.h>

namespace fmha {

template <int dim_of_k, int dim_of_v>
struct ListSums {
  static constexpr int dim_qk = dim_of_k, dim_v = dim_of_v;
  const BwdParams& p;

  FMHA_DEVICE int64_t row(int32_t i_batch, int32_t i_head_kv, int32_t j) const {
    return (int64_t(i_batch) * p.fwd.seqlen_k + j) * p.fwd.num_heads_kv + i_head_kv;
  }
  FMHA_DEVICE float* dk(int64_t row) const { return reinterpret_cast<float*>(p.non_finite) + row * dim_qk; }
  FMHA_DEVICE float* dv(int64_t row) const {
    const int64_t rows = int64_t(p.fwd.batch) * p.fwd.seqlen_k * p.fwd.num_heads_kv;
    return dk(rows) + row * dim_v;
  }
};

}  // namespace fmha
