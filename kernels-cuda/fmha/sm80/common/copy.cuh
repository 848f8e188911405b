// Loads by cp.async: every thread of the CTA copies its share of a tile, 16 bytes at a time where strides and addresses
// allow it.
//
// Threads walk a tile in the order of its bytes in shared memory, so that eight neighbours write 128 contiguous bytes
// without bank conflicts. From a row they read contiguous spans of the swizzle, 32 to 128 bytes.
#pragma once
#include <fmha/cache_rows.h>
#include <fmha/common/widen.cuh>
#include <fmha/mma/smem_tile.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/shared.cuh>

namespace fmha::sm80 {

constexpr int kWord = 8;  // elements of 16 bits in 16 bytes
template <class Elem>
constexpr int kWordOf = 16 / int(sizeof(Elem));

// Gathers sixteen bytes of elements whose addresses are computed one by one.
template <class Elem, class ElemAt>
FMHA_DEVICE void gather_word(uint32_t (&words)[4], ElemAt elem_at) {
  constexpr int in_register = 4 / sizeof(Elem);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    words[k] = 0;
#pragma unroll
    for (int e = 0; e < in_register; ++e) words[k] |= elem_at(k * in_register + e) << 8 * int(sizeof(Elem)) * e;
  }
}

// Copies one word of a row: its first `there` elements from `from` on, then zeros. `any` is a valid address, which the
// instruction needs where it reads nothing. Fewer than 4 bytes at a time are read element by element.
template <int bytes, class Elem>
FMHA_DEVICE void copy_word(uint32_t to, const Elem* from, int32_t there, const void* any) {
  constexpr int size = sizeof(Elem), all = kWordOf<Elem>;
  if constexpr (bytes >= 4) {
    constexpr int elems = bytes / size;
#pragma unroll
    for (int e = 0; e < all; e += elems) {
      const int32_t here = clamp(there - e, 0, elems);
      ptx::cp_async<bytes>(to + size * e, here > 0 ? static_cast<const void*>(from + e) : any, size * here);
    }
  } else {
    uint32_t words[4];
    gather_word<Elem>(words, [&](int e) -> uint32_t { return e < there ? from[e] : 0; });
    ptx::st_shared_v4(to, words);
  }
}

// Starts copies of a tile, and does not wait. `row_of(r)` is where row r begins (null: zeros), and `there_of(r,
// column)` says how many of the sixteen bytes from a column on exist.
template <int bytes, int threads, class Tile, class RowOf, class ThereOf>
FMHA_DEVICE void copy_tile(const Tile& tile, const void* any, RowOf row_of, ThereOf there_of) {
  using Elem = typename Tile::Elem;
  constexpr int word_elems = kWordOf<Elem>;
  constexpr int words = Tile::span / word_elems, step = threads / words;  // words of a row in a span; rows in a pass
  static_assert(threads % words == 0, "a pass takes whole rows");
  const int32_t word = threadIdx.x % words, first_row = threadIdx.x / words;
#pragma unroll
  for (int pass = 0; pass < ceil_div(Tile::rows, step); ++pass) {
    const int32_t row = first_row + pass * step;
    if (Tile::rows % step != 0 && row >= Tile::rows) break;
    const Elem* from = row_of(row);
    const uint32_t to = tile.address() + fmha::mma::word_offset<Tile>(row, word * word_elems);
#pragma unroll
    for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
      const int32_t column = chunk * Tile::span + word * word_elems;
      copy_word<bytes>(to + chunk * Tile::chunk_bytes, from + column, from ? there_of(row, column) : 0, any);
    }
  }
}

// Copies row by row, in few instructions, for the few blocks that are not whole.
template <int bytes, int threads, class Tile, class RowOf, class ThereOf>
FMHA_DEVICE void copy_rows(const Tile& tile, const void* any, RowOf row_of, ThereOf there_of) {
  constexpr int word_elems = kWordOf<typename Tile::Elem>, words = Tile::dim / word_elems;
#pragma unroll 4
  for (int32_t at = threadIdx.x; at < Tile::rows * words; at += threads) {
    const int32_t row = at / words, column = at % words * word_elems;
    const typename Tile::Elem* from = row_of(row);
    copy_word<bytes>(tile.address() + fmha::mma::word_offset<Tile>(row, column), from + column, from ? there_of(row, column) : 0, any);
  }
}

