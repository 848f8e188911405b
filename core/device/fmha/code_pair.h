// Operands of printed expressions: a pair's place, and the captures of a call (core/src/text/code_source.rs). The
// captures are words of the call's arguments:
//
//   number   its bits
//   tensor   its address, then its strides in elements, then its extents
#pragma once
#include <fmha/expr.h>
#include <fmha/num.h>

namespace fmha::code {

// Element type of a tensor that a function captures.
enum class Stored { F32, F16, Bf16, I32, I64, Bool };

// A capture of a function. `Layout` describes it by its place: the first word (`word`), axes (`rank`), the type
// (`stored`), and the word that says where its gradient is summed (`gradient`), or -1.
template <class Layout>
struct CodePair {
  int32_t b, h, q, k, seqlen_q, seqlen_k;
  const uint64_t* words;

  FMHA_DEVICE float number(int i) const { return float_of(uint32_t(words[Layout::word(i)])); }
  FMHA_DEVICE int64_t whole_number(int i) const { return int64_t(words[Layout::word(i)]); }
  // Extent of an axis; it is below 2^32, so one word holds it.
  FMHA_DEVICE uint32_t extent(int i, int axis) const {
    return uint32_t(words[Layout::word(i) + 1 + Layout::rank(i) + axis]);
  }
  FMHA_DEVICE int64_t place(int i, const int64_t* at) const {
    int64_t place = 0;
#pragma unroll
    for (int axis = 0; axis < Layout::rank(i); ++axis) place += at[axis] * int64_t(words[Layout::word(i) + 1 + axis]);
    return place;
  }
  template <class T>
  FMHA_DEVICE T element(int i, const int64_t* at) const {
    return reinterpret_cast<const FMHA_GLOBAL T*>(words[Layout::word(i)])[place(i, at)];
  }
  FMHA_DEVICE float load_float(int i, const int64_t* at) const {
    switch (Layout::stored(i)) {
      case Stored::F32: return element<float>(i, at);
      case Stored::Bf16: return float_of(uint32_t(element<uint16_t>(i, at)) << 16);
      default: return decode(format_of(DType::F16), element<uint16_t>(i, at));
    }
  }
  FMHA_DEVICE int64_t load_int(int i, const int64_t* at) const {
    switch (Layout::stored(i)) {
      case Stored::I32: return element<int32_t>(i, at);
      case Stored::I64: return element<int64_t>(i, at);
      default: return element<uint8_t>(i, at) != 0;
    }
  }
  // Index of an element in the gradient of a captured tensor, which is dense.
  FMHA_DEVICE int64_t dense_place(int i, const int64_t* at) const {
    int64_t place = 0;
#pragma unroll
    for (int axis = 0; axis < Layout::rank(i); ++axis) place = place * extent(i, axis) + at[axis];
    return place;
  }
};

// A tile of pairs for which a mask's bounds are evaluated: ranges of the pair's indices, and the captures.
template <class Layout>
struct CodeTile {
  expr::Bound b, h, q, k, seqlen_q, seqlen_k;
  const uint64_t* words;

  FMHA_DEVICE CodePair<Layout> captures() const { return {0, 0, 0, 0, 0, 0, words}; }
  FMHA_DEVICE int64_t whole_number(int i) const { return captures().whole_number(i); }
  FMHA_DEVICE uint32_t extent(int i, int axis) const { return captures().extent(i, axis); }
  FMHA_DEVICE int64_t load_int(int i, const int64_t* at) const { return captures().load_int(i, at); }
};

}  // namespace fmha::code
