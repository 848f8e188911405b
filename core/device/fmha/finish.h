// The end of a row: computes O's factor and LSE from its running maximum and sum, the call's other factors of
// O, and the places of O and LSE. NVIDIA's epilogues and simt use it; the register layout is each kernel's own.
//
// `Unit` has a device's functions: log2 and inverse; with a sink also exp2,
// quotient, larger, and rounded_product, which no compiler contracts with a sum.
#pragma once
#include <fmha/num.h>
#include <fmha/seq.h>

namespace fmha {

// Functions in plain C++, for any device.
struct ScalarUnit {
  FMHA_DEVICE static float log2(float x) { return log2_of(x); }
  FMHA_DEVICE static float inverse(float x) { return 1.f / x; }
};

// Factor that normalises a row's O, and the row's natural log-sum-exp.
struct RowResult {
  float factor, lse;
};

// The number subtracted from a row's scores before exponentials, rounded: in log2, and as
// a natural score. A score times log2(e) may overflow f32; then the natural one is used.
struct RowMax {
  float log2, natural;
};

// Computes a row's end. `row_sum` is the sum of exp2(score - row_max) over all keys; 0 for a row that sees none.
template <class Unit>
FMHA_DEVICE RowResult end_row(RowMax row_max, float row_sum, bool is_natural) {
  if (row_sum == 0.f) return {0.f, -infinity()};
  const float sum_log2 = Unit::log2(row_sum);
  return {Unit::inverse(row_sum), is_natural ? row_max.natural + sum_log2 * kLn2 : (row_max.log2 + sum_log2) * kLn2};
}

// Computes the end of a row with a learnable sink, a natural score that has no V.
template <class Unit>
FMHA_DEVICE RowResult end_row_with_sink(RowMax row_max, float row_sum, float sink, bool is_natural) {
  const float to_log2 = is_natural ? kLog2E : 1.f;
  const float seen_max = row_sum == 0.f ? -infinity() : is_natural ? row_max.natural : row_max.log2;
  // The product is rounded separately: a multiply-add with the difference below would keep its rounding error.
  const float of_sink = is_natural ? sink : Unit::rounded_product(sink, kLog2E);
  const float top = Unit::larger(seen_max, of_sink);
  if (top == -infinity()) return {0.f, -infinity()};
  const float seen = row_sum == 0.f ? 0.f : Unit::exp2((seen_max - top) * to_log2);
  const float total = row_sum * seen + Unit::exp2((of_sink - top) * to_log2);
  const float total_log2 = Unit::log2(total);
  return {Unit::quotient(seen, total), is_natural ? top + total_log2 * kLn2 : (top + total_log2) * kLn2};
}

// Factors that a call may multiply O by: an FP8 V's descale, dropout's scale, and an FP8 O's scale.
struct OutputScales {
  bool of_v, of_dropout, of_o;
};
FMHA_DEVICE constexpr OutputScales output_scales(const FwdSpec& spec) {
  return {is_fp8(spec.dtype_v), spec.dropout, is_fp8(spec.dtype_o)};
}

// A row's factor times the factors of the call, in a fixed order.
template <OutputScales scales>
FMHA_DEVICE float scaled_output(float factor, const FwdParams& p, int32_t i_batch, int32_t i_head_kv) {
  if constexpr (scales.of_v) factor *= scalar_of(p.descale_v, i_batch, i_head_kv, 1.f);
  if constexpr (scales.of_dropout) factor *= p.dropout_scale;
  if constexpr (scales.of_o) factor *= p.scale_o ? *p.scale_o : 1.f;
  return factor;
}

// Where a row of O and LSE lies: in the call's output, or in a part's.
struct OutputRow {
  int32_t batch, row, i_head;

  FMHA_DEVICE int64_t o(const FwdParams& p) const { return row_offset(p.o, batch, row, i_head); }
  FMHA_DEVICE float* lse(const FwdParams& p) const { return p.lse + batch * p.lse_batch + i_head * p.lse_head + row; }
};
FMHA_DEVICE OutputRow output_row(const SeqSpan& span, int32_t i_head, int32_t i) {
  return {span.storage_batch, span.q_row + i, i_head};
}

}  // namespace fmha
