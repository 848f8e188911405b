// Elements of Q, K and V times the scales of their blocks, for `fmha/row_fwd.h`. Each product is exact in
// f32, or infinite on overflow. Scales of whole tensors are applied to scores and O, like FP8 descales.
#pragma once
#include <fmha/block_scale_params.h>
#include <fmha/e8m0.h>
#include <fmha/num.h>
#include <fmha/seq.h>

namespace fmha {

struct ScaledElems {
  const BlockScaleParams& s;

  FMHA_DEVICE int32_t block() const { return s.format == kNvfp4 ? 16 : 32; }
  FMHA_DEVICE int32_t elems_per_byte() const { return s.format == kNvfp4 ? 2 : 1; }

  FMHA_DEVICE static float e2m1(uint32_t code) {
    const uint32_t exponent = code >> 1 & 3, mantissa = code & 1;
    const float half = exponent == 0 ? float(mantissa) : float((2 + mantissa) << (exponent - 1));
    return float_of((code >> 3 & 1) << 31 | bits_of(0.5f * half));
  }

  FMHA_DEVICE float element(const void* data, int64_t at, int32_t half) const {
    const uint32_t byte = static_cast<const uint8_t*>(data)[at];
    if (s.format == kNvfp4) return e2m1(byte >> 4 * half);
    return s.format == kMxfp8E4m3 ? decode(format_of(DType::E4m3Fn), byte) : decode(format_of(DType::E5m2), byte);
  }

  FMHA_DEVICE float scale(const void* data, int64_t at) const {
    const uint32_t byte = static_cast<const uint8_t*>(data)[at];
    // An E4M3 scale is unsigned, so its sign bit is not read.
    if (s.format == kNvfp4) return decode(format_of(DType::E4m3Fn), byte & 0x7f);
    return e8m0(byte);
  }

  // Where a row of Q or K begins, and where its scales do.
  struct Row {
    const View &elems, &scales;
    int64_t at, scale_at;
  };
  // Query i of a head.
  FMHA_DEVICE Row query_row(const FwdParams& p, const SeqSpan& span, int32_t i, int32_t i_head) const {
    // Packed rows have no batch stride.
    const int64_t row = (p.q.batch == 0 ? int64_t(span.q_row) : 0) + i;
    return {p.q, s.q, query_offset(p, span, i, i_head), row_offset(s.q, span.i_batch, row, i_head)};
  }
  template <FwdSpec spec>
  FMHA_DEVICE Row key_row(const FwdParams& p, const SeqSpan& span, int32_t j, int32_t i_head_kv) const {
    const KvRow key = kv_row(p, spec.kv_layout, span, j);
    return {p.k, s.k, row_offset(p.k, key, i_head_kv), row_offset(s.k, key, i_head_kv)};
  }
  // Element d of a row, times its scale.
  FMHA_DEVICE float of_row(const Row& row, int32_t d) const {
    const int32_t each = elems_per_byte();
    return element(row.elems.data, row.at + d / each, d % each) *
           scale(row.scales.data, row.scale_at + d / block() * row.scales.dim);
  }

  template <FwdSpec spec>
  FMHA_DEVICE float product(const FwdParams& p, const SeqSpan& span, int32_t i, int32_t i_head, int32_t j,
                            int32_t i_head_kv) const {
    const Row q = query_row(p, span, i, i_head), k = key_row<spec>(p, span, j, i_head_kv);
    const int32_t each = elems_per_byte();
    float dot = 0.f;
    for (int32_t first = 0; first < spec.head_dim_qk; first += block()) {
      const int64_t at = first / block();
      const float of_q = scale(s.q.data, q.scale_at + at * s.q.dim),
                  of_k = scale(s.k.data, k.scale_at + at * s.k.dim);
      for (int32_t d = first; d < min(spec.head_dim_qk, first + block()); ++d) {
        const float x = element(p.q.data, q.at + d / each, d % each) * of_q;
        dot += x * (element(p.k.data, k.at + d / each, d % each) * of_k);
      }
    }
    return dot;
  }

  // The row of V of one key.
  struct Value {
    const ScaledElems& elems;
    const View &v, &scales;
    int64_t at, scale_at;
    int32_t half, each;  // elements to a byte along a row

    FMHA_DEVICE float operator()(int32_t d) const {
      const float x = elems.element(v.data, at + d / each * v.dim, each == 1 ? half : d % each);
      return x * elems.scale(scales.data, scale_at + d * scales.dim);
    }
  };

  template <FwdSpec spec>
  FMHA_DEVICE Value value(const FwdParams& p, const SeqSpan& span, int32_t j, int32_t i_head_kv) const {
    const KvRow key = kv_row(p, spec.kv_layout, span, j);
    const int32_t keys = s.pairs_of_keys ? elems_per_byte() : 1;
    const int64_t at = row_offset(p.v, key.batch, key.row / keys, i_head_kv);
    const int64_t scale_at = row_offset(s.v, key.batch, key.row / block(), i_head_kv);
    return {*this, p.v, s.v, at, scale_at, key.row % keys, s.pairs_of_keys ? 1 : elems_per_byte()};
  }
};

}  // namespace fmha
