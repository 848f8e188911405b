// Rows of bytes of a latent cache, in the formats of FlashMLA: values in E4M3 with scales for groups of them, then
// elements in bf16. A value is its number times its scale, in f32, rounded to bf16.
#pragma once
#include <fmha/e8m0.h>
#include <fmha/num.h>
#include <fmha/seq.h>

namespace fmha {

// A row of 656 bytes: 512 values, 4 scales in f32 of 128 values each, 64 elements in bf16. With rows of 584 bytes, a
// page first has 576 bytes of each row (448 values and 64 elements in bf16), and behind them 8 bytes of each row: 7
// scales in E8M0 of 64 values each, and one that is not read.
template <int bytes>
struct RowFormat {
  static_assert(bytes == 656 || bytes == 584, "rows of bytes have 656 or 584");
  static constexpr bool in_page_tail = bytes == 584;  // the scales
  static constexpr int values = in_page_tail ? 448 : 512, group = in_page_tail ? 64 : 128;
  static constexpr int scale_bytes = in_page_tail ? 8 : 16;       // of a row
  static constexpr int stride = in_page_tail ? 576 : 656;         // from row to row of a page
  static constexpr int rotary = in_page_tail ? 448 : 528;         // offset of the elements in bf16
};

// Addresses of a row's bytes and of its scales.
struct BytesOfRow {
  const uint8_t *row, *scales;
};
template <int bytes>
FMHA_DEVICE BytesOfRow bytes_of_row(const View& cache, int32_t page_size, KvRow at) {
  using Format = RowFormat<bytes>;
  const uint8_t* page = static_cast<const uint8_t*>(cache.data) + at.batch * cache.batch;
  const uint8_t* row = page + int64_t(at.row) * Format::stride;
  if constexpr (!Format::in_page_tail) return {row, row + Format::values};
  else return {row, page + int64_t(page_size) * Format::stride + int64_t(at.row) * Format::scale_bytes};
}

// Element d of a row, read byte by byte: a row may begin anywhere.
template <int bytes>
FMHA_DEVICE float element_of_row(const BytesOfRow& at, int32_t d) {
  using Format = RowFormat<bytes>;
  const auto byte = [](const uint8_t* from) { return uint32_t(*(const uint8_t FMHA_GLOBAL*)from); };
  if (d >= Format::values) {
    const uint8_t* from = at.row + Format::rotary + 2 * (d - Format::values);
    return float_of((byte(from) | byte(from + 1) << 8) << 16);
  }
  float scale;
  if constexpr (Format::in_page_tail) {
    scale = e8m0(byte(at.scales + d / Format::group));
  } else {
    const uint8_t* from = at.scales + 4 * (d / Format::group);
    scale = float_of(byte(from) | byte(from + 1) << 8 | byte(from + 2) << 16 | byte(from + 3) << 24);
  }
  return round_to<DType::Bf16>(decode(format_of(DType::E4m3Fn), byte(at.row + d)) * scale);
}

}  // namespace fmha
