// 0. Naive: a warp a query, K and V from memory each time.
//
// Changes   nothing yet: the definition, with the online softmax, so that no row of S is ever stored.
// Costs     for each key of 2 x dim elements a warp reads 4 dim bytes and computes 4 dim FLOPs: one FLOP a byte. What the
//           eight queries of a CTA read together the L1 has, 128 bytes a clock and multiprocessor.
// On paper  128 FLOPs a clock and multiprocessor: 30 TFLOP/s of an H200's 132 at 1.8 GHz. But ten shuffles and additions
//           to sum a score, each waiting for the one before, leave the warp idle, and are most of what it issues.
// Measured  8.8 TFLOP/s at D 128, full (an H200; batch 4, 16 heads, 4096 queries and keys, as below).
#pragma once
#include <ladder/common.cuh>

namespace ladder {

constexpr int kQueries = 8;  // of a CTA, a warp each

template <int n>
FMHA_DEVICE void load(float (&x)[n], const uint16_t* from) {
#pragma unroll
  for (int d = 0; d < n; d += 2)
    ptx::unpack_x2<DType::Bf16>(*reinterpret_cast<const uint32_t*>(from + d), x[d], x[d + 1]);
}

template <int dim, bool causal>
FMHA_DEVICE void attention(const Call& call) {
  constexpr int n = dim / 32;  // elements of a row that a lane has
  const Work work = work_of_cta<kQueries>(call);
  const Rows rows = rows_of_head<dim>(call, work.head);
  const int32_t query = work.first_query + threadIdx.x / 32;
  const int64_t first = rows.first + threadIdx.x % 32 * n;

  float q[n], k[n], v[n], o[n] = {}, row_max = -infinity(), row_sum = 0.f;
  load(q, call.q + first + int64_t(query) * rows.stride);
  const int32_t num_keys = causal ? query + 1 : call.seqlen;
#pragma unroll 1
  for (int32_t key = 0; key < num_keys; ++key) {
    load(k, call.k + first + int64_t(key) * rows.stride);
    load(v, call.v + first + int64_t(key) * rows.stride);
    float s = 0.f;
#pragma unroll
    for (int d = 0; d < n; ++d) s += q[d] * k[d];
    s = reduce<32>(s, sum_of) * call.scale_log2;

    const float largest = fmaxf(row_max, s);
    const float correction = ptx::ex2_approx_ftz(row_max - largest), p = ptx::ex2_approx_ftz(s - largest);
    row_max = largest;
    row_sum = row_sum * correction + p;
#pragma unroll
    for (int d = 0; d < n; ++d) o[d] = o[d] * correction + p * v[d];
  }
#pragma unroll
  for (int d = 0; d < n; d += 2)
    *reinterpret_cast<uint32_t*>(call.o + first + int64_t(query) * rows.stride + d) =
        ptx::cvt_rn_x2<DType::Bf16>(o[d] / row_sum, o[d + 1] / row_sum);
}

}  // namespace ladder
