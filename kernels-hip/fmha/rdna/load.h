// Q from memory to operands, K and V from memory to LDS.
#pragma once
#include <fmha/isa/sched.h>
#include <fmha/rdna/config.h>

namespace fmha::rdna {

// Words at an address that is only known to be a multiple of 4.
template <class Piece>
using OnDwords __attribute__((aligned(4))) = Piece;

// Rows of one head of a tensor, at a stride in bytes: rows from
// `num_rows` on, and elements from `num_elems` on, read as 0.
struct Rows {
  const uint8_t* data;
  int64_t row_bytes, elem_bytes;  // from row to row, from element to element of a row
  int32_t num_rows, num_elems;

  // A `Piece` of bytes that begins at an element and lies either completely inside a row or completely outside.
  template <class Piece, int size>
  FMHA_DEVICE Piece piece(int32_t row, int32_t elem) const {
    if (row >= num_rows || elem >= num_elems) return Piece{};
    return *reinterpret_cast<const OnDwords<Piece>*>(data + row * row_bytes + elem * size);
  }

  template <int size>
  FMHA_DEVICE uint32_t elem(int32_t row, int32_t elem) const {
    if (row >= num_rows || elem >= num_elems) return 0;
    const uint8_t* const from = data + row * row_bytes + elem * elem_bytes;
    if constexpr (size == 1) return *from;
    return *reinterpret_cast<const uint16_t*>(from);
  }
};

// Row `row` of Q as operands, of the wave's columns; if the operand is kept in halves, only this lane's half, otherwise
// all elements that the instruction takes from a lane.
template <CdnaSpec spec, RdnaTile tile, class C = Config<spec, tile>>
FMHA_DEVICE void load_q(Array<Vec<uint32_t, C::q_words>, C::qk_steps>& q, const Rows& rows, int32_t row,
                        int half = lane_half()) {
  constexpr int elems = C::q_words * 4 / C::qk_bytes;
  const int first = column_wave<C>() * C::wave_dim_qk + (elems == kEdge ? 0 : half * elems);
#pragma unroll
  for (int c = 0; c < C::qk_steps; ++c) {
    const int32_t elem = c * kEdge + first;
    if constexpr (C::by_element) {
#pragma unroll
      for (int w = 0; w < C::q_words; ++w) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 4 / C::qk_bytes; ++i)
          word |= rows.elem<C::qk_bytes>(row, elem + w * 4 / C::qk_bytes + i) << (8 * C::qk_bytes * i);
        q[c][w] = word;
      }
      sched_barrier();
    } else {
      constexpr int at_once = C::q_words < 4 ? C::q_words : 4;
#pragma unroll
      for (int w = 0; w < C::q_words; w += at_once) {
        const auto piece = rows.piece<Vec<uint32_t, at_once>, C::qk_bytes>(row, elem + w * 4 / C::qk_bytes);
#pragma unroll
        for (int i = 0; i < at_once; ++i) q[c][w + i] = piece[i];
      }
    }
  }
}

// Loads and stores a tile of K. `Source`: Rows, or another type with `piece` and `elem`.
template <CdnaSpec spec, RdnaTile tile, class Source, class C = Config<spec, tile>>
FMHA_DEVICE void copy_k(typename C::K& k, const Source& rows) {
  if constexpr (C::by_element) {
#pragma nounroll
    for (int id = opaque_thread_idx(); id < tile.block_n * spec.head_dim_qk; id += C::num_threads) {
      const int row = id / spec.head_dim_qk, elem = id % spec.head_dim_qk;
      uint8_t* const to = &k.bytes[row * C::K::stride + elem * C::qk_bytes];
      const uint32_t x = rows.template elem<C::qk_bytes>(row, elem);
      if constexpr (C::qk_bytes == 1) *to = uint8_t(x);
      else *reinterpret_cast<uint16_t*>(to) = uint16_t(x);
    }
  } else {
    // With rows shorter than all banks together, neighbours in a row would conflict with the next row's banks.
    constexpr int size = C::qk_bytes == 2 ? 16 : 8, pieces = spec.head_dim_qk * C::qk_bytes / size;
    constexpr bool rows_first = pieces * size % 128 != 0;
    using Piece = Vec<uint32_t, size / 4>;
#pragma unroll 4
    for (int id = opaque_thread_idx(); id < tile.block_n * pieces; id += C::num_threads) {
      const int row = rows_first ? id % tile.block_n : id / pieces;
      const int piece = rows_first ? id / tile.block_n : id % pieces;
      *reinterpret_cast<Piece*>(&k.bytes[row * C::K::stride + piece * size]) =
          rows.template piece<Piece, C::qk_bytes>(row, piece * size / C::qk_bytes);
    }
  }
}

