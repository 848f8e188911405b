// The end of a row: from its running maximum and sum to O's factor and LSE.
#pragma once
#include <fmha/num.h>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/seq.h>

namespace fmha {

// What a row's unnormalised O is multiplied by, and its natural log-sum-exp.
struct RowResult {
  float factor, lse;
};

// `row_sum` is the sum of exp2(score - max_log2) over all keys; 0 for a row that sees none.
template <FwdSpec spec>
FMHA_DEVICE RowResult finish_row(const FwdParams& p, float max_log2, float row_sum, int32_t i_head) {
  if constexpr (!spec.sink) {
    if (row_sum == 0.f) return {0.f, -infinity()};
    return {ptx::rcp_approx_ftz(row_sum), (max_log2 + ptx::lg2_approx_ftz(row_sum)) * kLn2};
  } else {
    const float sink_log2 = scalar_of(p.sink, 0, i_head, -infinity()) * kLog2E;
    const float top = fmaxf(row_sum == 0.f ? -infinity() : max_log2, sink_log2);
    if (top == -infinity()) return {0.f, -infinity()};
    const float seen = row_sum == 0.f ? 0.f : ptx::ex2_approx_ftz(max_log2 - top);
    const float total = row_sum * seen + ptx::ex2_approx_ftz(sink_log2 - top);
    return {seen / total, (top + ptx::lg2_approx_ftz(total)) * kLn2};
  }
}

// Element `at` of O. FP8 saturates, infinities too.
template <DType dtype>
FMHA_DEVICE void store_o(void* data, int64_t at, float x, bool condition) {
  if constexpr (dtype == DType::F32) {
    ptx::st_global_f32_if(static_cast<float*>(data) + at, x, condition);
  } else if constexpr (is_fp8(dtype)) {
    ptx::st_global_u8_if(static_cast<uint8_t*>(data) + at, uint16_t(ptx::cvt_rn_satfinite_x4<dtype>(x, 0.f, 0.f, 0.f)), condition);
  } else {
    ptx::st_global_u16_if(static_cast<uint16_t*>(data) + at, uint16_t(ptx::cvt_rn_x2<dtype>(x, 0.f)), condition);
  }
}

}  // namespace fmha
