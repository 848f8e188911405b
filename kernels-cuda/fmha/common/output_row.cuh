// The end of a row: from its running maximum and sum to O's factor and LSE.
#pragma once
#include <fmha/num.h>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/range.h>
#include <fmha/seq.h>

namespace fmha {

// Factor that normalises a row's O, and the row's natural log-sum-exp.
struct RowResult {
  float factor, lse;
};

// The number that a row's scores had subtracted before their exponentials, rounded: in log2, and as a natural score.
// Beyond kLargestShift the natural one counts, since a score of f32 times log2(e) may be more than f32 holds.
struct RowMax {
  float log2, natural;
};

// `row_sum` is the sum of exp2(score - row_max) over all keys; 0 for a row that sees none.
template <FwdSpec spec>
FMHA_DEVICE RowResult finish_row(const FwdParams& p, RowMax row_max, float row_sum, int32_t i_head) {
  if constexpr (!spec.sink) {
    if (row_sum == 0.f) return {0.f, -infinity()};
    const float sum_log2 = ptx::lg2_approx_ftz(row_sum);
    const bool natural = !(fabsf(row_max.log2) < kLargestShift);
    return {ptx::rcp_approx_ftz(row_sum),
            natural ? row_max.natural + sum_log2 * kLn2 : (row_max.log2 + sum_log2) * kLn2};
  } else {
    const float sink = scalar_of(p.sink, 0, i_head, -infinity());
    // Whether the two are compared as natural scores, else in log2.
    const bool natural = !(fabsf(row_max.log2) < kLargestShift || row_sum == 0.f) ||
                         !(fabsf(sink * kLog2E) < kLargestShift);
    const float to_log2 = natural ? kLog2E : 1.f;
    const float seen_max = row_sum == 0.f ? -infinity() : natural ? row_max.natural : row_max.log2;
    // The product is rounded by itself: a multiply-add with the difference below would keep its rounding error.
    const float of_sink = natural ? sink : __fmul_rn(sink, kLog2E);
    const float top = fmaxf(seen_max, of_sink);
    if (top == -infinity()) return {0.f, -infinity()};
    const float seen = row_sum == 0.f ? 0.f : ptx::ex2_approx_ftz((seen_max - top) * to_log2);
    const float total = row_sum * seen + ptx::ex2_approx_ftz((of_sink - top) * to_log2);
    const float total_log2 = ptx::lg2_approx_ftz(total);
    return {seen / total, natural ? top + total_log2 * kLn2 : (top + total_log2) * kLn2};
  }
}

// A row's result, and the log-sum-exp of its keys alone where lists of keys make LSE another number.
struct RowEnd {
  RowResult row;
  float lse_of_keys;
};

// The end of a row over such keys.
template <FwdSpec spec, class Keys>
FMHA_DEVICE RowEnd finish_row_of(const FwdParams& p, const Keys& keys, RowMax row_max, float row_sum, int32_t i_head) {
  if constexpr (requires { Keys::of_token; }) {
    return keys.template finish<spec>(p, row_max, row_sum, i_head);
  } else {
    const RowResult row = finish_row<spec>(p, row_max, row_sum, i_head);
    return {row, row.lse};
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