// The top bit of each element of a word whose value is not finite.
template <DType dtype>
FMHA_DEVICE uint32_t nonfinite_elems(uint32_t word) {
  constexpr uint32_t ones = size_bytes(dtype) == 2 ? 0x00010001 : 0x01010101;
  constexpr uint32_t tops = ones << (8 * size_bytes(dtype) - 1);
  constexpr uint32_t least = dtype == DType::F16    ? 0x7c00
                             : dtype == DType::Bf16 ? 0x7f80
                             : dtype == DType::E5m2 ? 0x7c
                                                    : 0x7f;
  return ((word & ~tops) + (tops / ones - least) * ones) & tops;
}

// A masked key has P = 0, and 0 x NaN is NaN: in a partly masked tile non-finite values are written to LDS as 0, and
// added after O is written to the queries that see them. The result is not 0 if there was such a value. It is an
// integer and no bool, since the compiler would merge a bool's lane mask over loops.
template <DType dtype>
FMHA_DEVICE uint32_t zero_nonfinite(uint32_t& word) {
  constexpr uint32_t bits = 8 * size_bytes(dtype);
  const uint32_t found = nonfinite_elems<dtype>(word);
  word &= ~((found >> (bits - 1)) * ((1u << bits) - 1));
  return found;
}

template <CdnaSpec spec, RdnaTile tile, class Source, class C = Config<spec, tile>>
FMHA_DEVICE uint32_t copy_v(typename C::V& v, const Source& rows, bool partly_masked) {
  constexpr int per_word = 4 / C::v_bytes, columns = tile.block_n / per_word;
  uint32_t zeroed = 0;
  if constexpr (C::by_element) {
#pragma nounroll
    for (int id = opaque_thread_idx(); id < columns * spec.head_dim_v; id += C::num_threads) {
      const int column = id / spec.head_dim_v, dim = id % spec.head_dim_v;
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < per_word; ++i) {
        const int place = column * per_word + i, key = place / kEdge * kEdge + key_of_place(place % kEdge);
        word |= rows.template elem<C::v_bytes>(key, dim) << (8 * C::v_bytes * i);
      }
      if (partly_masked) zeroed |= zero_nonfinite<spec.dtype_v>(word);
      *reinterpret_cast<uint32_t*>(&v.bytes[dim * C::V::stride + column * 4]) = word;
    }
  } else {
    // A lane transposes four head dims of the keys of a word; neighbours have neighbouring words of a row. Where a
    // row has only 16 words, lanes 16 to 31 go to rows 16 banks away: by four, of one-byte rows by eight. Where it
    // has eight, lanes 16 to 31 have their head dims in another order, which is 24 banks away.
    constexpr int kDims = 4, groups = spec.head_dim_v / kDims;
    using Piece = Vec<uint32_t, C::v_bytes>;
#pragma unroll 2
    for (int id = opaque_thread_idx(); id < columns * groups; id += C::num_threads) {
      const int column = id % columns, at = id / columns;
      const int group = C::v_bytes == 2 ? at : (at & ~3) | (at & 1) << 1 | (at >> 1 & 1);
      const int flip = C::v_bytes == 2 && columns == 8 ? at & 2 : 0;
      Piece of_key[per_word];
#pragma unroll
      for (int i = 0; i < per_word; ++i) {
        const int place = column * per_word + i, key = place / kEdge * kEdge + key_of_place(place % kEdge);
        of_key[i] = rows.template piece<Piece, C::v_bytes>(key, group * kDims);
        if constexpr (C::v_bytes == 2 && columns == 8) of_key[i] = flip ? of_key[i].yx : of_key[i];
      }
#pragma unroll
      for (int d = 0; d < kDims; ++d) {
        uint32_t word = 0;
        if constexpr (C::v_bytes == 2) {
          constexpr uint32_t kLow = 0x05040100, kHigh = 0x07060302;
          word = v_perm_b32(of_key[1][d / 2], of_key[0][d / 2], d % 2 ? kHigh : kLow);
        } else {
#pragma unroll
          for (int i = 0; i < per_word; ++i) word |= (of_key[i][0] >> (8 * d) & 0xff) << (8 * i);
        }
        if (partly_masked) zeroed |= zero_nonfinite<spec.dtype_v>(word);
        *reinterpret_cast<uint32_t*>(&v.bytes[(group * kDims + (d ^ flip)) * C::V::stride + column * 4]) = word;
      }
    }
  }
  return zeroed;
}

}  // namespace fmha::rdna