// Copies a tile that has all its rows, `stride` elements apart. No row needs
// a check, so a copy takes an addition instead of a comparison and a product.
template <int bytes, int threads, class Tile, class ThereOf>
FMHA_DEVICE void copy_whole_tile(const Tile& tile, const typename Tile::Elem* first, int64_t stride, ThereOf there_of) {
  using Elem = typename Tile::Elem;
  constexpr int word_elems = kWordOf<Elem>;
  constexpr int words = Tile::span / word_elems, step = threads / words;
  static_assert(threads % words == 0, "a pass takes whole rows");
  const int32_t word = threadIdx.x % words, first_row = threadIdx.x / words;
  const Elem* from = first + first_row * stride + word * word_elems;
  const int64_t pass_stride = step * stride;
#pragma unroll
  for (int pass = 0; pass < ceil_div(Tile::rows, step); ++pass) {
    const int32_t row = first_row + pass * step;
    if (Tile::rows % step != 0 && row >= Tile::rows) break;
    const uint32_t to = tile.address() + fmha::mma::word_offset<Tile>(row, word * word_elems);
#pragma unroll
    for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
      const int32_t there = there_of(row, chunk * Tile::span + word * word_elems);
      copy_word<bytes>(to + chunk * Tile::chunk_bytes, from + chunk * Tile::span, there, first);
    }
    from += pass_stride;
  }
}

// Copies a tile of scattered rows: `row_of(base, within, step)` is row `base + within`, with `within` below `step`.
template <int bytes, int threads, class Tile, class RowOf, class ThereOf>
FMHA_DEVICE void copy_scattered_tile(const Tile& tile, const void* any, RowOf row_of, ThereOf there_of) {
  constexpr int words = Tile::span_bytes / 16, step = threads / words, passes = ceil_div(Tile::rows, step);
  const int32_t first_row = threadIdx.x / words;
  const typename Tile::Elem* rows[passes];
#pragma unroll
  for (int pass = 0; pass < passes; ++pass) {
    rows[pass] = row_of(pass * step, first_row, step);
  }
  copy_tile<bytes, threads>(tile, any, [&](int32_t row) { return rows[(row - first_row) / step]; }, there_of);
}

// Rows of FP8 elements in shared memory, in words of sixteen bytes. Words are exchanged within a row so that no bank
// conflict arises, whether lanes read eight neighbouring keys or every second key, as fragments do.
template <int num_rows, int num_bytes>
struct alignas(16) RawTile {
  static constexpr int rows = num_rows, row_bytes = num_bytes, words = num_bytes / 16;
  static_assert(num_bytes % 16 == 0, "rows are whole copies");
  uint8_t elems[num_rows][num_bytes];
  FMHA_DEVICE uint32_t word_address(int32_t row, int32_t word) const {
    if constexpr (words == 4) {
      // Two rows share a line of 128 bytes. The exchange puts words of one column of eight rows, and words of two
      // columns of four even rows, into different banks: products read such sets at a time.
      const int32_t line = row / 2, exchanged = (line & 3) | (line & 1) << 2;
      return ptx::shared_address(this) + line * 128 + ((row % 2 * 4 + word) ^ exchanged) * 16;
    }
    constexpr int exchanged = words % 8 == 0 ? 7 : 0;
    return ptx::shared_address(this) + row * row_bytes + (word ^ (row & exchanged)) * 16;
  }
};

// Rows of bytes of a latent cache in shared memory: each row's bytes, then its scales. Neighbouring rows are an odd
// number of sixteen bytes apart, so that equal columns of them lie in different banks.
template <int num_rows, int num_bytes>
struct alignas(16) BytesTile {
  using Format = RowFormat<num_bytes>;
  static constexpr int rows = num_rows, row_bytes = num_bytes, pitch = round_up(num_bytes, 16);
  static constexpr int scales = Format::in_page_tail ? Format::stride : Format::values;  // their offset in a row
  static_assert(pitch / 16 % 2 == 1, "neighbouring rows begin in different banks");
  uint8_t bytes[num_rows][pitch];
  FMHA_DEVICE uint32_t address(int32_t row) const { return ptx::shared_address(this) + row * pitch; }
};

