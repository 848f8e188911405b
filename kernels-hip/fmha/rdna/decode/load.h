// Rows of a KV cache, wherever they lie and however they are stored, on their way to LDS.
#pragma once
#include <fmha/isa/widen.h>
#include <fmha/rdna/load.h>

namespace fmha::rdna::decode {

// Byte `at` of a word, by the instruction where the architecture has the type, else by its bits.
template <DType dtype, int at>
FMHA_DEVICE float widened(uint32_t word) {
#if defined(__gfx1201__)
  if constexpr (dtype == DType::E4m3Fn) return v_cvt_f32_fp8<at>(word);
  if constexpr (dtype == DType::E5m2) return v_cvt_f32_bf8<at>(word);
#endif
  return fmha::decode(format_of(dtype), word >> (8 * at) & 0xff);
}

template <DType dtype>
FMHA_DEVICE uint32_t pair_of(float a, float b) {
  if constexpr (dtype == DType::F16) return __builtin_bit_cast(uint32_t, Vec<f16, 2>{f16(a), f16(b)});
  return __builtin_bit_cast(uint32_t, Vec<bf16, 2>{bf16(a), bf16(b)});
}

// As `Rows`; row n begins `places[n]` bytes behind `data`. FP8 codes become `dtype`: each times its descale in f32, rounded
// once, to the bits of a cache that was widened before.
template <DType dtype, DType stored>
struct CacheRows {
  const uint8_t* data;
  const int64_t* places;  // in LDS
  int64_t elem_bytes;
  int32_t num_rows, num_elems;
  float descale;

  template <class Piece, int size>
  FMHA_DEVICE Piece piece(int32_t row, int32_t elem) const {
    if (row >= num_rows || elem >= num_elems) return Piece{};
    const uint8_t* const from = data + places[row] + elem * size_bytes(stored);
    if constexpr (stored == dtype) {
      return *reinterpret_cast<const OnDwords<Piece>*>(from);
    } else {
      constexpr int words = sizeof(Piece) / 4;
      const auto codes = *reinterpret_cast<const OnDwords<Vec<uint32_t, words / 2>>*>(from);
      Piece piece;
#pragma unroll
      for (int w = 0; w < words; w += 2) {
        const uint32_t word = codes[w / 2];
        piece[w] = pair_of<dtype>(widened<stored, 0>(word) * descale, widened<stored, 1>(word) * descale);
        piece[w + 1] = pair_of<dtype>(widened<stored, 2>(word) * descale, widened<stored, 3>(word) * descale);
      }
      return piece;
    }
  }

  template <int size>
  FMHA_DEVICE uint32_t elem(int32_t row, int32_t elem) const {
    if (row >= num_rows || elem >= num_elems) return 0;
    const uint8_t* const from = data + places[row] + elem * elem_bytes;
    if constexpr (stored == dtype) return *reinterpret_cast<const uint16_t*>(from);
    else return pair_of<dtype>(widened<stored, 0>(*from) * descale, 0.f);
  }
};

}  // namespace fmha::rdna::decode
