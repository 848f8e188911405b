// Computes a row's final factor and LSE (finish.h) on the special-function unit, and decides whether the row must be
// recomputed.
#pragma once
#include <fmha/common/quads.cuh>
#include <fmha/finish.h>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/range.h>
#include <fmha/score.h>

namespace fmha {

struct RowUnit {
  FMHA_DEVICE static float exp2(float x) { return ptx::ex2_approx_ftz(x); }
  FMHA_DEVICE static float log2(float x) { return ptx::lg2_approx_ftz(x); }
  FMHA_DEVICE static float inverse(float x) { return ptx::rcp_approx_ftz(x); }
  FMHA_DEVICE static float quotient(float a, float b) { return a / b; }
  FMHA_DEVICE static float larger(float a, float b) { return fmaxf(a, b); }
  FMHA_DEVICE static float rounded_product(float a, float b) { return __fmul_rn(a, b); }
};

// Ends a row: `row_max` was subtracted from its scores, and `row_sum` is the sum of their exponentials. Maxima are
// compared in log2, up to kLargestShift.
template <FwdSpec spec>
FMHA_DEVICE RowResult finish_row(const FwdParams& p, RowMax row_max, float row_sum, int32_t i_head) {
  if constexpr (!spec.sink) {
    return end_row<RowUnit>(row_max, row_sum, !(fabsf(row_max.log2) < kLargestShift));
  } else {
    const float sink = scalar_of(p.sink, 0, i_head, -infinity());
    const bool is_natural = !(fabsf(row_max.log2) < kLargestShift || row_sum == 0.f) ||
                            !(fabsf(sink * kLog2E) < kLargestShift);
    return end_row_with_sink<RowUnit>(row_max, row_sum, sink, is_natural);
  }
}

// A row's factor and LSE, and the LSE of its keys alone. The two LSEs differ if a call over lists of keys leaves the
// sink out of LSE.
struct RowEnd {
  RowResult row;
  float lse_of_keys;
};

// Ends a row of a kernel that walks lists of keys.
template <FwdSpec spec, class Keys>
FMHA_DEVICE RowEnd finish_row_of(const FwdParams& p, const Keys& keys, RowMax row_max, float row_sum, int32_t i_head) {
  if constexpr (requires { Keys::of_token; }) {
    return keys.template finish<spec>(p, row_max, row_sum, i_head);
  } else {
    const RowResult row = finish_row<spec>(p, row_max, row_sum, i_head);
    return {row, row.lse};
  }
}

// Whether a row of O may come out as NaN or infinity although the exact O is finite: under a mask, which may hide a
// NaN, and where V has f32's range, so that the sum of weights times V may overflow.
FMHA_DEVICE consteval bool may_be_non_finite(const FwdSpec& spec) {
  return hides_pairs(spec) || spec.dtype_v == DType::Bf16;
}

// The end of one row of a lane's accumulator, over all of the row's keys or over a part of them.
struct PartEnd {
  RowResult result;
  bool again;  // the row is to be computed again from memory
};

// Ends row `r`. `max_log2` is what was subtracted from the scores, in log2, for the maximum `row_max` of products. The
// row is recomputed if the two maxima differ by more than rounding.
template <FwdSpec spec, class RowSoftmax, class Keys, int n>
FMHA_DEVICE PartEnd end_lane_row(const FwdParams& p, const Keys& keys, float max_log2, float row_max, float row_sum,
                                 float scale_log2, int32_t i_head, const mma::Accumulator<n>& o, int r) {
  const RowEnd end = finish_row_of<spec>(p, keys, {max_log2, __fmul_rn(max_log2, kLn2)}, row_sum, i_head);
  bool again = RowSoftmax::is_too_large(row_max, scale_log2);
  // A row without visible keys (LSE -inf) is recomputed too: its O must be 0, but 0 times a hidden NaN of V is NaN.
  if constexpr (may_be_non_finite(spec)) again |= has_non_finite(o, r) && end.lse_of_keys < infinity();
  return {end.row, again};
}

// Element `at` of O in O's type. FP8 saturates, also from infinity.
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