// Starts copies of rows of bytes, a warp a row, and does not wait. `row_of(row)` gives a row's addresses, the same in
// all lanes (null: zeros).
template <int threads, class Rows, class RowOf>
FMHA_DEVICE void copy_rows_of_bytes(const Rows& rows, const void* any, RowOf row_of) {
  using Format = typename Rows::Format;
  constexpr int words = Format::stride / 16;
  const int32_t lane = threadIdx.x % 32;
  // Unrolling over all rows would push other code out of the instruction cache.
#pragma unroll 4
  for (int32_t row = threadIdx.x / 32; row < Rows::rows; row += threads / 32) {
    const BytesOfRow from = row_of(row);
    const bool there = from.row != nullptr;
    const uint32_t to = rows.address(row);
#pragma unroll
    for (int first = 0; first < words; first += 32) {
      const int32_t word = first + lane;
      if (word < words) ptx::cp_async<16>(to + 16 * word, there ? from.row + 16 * word : any, there ? 16 : 0);
    }
    if constexpr (Format::in_page_tail) {
      // The last lanes copy the row's scales, which stand behind the row's last word.
      if (lane == 31) ptx::cp_async<8>(to + Format::stride, there ? from.scales : any, there ? 8 : 0);
    }
  }
}

// Converts rows of bytes (FP8) to bf16, one row per warp.
template <bool converts, int threads, class Tile, class Rows>
FMHA_DEVICE void widen_rows_of_bytes(const Tile& to, const Rows& rows) {
  using Format = typename Rows::Format;
  constexpr int words = (Format::values + (Format::stride - Format::rotary) / 2) / 8;
  static_assert(Tile::dim == 8 * words, "a row is whole words");
  const int32_t lane = threadIdx.x % 32;
#pragma unroll 2
  for (int32_t row = threadIdx.x / 32; row < Rows::rows; row += threads / 32) {
    const uint32_t from = rows.address(row);
#pragma unroll
    for (int first = 0; first < words; first += 32) {
      const int32_t word = first + lane;
      if (word >= words) continue;
      uint32_t packed[4];
      if (8 * word < Format::values) {
        uint32_t eight[2];
        ptx::ld_shared_v2_b32(eight, from + 8 * word);
        const uint32_t group = 8 * word / Format::group;
        float scale;
        if constexpr (Format::in_page_tail) {
          scale = e8m0(ptx::ld_shared_u8(from + Rows::scales + group));
        } else {
          scale = float_of(ptx::ld_shared_b32(from + Rows::scales + 4 * group));
        }
        widen_word<DType::E4m3Fn, DType::Bf16, converts>(eight, scale, packed);
      } else {
        ptx::ld_shared_v4_b32(packed, from + Format::rotary + 2 * (8 * word - Format::values));
      }
      ptx::st_shared_v4(to.address() + fmha::mma::word_offset<Tile>(row, 8 * word), packed);
    }
  }
}

// Starts copies of `bytes` each to a raw tile, and does not wait. `row_of(base, within, step)` gives the address of a
// row's `dim` elements (null: zeros).
template <int bytes, int dim, int threads, class Raw, class RowOf>
FMHA_DEVICE void copy_raw_tile(const Raw& tile, const void* any, RowOf row_of) {
  constexpr int all = Raw::rows * Raw::words, passes = ceil_div(all, threads);
  constexpr bool whole_rows = threads % Raw::words == 0;  // of a pass
  const uint8_t* rows[passes];
#pragma unroll
  for (int pass = 0; pass < passes; ++pass) {
    const int32_t at = threadIdx.x + pass * threads;
    if constexpr (whole_rows) {
      rows[pass] = row_of(pass * (threads / Raw::words), threadIdx.x / Raw::words, threads / Raw::words);
    } else {
      rows[pass] = row_of(0, min(at / Raw::words, Raw::rows - 1), Raw::rows);
    }
  }
#pragma unroll
  for (int pass = 0; pass < passes; ++pass) {
    const int32_t at = threadIdx.x + pass * threads, column = at % Raw::words * 16;
    if (all % threads != 0 && at >= all) break;
#pragma unroll
    for (int e = 0; e < 16; e += bytes) {
      const int32_t there = rows[pass] ? clamp(dim - column - e, 0, bytes) : 0;
      ptx::cp_async<bytes>(tile.word_address(at / Raw::words, at % Raw::words) + e, there > 0 ? static_cast<const void*>(rows[pass] + column + e) : any, there);
    }
  }
}

