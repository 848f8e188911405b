// The language: HIP's keywords for a bare clang (hipRTC brings its own) and the vector types that
// AMD's builtins take.
#pragma once

#ifndef __global__
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif

#include <fmha/portable.h>

#define FMHA_LDS __attribute__((address_space(3)))
#define FMHA_CONSTANT __attribute__((address_space(4)))

namespace fmha {

template <class T, int n>
using Vec = T __attribute__((ext_vector_type(n)));

// Type A if the condition holds, otherwise B.
template <bool condition, class A, class B>
struct Choose {
  using type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using type = B;
};

using f16 = _Float16;
using bf16 = __bf16;
using f16x4 = Vec<f16, 4>;
using f16x8 = Vec<f16, 8>;
using bf16x8 = Vec<bf16, 8>;
using s16x4 = Vec<short, 4>;
using f32x2 = Vec<float, 2>;
using f32x4 = Vec<float, 4>;
using f32x16 = Vec<float, 16>;
using u32x2 = Vec<uint32_t, 2>;
using u32x4 = Vec<uint32_t, 4>;
using s32x8 = Vec<int, 8>;

enum class Arch { Gfx90a, Gfx942, Gfx950, Gfx1100, Gfx1201 };

#if defined(__gfx1100__)
constexpr Arch kArch = Arch::Gfx1100;
#elif defined(__gfx1201__)
constexpr Arch kArch = Arch::Gfx1201;
#elif defined(__gfx950__)
constexpr Arch kArch = Arch::Gfx950;
#elif defined(__gfx942__)
constexpr Arch kArch = Arch::Gfx942;
#else
constexpr Arch kArch = Arch::Gfx90a;
#endif

}  // namespace fmha
