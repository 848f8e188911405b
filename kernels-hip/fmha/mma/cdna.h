// Typed tiles of CDNA's matrix instructions: which register holds which (row, col), products over
// 32-byte steps, and conversions between an accumulator and an operand.
//
// Every product here is 32 x 32 over a wave of 64. Lane l has column (or row) l % 32 of an operand
// and half l / 32 of each step. A step is 32 bytes of the contracted axis, 16 for each half: 16
// elements of two bytes, 32 of one. Which elements the hardware pairs inside a step differs from
// instruction to instruction; a sum does not care, as long as A and B agree.
#pragma once
#include <fmha/isa/lane.h>
#include <fmha/isa/mfma.h>
#include <fmha/isa/num.h>
#include <fmha/num.h>

namespace fmha {

constexpr int kEdge = 32;        // rows, and columns, of a product
constexpr int kFragBytes = 16;   // of a lane, of an operand, of one step
constexpr int kStepBytes = 2 * kFragBytes;

using Frag = u32x4;
using Acc = f32x16;

FMHA_DEVICE int lane_idx() { return thread_idx() % kWaveSize; }
FMHA_DEVICE int lane_col(int thread = thread_idx()) { return thread % kEdge; }
FMHA_DEVICE int lane_half(int thread = thread_idx()) { return thread / kEdge % 2; }

// Row of register i of an accumulator: registers come in runs of four adjacent rows.
// CDNA3 ISA 7.1.4.2, "32x32 output".
constexpr int kRun = 4;
FMHA_DEVICE constexpr int acc_row(int i, int half) { return 8 * (i / kRun) + 4 * half + i % kRun; }

// The contraction of P V runs over the rows of an accumulator of S, in the order in which its registers become
// fragments. So this is the place of V's row `key` in its 32-byte step.
template <int elem_bytes>
struct KeyOrder {
  static constexpr int per_step = kStepBytes / elem_bytes;
  static constexpr int runs_per_half = per_step / 2 / kRun;

  // The first key of the run of four keys at places 4 * i_run .. 4 * i_run + 3.
  static FMHA_DEVICE constexpr int first_key(int i_run) {
    const int in_step = i_run % (2 * runs_per_half);
    return i_run / (2 * runs_per_half) * per_step + 8 * (in_step % runs_per_half) + 4 * (in_step / runs_per_half);
  }

  // Inverse of `first_key`, for a key that is a multiple of four.
  static FMHA_DEVICE constexpr int run_of(int key) {
    const int in_step = key % per_step;
    return key / per_step * 2 * runs_per_half + in_step / 4 % 2 * runs_per_half + in_step / 8;
  }
};

FMHA_DEVICE long low_half(Frag x) { return __builtin_bit_cast(long, u32x2{x[0], x[1]}); }
FMHA_DEVICE long high_half(Frag x) { return __builtin_bit_cast(long, u32x2{x[2], x[3]}); }

constexpr bool is_e4m3(DType dtype) { return dtype == DType::E4m3Fn || dtype == DType::E4m3Fnuz; }

// Number of steps of a matrix slot, and its instructions. On
// gfx950 an FP8 slot has two steps at once, at twice the rate.
template <DType dtype>
struct Mma {
  static constexpr bool wide = kArch == Arch::Gfx950;
  static constexpr int steps_at_once = wide && is_fp8(dtype) ? 2 : 1;
  static constexpr int parts = wide && !is_fp8(dtype) ? 1 : 2;
  static constexpr int per_word = 4 / size_bytes(dtype);  // elements in a word of a fragment

