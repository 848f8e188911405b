// Loads of rows of a KV cache, in any layout and stored type, to LDS.
#pragma once
#include <fmha/cache_rows.h>
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
  static constexpr int count = odd + block_n / 2;
  int64_t at[count];

  static FMHA_DEVICE int slot(int32_t key) {
    const int place = key / kEdge * kEdge + place_of_key(key % kEdge);
    return place % 2 * odd + place / 2;
  }
  FMHA_DEVICE void put(int32_t key, int64_t bytes) { at[slot(key)] = bytes; }
  FMHA_DEVICE int64_t of(int32_t key) const { return at[slot(key)]; }
};

// Factor of each key of a tile, where rows have scales of their own, in the order of the places.
template <int block_n>
struct RowFactors {
  float at[Places<block_n>::count];

  FMHA_DEVICE void put(int32_t key, float factor) { at[Places<block_n>::slot(key)] = factor; }
  FMHA_DEVICE float of(int32_t key) const { return at[Places<block_n>::slot(key)]; }
};

// Factor of each key of a tile: its row's own, or the descale of all.
template <int block_n, bool scaled>
struct Factors {
  float descale;
  FMHA_DEVICE float of(int32_t) const { return descale; }
};
template <int block_n>
struct Factors<block_n, true> {
  const RowFactors<block_n>& rows;  // in LDS
  FMHA_DEVICE float of(int32_t key) const { return rows.of(key); }
};

// Words of codes, at any address: global memory takes them whole (LLVM's unaligned-access-mode, which AMD's runtime
// sets).
template <class Piece>
using OnBytes __attribute__((aligned(1))) = Piece;

// Rows like `Rows`, where row n begins at `data` plus `places.of(n)` bytes;
// with `listed` an absent row reads as 0. FP8 codes are converted to `dtype`:
// each times its descale, or its row's scale, in f32, rounded once, bit-equal to a converted cache.
template <DType dtype, DType stored, int block_n, bool listed, bool scaled>
struct CacheRows {
  const uint8_t* data;
  const Places<block_n>& places;  // in LDS
  Factors<block_n, scaled> factors;
  int64_t elem_bytes;
  int32_t num_rows, num_elems;

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
      const float factor = factors.of(row);
      Piece piece;
#pragma unroll
      for (int w = 0; w < words; w += 2) {
        const uint32_t word = codes[w / 2];
        piece[w] = pair_of<dtype>(widened<stored, 0>(word) * factor, widened<stored, 1>(word) * factor);
        piece[w + 1] = pair_of<dtype>(widened<stored, 2>(word) * factor, widened<stored, 3>(word) * factor);
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
    else return pair_of<dtype>(widened<stored, 0>(*from) * factors.of(row), 0.f);
  }
};

// Scales of the rows of bytes of a tile, in the order of the places.
template <int block_n, int row_bytes>
struct ScalesOfRows {
  static constexpr int words = RowFormat<row_bytes>::scale_bytes / 4;
  using Row = Vec<uint32_t, words>;
  Row at[Places<block_n>::count];

  FMHA_DEVICE void put(int32_t key, const uint8_t* scales) {
    at[Places<block_n>::slot(key)] = *reinterpret_cast<const OnDwords<Row>*>(scales);
  }
  // The scale of a row's values from `elem` on, which have one.
  FMHA_DEVICE float of(int32_t key, int32_t elem) const {
    using Format = RowFormat<row_bytes>;
    const int32_t group = elem / Format::group, slot = Places<block_n>::slot(key);
    if constexpr (Format::in_page_tail) return e8m0(reinterpret_cast<const uint8_t*>(&at[slot])[group]);
    else return float_of(reinterpret_cast<const uint32_t*>(&at[slot])[group]);
  }
};

// Parts of LDS for scales of a tile's rows: for each key of an FP8 cache, or for each row of bytes. It is empty where
// rows have no scales.
template <int block_n, bool scaled, int row_bytes>
struct LdsOfScales {};
template <int block_n>
struct LdsOfScales<block_n, true, 0> {
  RowFactors<block_n> k_factors, v_factors;
};
template <int block_n, int row_bytes>
struct LdsOfScales<block_n, false, row_bytes> {
  ScalesOfRows<block_n, row_bytes> scales;
};
template <int block_n>
struct LdsOfScales<block_n, false, 0> {};

// Rows of bytes like `CacheRows`, as bf16: values times their scales, and the elements behind them.
template <int block_n, int row_bytes>
struct BytesRows {
  using Format = RowFormat<row_bytes>;
  const uint8_t* data;
  const Places<block_n>& places;                   // in LDS
  const ScalesOfRows<block_n, row_bytes>& scales;  // likewise
  int32_t num_rows, num_elems;

  template <class Piece, int size>
  FMHA_DEVICE Piece piece(int32_t row, int32_t elem) const {
    if (row >= num_rows || elem >= num_elems) return Piece{};
    const int64_t place = places.of(row);
    if (place == kNoRow) return Piece{};
    const uint8_t* const from = data + place;
    if (elem >= Format::values)
      return *reinterpret_cast<const OnDwords<Piece>*>(from + Format::rotary + (elem - Format::values) * size);
    constexpr int words = sizeof(Piece) / 4;
    const auto codes = *reinterpret_cast<const OnDwords<Vec<uint32_t, words / 2>>*>(from + elem);
    const float scale = scales.of(row, elem);
    constexpr DType stored = DType::E4m3Fn;
    Piece piece;
#pragma unroll
    for (int w = 0; w < words; w += 2) {
      const uint32_t word = codes[w / 2];
      piece[w] = pair_of<DType::Bf16>(widened<stored, 0>(word) * scale, widened<stored, 1>(word) * scale);
      piece[w + 1] = pair_of<DType::Bf16>(widened<stored, 2>(word) * scale, widened<stored, 3>(word) * scale);
    }
    return piece;
  }

  // Rows of bytes are read by pieces alone.
  template <int size>
  FMHA_DEVICE uint32_t elem(int32_t, int32_t) const { return 0; }
};

}  // namespace fmha::rdna::decode
