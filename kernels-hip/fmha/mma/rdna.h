// Typed tiles of RDNA's matrix instruction: which register holds which (row, col), and how an accumulator becomes an
// operand. Every product is 16 x 16 x 16 over a wave of 32.
//
// A and B: lane l has row (or column) l % 16. On gfx11 it holds all 16 of the contracted axis, and lanes l and l + 16
// the same; on gfx12 lane l holds elements 8 (l / 16) .. + 7.
// C and D: lane l has column l % 16, and of it eight rows: on gfx11 every second one, on gfx12 eight adjacent ones.
#pragma once
#include <fmha/isa/lane.h>
#include <fmha/isa/num.h>
#include <fmha/isa/wmma.h>
#include <fmha/num.h>

namespace fmha::rdna {

constexpr int kEdge = 16;        // rows, columns and depth of a product
constexpr int kAccElems = 8;     // of a lane, of a product
constexpr bool kRepeats = kArch == Arch::Gfx1100;  // lanes 16 to 31 of an operand repeat lanes 0 to 15
constexpr int kOperandElems = kRepeats ? 16 : 8;   // of a lane, of an operand

using Acc = f32x8;

FMHA_DEVICE int lane_idx(int thread = thread_idx()) { return thread % kWaveSize; }
FMHA_DEVICE int lane_col(int thread = thread_idx()) { return thread % kEdge; }
FMHA_DEVICE int lane_half(int thread = thread_idx()) { return thread / kEdge % 2; }

// Row of register i of an accumulator. RDNA3 ISA 7.9, RDNA4 ISA 7.12.
FMHA_DEVICE constexpr int acc_row(int i, int half) { return kRepeats ? 2 * i + half : 8 * half + i; }

// The contraction of P V runs over the rows of an accumulator of S^T. On gfx12 these rows are in the order of an
// operand. On gfx11 a lane has every second row, and the two halves of the wave exchange rows: the even rows come
// first.
FMHA_DEVICE constexpr int key_of_place(int place) {
  return !kRepeats ? place : place < 8 ? 2 * place : 2 * place - 15;
}
FMHA_DEVICE constexpr int place_of_key(int key) { return !kRepeats ? key : key % 2 * 8 + key / 2; }

// A lane's part of an operand; the next type is half of a row of 16 elements.
template <DType dtype>
struct Fragment {
  static constexpr int words = kOperandElems * size_bytes(dtype) / 4, half_words = 2 * size_bytes(dtype);
};
template <DType dtype>
using Operand = Vec<uint32_t, Fragment<dtype>::words>;
template <DType dtype>
using HalfOperand = Vec<uint32_t, Fragment<dtype>::half_words>;

// Computes C += A B.
template <DType dtype>
FMHA_DEVICE Acc mma(const Operand<dtype>& a, const Operand<dtype>& b, Acc c) {
#if defined(__gfx1100__)
  if constexpr (dtype == DType::F16)
    return v_wmma_f32_16x16x16_f16(__builtin_bit_cast(f16x16, a), __builtin_bit_cast(f16x16, b), c);
  else
    return v_wmma_f32_16x16x16_bf16(__builtin_bit_cast(s16x16, a), __builtin_bit_cast(s16x16, b), c);
#elif defined(__gfx1201__)
  if constexpr (dtype == DType::F16)
    return v_wmma_f32_16x16x16_f16(__builtin_bit_cast(f16x8, a), __builtin_bit_cast(f16x8, b), c);
  else if constexpr (dtype == DType::Bf16)
    return v_wmma_f32_16x16x16_bf16(__builtin_bit_cast(s16x8, a), __builtin_bit_cast(s16x8, b), c);
  else if constexpr (dtype == DType::E4m3Fn)
    return v_wmma_f32_16x16x16_fp8_fp8(__builtin_bit_cast(s32x2, a), __builtin_bit_cast(s32x2, b), c);
  else
    return v_wmma_f32_16x16x16_bf8_bf8(__builtin_bit_cast(s32x2, a), __builtin_bit_cast(s32x2, b), c);
#endif
}

FMHA_DEVICE float other_half(float x) { return float_of(v_permlanex16_b32(bits_of(x))); }

// Operand made of halves: lane l has elements 8 (l / 16) .. + 7 of its
// row, as gfx12 needs; on gfx11 the other half comes from lane l ^ 16.
template <DType dtype>
FMHA_DEVICE Operand<dtype> joined(const HalfOperand<dtype>& own) {
  Operand<dtype> whole;
#pragma unroll
  for (int w = 0; w < Fragment<dtype>::half_words; ++w) {
    if constexpr (kRepeats) {
      const uint32_t other = v_permlanex16_b32(own[w]);
      const bool is_upper = lane_half() != 0;
      whole[w] = is_upper ? other : own[w];
      whole[w + Fragment<dtype>::half_words] = is_upper ? own[w] : other;
    } else {
      whole[w] = own[w];
    }
  }
  return whole;
}

// Packs two P in bf16 in one word. P is not negative and not subnormal, so half a unit added to the bits rounds to
// nearest, ties away from 0: RDNA 3 has no conversion instruction.
FMHA_DEVICE uint32_t pack_p_bf16(float a, float b) {
  constexpr uint32_t kHalfUnit = 0x8000, kHighHalves = 0x07060302;
  return v_perm_b32(bits_of(b) + kHalfUnit, bits_of(a) + kHalfUnit, kHighHalves);
}

#if defined(__gfx1201__)
// Converts four values of at most the type's largest number to FP8. Both halves of `any` are overwritten: its content
// does not matter, only its register.
template <DType dtype>
FMHA_DEVICE uint32_t fp8_word(float a, float b, float c, float d, uint32_t any) {
  if constexpr (dtype == DType::E4m3Fn) return v_cvt_pk_fp8_f32<true>(c, d, v_cvt_pk_fp8_f32<false>(a, b, any));
  return v_cvt_pk_bf8_f32<true>(c, d, v_cvt_pk_bf8_f32<false>(a, b, any));
}
#endif

// A lane's P as half of an operand.
template <DType dtype>
FMHA_DEVICE HalfOperand<dtype> packed_p(const Acc& p) {
  HalfOperand<dtype> words;
#pragma unroll
  for (int w = 0; w < Fragment<dtype>::half_words; ++w) {
    if constexpr (dtype == DType::F16) {
      words[w] = __builtin_bit_cast(uint32_t, Vec<f16, 2>{f16(p[2 * w]), f16(p[2 * w + 1])});
    } else if constexpr (dtype == DType::Bf16) {
      words[w] = pack_p_bf16(p[2 * w], p[2 * w + 1]);
    } else {
#if defined(__gfx1201__)
      words[w] = fp8_word<dtype>(p[4 * w], p[4 * w + 1], p[4 * w + 2], p[4 * w + 3], bits_of(p[4 * w]));
#endif
    }
  }
  return words;
}

// Values of rows 8 half .. + 7 of a lane's column, in order.
FMHA_DEVICE Array<float, kAccElems> rows_in_order(const Acc& acc) {
  Array<float, kAccElems> rows;
  if constexpr (!kRepeats) {
#pragma unroll
    for (int i = 0; i < kAccElems; ++i) rows[i] = acc[i];
  } else {
    const bool is_upper = lane_half() != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The lower half has even rows and needs rows 1, 3, 5, 7; the upper half has odd rows and needs 8, 10, 12, 14.
      const float received = other_half(is_upper ? acc[i] : acc[i + 4]);
      rows[2 * i] = is_upper ? received : acc[i];
      rows[2 * i + 1] = is_upper ? acc[i + 4] : received;
    }
  }
  return rows;
}

}  // namespace fmha::rdna