// Copies row by row, in few instructions, for the few blocks that are not whole.
template <int bytes, int dim, int threads, class Raw, class RowOf>
FMHA_DEVICE void copy_raw_rows(const Raw& tile, const void* any, RowOf row_of) {
  constexpr int all = Raw::rows * Raw::words;
#pragma unroll 4
  for (int32_t at = threadIdx.x; at < all; at += threads) {
    const int32_t row = at / Raw::words, word = at % Raw::words;
    const uint8_t* from = row_of(row);
#pragma unroll
    for (int e = 0; e < 16; e += bytes) {
      const int32_t there = from ? clamp(dim - word * 16 - e, 0, bytes) : 0;
      ptx::cp_async<bytes>(tile.word_address(row, word) + e, there > 0 ? static_cast<const void*>(from + word * 16 + e) : any, there);
    }
  }
}

// Copies an unconverted tile that has all its rows, `stride` bytes apart.
template <int bytes, int dim, int threads, class Raw>
FMHA_DEVICE void copy_whole_raw_tile(const Raw& tile, const uint8_t* first, int64_t stride) {
  static_assert(threads % Raw::words == 0, "a pass takes whole rows");
  constexpr int step = threads / Raw::words;
  const int32_t word = threadIdx.x % Raw::words, first_row = threadIdx.x / Raw::words;
  const uint8_t* from = first + first_row * stride + word * 16;
  const int64_t pass_stride = step * stride;
#pragma unroll
  for (int pass = 0; pass < ceil_div(Raw::rows, step); ++pass) {
    const int32_t row = first_row + pass * step;
    if (Raw::rows % step != 0 && row >= Raw::rows) break;
#pragma unroll
    for (int e = 0; e < 16; e += bytes) {
      const int32_t there = dim == Raw::row_bytes ? bytes : clamp(dim - word * 16 - e, 0, bytes);
      ptx::cp_async<bytes>(tile.word_address(row, word) + e, there > 0 ? static_cast<const void*>(from + e) : first, there);
    }
    from += pass_stride;
  }
}

// Widens a raw tile to a tile of 16-bit elements. In each pass half of a warp's lanes store the first of their two
// words and half the second, so that the words lie in different banks. `unit`: the factor is 1.
template <DType stored, DType wide, bool converts, int threads, bool unit, class Tile, class Raw>
FMHA_DEVICE void widen_tile(const Tile& tile, const Raw& raw, float descale) {
  static_assert(Tile::rows == Raw::rows && Tile::dim <= Raw::row_bytes, "the same elements");
  constexpr int all = Raw::rows * Raw::words;
#pragma unroll 4
  for (int32_t at = threadIdx.x; at < all; at += threads) {
    const int32_t row = at / Raw::words, column = at % Raw::words * 16;
    uint32_t bytes[4];
    ptx::ld_shared_v4_b32(bytes, raw.word_address(row, at % Raw::words));
    const bool second_first = threadIdx.x & 4;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const bool second = second_first != (k == 1);
      const uint32_t word[2] = {second ? bytes[2] : bytes[0], second ? bytes[3] : bytes[1]};
      uint32_t packed[4];
      widen_word<stored, wide, converts, unit>(word, descale, packed);
      ptx::st_shared_v4(tile.address() + fmha::mma::word_offset<Tile>(row, column + (second ? kWord : 0)), packed);
    }
  }
}

// Widens a tile straight from global memory, element by element, for rows that begin on odd bytes.
template <DType stored, DType wide, bool converts, int threads, class Tile, class RowOf, class ThereOf>
FMHA_DEVICE void widen_odd_tile(const Tile& tile, float descale, RowOf row_of, ThereOf there_of) {
  constexpr int words = Tile::dim / kWord;
#pragma unroll 1
  for (int32_t at = threadIdx.x; at < Tile::rows * words; at += threads) {
    const int32_t row = at / words, column = at % words * kWord;
    const uint8_t* from = row_of(row);
    const int32_t there = from ? there_of(row, column) : 0;
    uint32_t bytes[2] = {0, 0}, packed[4];
#pragma unroll
    for (int e = 0; e < kWord; ++e)
      if (e < there) bytes[e / 4] |= uint32_t(from[column + e]) << 8 * (e % 4);
    widen_word<stored, wide, converts>(bytes, descale, packed);
    ptx::st_shared_v4(tile.address() + fmha::mma::word_offset<Tile>(row, column), packed);
  }
}

// Number of elements that a row of `dim` elements has in the sixteen bytes from `column` on.
template <int dim, class Elem = uint16_t>
FMHA_DEVICE int32_t elems_there(int32_t column) {
  constexpr int all = kWordOf<Elem>;
  return dim % all == 0 ? (column < dim ? all : 0) : clamp(dim - column, 0, all);
}

}  // namespace fmha::sm80
