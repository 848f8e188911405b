// Q, K and V of a format with scales by blocks converted to plain numbers, for kernels that do not support the format:
// each element times the scale of its block and of its tensor, rounded to the output's type.
//
// A lane takes 16 columns of one row: one scale of Q or K, 16 of V, whose blocks are keys. FP8 elements and scales that
// lie one after another at a multiple of 16 come in one load, and values leave in whole words. Rows beyond a sequence's
// length are not read and become zeros, since a tile of the next kernel may load them.
#pragma once
#include <fmha/block_scales.h>
#include <fmha/block_values_params.h>

namespace fmha::block_values {

// Words that are contiguous in memory, for one load or store.
struct alignas(16) Words {
  uint32_t words[4];
};

template <BlockValuesSpec spec>
struct Write {
  static constexpr bool is_nvfp4 = spec.format == kNvfp4;
  static constexpr int32_t each = is_nvfp4 ? 2 : 1;  // elements to a byte
  static constexpr int32_t block = is_nvfp4 ? 16 : 32;
  static constexpr int32_t columns = kValueColumns;
  static_assert(block % columns == 0, "the columns of a lane have one scale of Q or K");
  const FwdParams& p;
  const BlockScaleParams& s;
  const BlockValuesParams& to;

  FMHA_DEVICE static uint32_t byte(const View& x, int64_t at) { return static_cast<const uint8_t*>(x.data)[at]; }

  // Loads `count` bytes with this stride, in one load if they are contiguous and aligned.
  template <int32_t count>
  FMHA_DEVICE static void load(const View& x, int64_t at, int64_t stride, int32_t end, uint32_t (&bytes)[count]) {
    const uint8_t* from = static_cast<const uint8_t*>(x.data) + at;
    if constexpr (count == 16) {
      if (stride == 1 && end >= count && reinterpret_cast<uint64_t>(from) % 16 == 0) {
        const Words four = *reinterpret_cast<const Words*>(from);
#pragma unroll
        for (int i = 0; i < count; ++i) bytes[i] = four.words[i / 4] >> 8 * (i % 4) & 0xff;
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < count; ++i) bytes[i] = i < end ? byte(x, at + i * stride) : 0;
  }

  FMHA_DEVICE static float element(uint32_t code) {
    if constexpr (is_nvfp4) return ScaledElems::e2m1(code);
    else return decode(format_of(spec.format == kMxfp8E4m3 ? DType::E4m3Fn : DType::E5m2), code);
  }
  FMHA_DEVICE static float scale(uint32_t code) {
    if constexpr (is_nvfp4) return decode(format_of(DType::E4m3Fn), code & 0x7f);  // the sign bit is not read
    else return e8m0(code);
  }

  FMHA_DEVICE static void store(const View& x, int64_t at, const float (&values)[columns]) {
    constexpr int32_t of_word = spec.dtype == DType::F32 ? 1 : 2;
    Words* out = reinterpret_cast<Words*>(static_cast<uint8_t*>(const_cast<void*>(static_cast<const void*>(x.data))) +
                                          at * size_bytes(spec.dtype));
#pragma unroll
    for (int w = 0; w < columns / of_word; w += 4) {
      Words four;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (of_word == 1) {
          four.words[i] = bits_of(values[w + i]);
        } else {
          four.words[i] = bf16_of(values[2 * (w + i)]) | uint32_t(bf16_of(values[2 * (w + i) + 1])) << 16;
        }
      }
      out[w / 4] = four;
    }
  }

  // Number of pieces of 16 columns of a row with this many elements.
  FMHA_DEVICE static int32_t pieces(int32_t dim) { return ceil_div(dim, columns); }
  FMHA_DEVICE int64_t num_pieces(int32_t tensor) const {
    const int32_t heads = tensor == 0 ? p.num_heads_q : p.num_heads_q / p.gqa_ratio;
    const int32_t rows = tensor == 0 ? p.seqlen_q : p.seqlen_k;
    return int64_t(p.batch) * rows * heads * pieces(tensor == 2 ? to.head_dim_v : to.head_dim_qk);
  }
  FMHA_DEVICE int64_t num_units() const { return num_pieces(0) + num_pieces(1) + num_pieces(2); }

