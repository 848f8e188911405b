// Loads of rows of a KV cache, in any layout and stored type, to LDS.
#pragma once
#include <fmha/isa/widen.h>
#include <fmha/rdna/load.h>

namespace fmha::rdna::decode {

// Converts byte `at` of a word to f32, by an instruction if the architecture supports the type, otherwise by its bits.
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

// Place of a list entry without a key: its row reads as 0.
constexpr int64_t kNoRow = int64_t(1) << 62;

// Byte offset of each key of a tile, stored in an order without bank conflicts: neither between lanes
// with neighbouring keys (of K) nor between those with first or second keys of neighbouring words of V^T.
template <int block_n>
struct Places {
  static constexpr int odd = block_n / 2 | 8;  // where the second keys of words lie: half of the banks away
  int64_t at[odd + block_n / 2];

  static FMHA_DEVICE int slot(int32_t key) {
    const int place = key / kEdge * kEdge + place_of_key(key % kEdge);
    return place % 2 * odd + place / 2;
  }
  FMHA_DEVICE void put(int32_t key, int64_t bytes) { at[slot(key)] = bytes; }
  FMHA_DEVICE int64_t of(int32_t key) const { return at[slot(key)]; }
};

// Loads words of codes from any address: global memory allows unaligned loads (LLVM's unaligned-access-mode, which
// AMD's runtime sets).
template <class Piece>
using OnBytes __attribute__((aligned(1))) = Piece;

// Rows like `Rows`, where row n begins at `data` plus `places.of(n)` bytes;
// with `listed` an absent row reads as 0. FP8 codes are converted to `dtype`:
// each times its descale in f32, rounded once, bit-equal to a converted cache.
template <DType dtype, DType stored, int block_n, bool listed>
struct CacheRows {
  const uint8_t* data;
  const Places<block_n>& places;  // in LDS
  int64_t elem_bytes;
  int32_t num_rows, num_elems;
  float descale;

  template <class Piece, int size>
  FMHA_DEVICE Piece piece(int32_t row, int32_t elem) const {
    if (row >= num_rows || elem >= num_elems) return Piece{};
    const int64_t place = places.of(row);
    if (listed && place == kNoRow) return Piece{};
    const uint8_t* const from = data + place + elem * size_bytes(stored);
    if constexpr (stored == dtype) {
      return *reinterpret_cast<const OnDwords<Piece>*>(from);
    } else {
      constexpr int words = sizeof(Piece) / 4;
      const auto codes = *reinterpret_cast<const OnBytes<Vec<uint32_t, words / 2>>*>(from);
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
    const int64_t place = places.of(row);
    if (listed && place == kNoRow) return 0;
    const uint8_t* const from = data + place + elem * elem_bytes;
    if constexpr (stored == dtype) return *reinterpret_cast<const uint16_t*>(from);
    else return pair_of<dtype>(widened<stored, 0>(*from) * descale, 0.f);
  }
};

}  // namespace fmha::rdna::decode