  // Fragments of `steps_at_once` adjacent steps.
  using Operand = Array<Frag, steps_at_once>;
};

// Issues instruction `part` of C += A B over one step.
template <DType dtype>
FMHA_DEVICE Acc mma_part(Frag a, Frag b, int part, Acc c) {
  static_assert(dtype != DType::F32, "MFMA of f32 operands is no kernel's here");
#if defined(__gfx950__)
  if constexpr (dtype == DType::F16)
    return v_mfma_f32_32x32x16_f16(__builtin_bit_cast(f16x8, a), __builtin_bit_cast(f16x8, b), c);
  if constexpr (dtype == DType::Bf16)
    return v_mfma_f32_32x32x16_bf16(__builtin_bit_cast(bf16x8, a), __builtin_bit_cast(bf16x8, b), c);
#endif
  const long a_half = part == 0 ? low_half(a) : high_half(a), b_half = part == 0 ? low_half(b) : high_half(b);
#if !defined(__gfx950__)
  if constexpr (dtype == DType::F16)
    return v_mfma_f32_32x32x8_f16(__builtin_bit_cast(f16x4, a_half), __builtin_bit_cast(f16x4, b_half), c);
  if constexpr (dtype == DType::Bf16)
    return v_mfma_f32_32x32x8_bf16(__builtin_bit_cast(s16x4, a_half), __builtin_bit_cast(s16x4, b_half), c);
#endif
#if defined(__gfx942__) || defined(__gfx950__)
  if constexpr (is_e4m3(dtype)) return v_mfma_f32_32x32x16_fp8_fp8(a_half, b_half, c);
  if constexpr (is_fp8(dtype) && !is_e4m3(dtype)) return v_mfma_f32_32x32x16_bf8_bf8(a_half, b_half, c);
#else
  static_assert(!is_fp8(dtype), "gfx90a has no FP8 instructions");
#endif
}

#if defined(__gfx950__)
// Computes C += A B over two steps of FP8.
template <DType dtype>
FMHA_DEVICE Acc mma_two_steps(Frag a0, Frag b0, Frag a1, Frag b1, Acc c) {
  constexpr F8f6f4 type = is_e4m3(dtype) ? F8f6f4::Fp8 : F8f6f4::Bf8;
  auto joined = [](Frag x, Frag y) __attribute__((always_inline)) {
    return s32x8{int(x[0]), int(x[1]), int(x[2]), int(x[3]), int(y[0]), int(y[1]), int(y[2]), int(y[3])};
  };
  return v_mfma_f32_32x32x64_f8f6f4<type>(joined(a0, a1), joined(b0, b1), c);
}
#endif

// Converts four values to FP8. Both halves of `any` are overwritten: its content does not matter, only its register.
template <DType dtype>
FMHA_DEVICE uint32_t fp8_word(float a, float b, float c, float d, uint32_t any) {
#if defined(__gfx942__) || defined(__gfx950__)
  if constexpr (is_e4m3(dtype)) return v_cvt_pk_fp8_f32<true>(c, d, v_cvt_pk_fp8_f32<false>(a, b, any));
  return v_cvt_pk_bf8_f32<true>(c, d, v_cvt_pk_bf8_f32<false>(a, b, any));
#else
  static_assert(!is_fp8(dtype), "gfx90a has no FP8 instructions");
#endif
}

// Converts four values of at most `max_finite(dtype)` to `dtype`, in the low bytes.
template <DType dtype>
FMHA_DEVICE u32x4 pack_run(float a, float b, float c, float d) {
  if constexpr (dtype == DType::F32) {
    return u32x4{bits_of(a), bits_of(b), bits_of(c), bits_of(d)};
  } else if constexpr (dtype == DType::F16) {
    const u32x2 x = __builtin_bit_cast(u32x2, f16x4{f16(a), f16(b), f16(c), f16(d)});
    return u32x4{x[0], x[1], 0, 0};
  } else if constexpr (dtype == DType::Bf16) {
    using bf16x4 = Vec<bf16, 4>;
    const u32x2 x = __builtin_bit_cast(u32x2, bf16x4{bf16(a), bf16(b), bf16(c), bf16(d)});
    return u32x4{x[0], x[1], 0, 0};
  } else {
    return u32x4{fp8_word<dtype>(a, b, c, d, bits_of(a)), 0, 0, 0};
  }
}

// Packs two P in bf16 in one word. P is not negative and not subnormal, so half a unit added to the bits rounds to
// nearest (ties away from 0); gfx950 has an instruction, which rounds ties to even.
FMHA_DEVICE uint32_t pack_p_bf16(float a, float b) {
  if constexpr (kArch == Arch::Gfx950) {
    return __builtin_bit_cast(uint32_t, Vec<bf16, 2>{bf16(a), bf16(b)});
  } else {
    constexpr uint32_t kHalfUnit = 0x8000, kHighHalves = 0x07060302;
    return v_perm_b32(bits_of(b) + kHalfUnit, bits_of(a) + kHalfUnit, kHighHalves);
  }
}

// Registers first .. of P become one word of a fragment of P V. `old` is what the word's register holds: a conversion
// to FP8 writes half of it, and in any other register the word would have to be moved to where the fragment is.
template <DType dtype>
FMHA_DEVICE uint32_t p_word(const Acc& p, int first, uint32_t old) {
  if constexpr (dtype == DType::F16) {
    return __builtin_bit_cast(uint32_t, Vec<f16, 2>{f16(p[first]), f16(p[first + 1])});
  } else if constexpr (dtype == DType::Bf16) {
    return pack_p_bf16(p[first], p[first + 1]);
  } else {
    return fp8_word<dtype>(p[first], p[first + 1], p[first + 2], p[first + 3], old);
  }
}

// Value of the lane in the wave's other half that has the same column.
FMHA_DEVICE float other_half(float x) {
#if defined(__gfx950__)
  const u32x2 swapped = v_permlane32_swap_b32(bits_of(x), bits_of(x));
  return float_of(lane_half() ? swapped[0] : swapped[1]);
#else
  return ds_bpermute_b32(lane_idx() ^ kEdge, x);
#endif
}

// The maximum over both halves of the wave, of the same column, and of -infinity in an opaque register, which saves two
// instructions that would quiet a NaN.
FMHA_DEVICE float max_of_halves(float x, float opaque_neg_inf) {
#if defined(__gfx950__)
  // Each half of the wave finds its own value in one result and the other half's in the other.
  const u32x2 swapped = v_permlane32_swap_b32(bits_of(x), bits_of(x));
  return v_max3_f32(opaque_neg_inf, float_of(swapped[0]), float_of(swapped[1]));
#else
  return v_max3_f32(opaque_neg_inf, x, other_half(x));
#endif
}

}  // namespace fmha