  // Converts 16 columns of a row of Q or K.
  FMHA_DEVICE void of_row(const View& elems, const View& scales, const View& values, int64_t at, int64_t scale_at,
                          int64_t to_at, int32_t first, int32_t dim, float of_tensor) const {
    const int32_t end = min(dim - first, columns);
    uint32_t bytes[columns / each];
    load(elems, at + first / each, 1, ceil_div(end, each), bytes);
    const float of_block = scale(byte(scales, scale_at + first / block * scales.dim));
    float x[columns];
#pragma unroll
    for (int i = 0; i < columns; ++i) {
      const float value = element(bytes[i / each] >> 4 * (i % each)) * of_block * of_tensor;
      x[i] = i < end ? value : 0.f;
    }
    store(values, to_at + first, x);
  }

  // Converts 16 columns of key j of V.
  FMHA_DEVICE void of_value(const SeqSpan& span, int32_t j, int32_t head, int64_t to_at, int32_t first,
                            float of_tensor) const {
    constexpr int32_t keys = spec.pairs_of_keys ? 2 : 1, along = spec.pairs_of_keys ? 1 : each;
    const int32_t end = min(to.head_dim_v - first, columns);
    const int64_t at = row_offset(p.v, span.i_batch, j / keys, head) + int64_t(first / along) * p.v.dim;
    const int64_t scale_at = row_offset(s.v, span.i_batch, j / block, head) + first * s.v.dim;
    uint32_t bytes[columns / along], scales[columns];
    load(p.v, at, p.v.dim, ceil_div(end, along), bytes);
    load(s.v, scale_at, s.v.dim, end, scales);
    float x[columns];
#pragma unroll
    for (int i = 0; i < columns; ++i) {
      const int32_t half = keys == 2 ? j % 2 : i % along;
      const float value = element(bytes[i / along] >> 4 * half) * scale(scales[i]) * of_tensor;
      x[i] = i < end ? value : 0.f;
    }
    store(to.v, to_at + first, x);
  }

  FMHA_DEVICE void write(int64_t unit) const {
    int32_t tensor = 0;
    while (tensor < 2 && unit >= num_pieces(tensor)) unit -= num_pieces(tensor++);
    const int32_t dim = tensor == 2 ? to.head_dim_v : to.head_dim_qk;
    const int32_t heads = tensor == 0 ? p.num_heads_q : p.num_heads_q / p.gqa_ratio;
    const int32_t rows = tensor == 0 ? p.seqlen_q : p.seqlen_k;
    const int32_t first = int32_t(unit % pieces(dim)) * columns;
    unit /= pieces(dim);
    const int32_t head = int32_t(unit % heads), row = int32_t(unit / heads % rows);
    const SeqSpan span = resolve_seq(p, QLayout::Batch, KvKind::Strided, int32_t(unit / heads / rows));
    const View& values = tensor == 0 ? to.q : tensor == 1 ? to.k : to.v;
    const int64_t to_at = row_offset(values, span.i_batch, row, head);
    if (row >= (tensor == 0 ? span.seqlen_q : span.seqlen_k)) {
      const float zeros[columns] = {};
      return store(values, to_at + first, zeros);
    }
    const int32_t head_kv = tensor == 0 ? head / p.gqa_ratio : head;
    const HeadScalars& descale = tensor == 0 ? p.descale_q : tensor == 1 ? p.descale_k : p.descale_v;
    const float of_tensor = scalar_of(descale, span.i_batch, head_kv, 1.f);
    if (tensor == 2) return of_value(span, row, head, to_at, first, of_tensor);
    const View &elems = tensor == 0 ? p.q : p.k, &scales = tensor == 0 ? s.q : s.k;
    of_row(elems, scales, values, row_offset(elems, span.i_batch, row, head),
           row_offset(scales, span.i_batch, row, head), to_at, first, dim, of_tensor);
  }
};

}  // namespace fmha::block_values
