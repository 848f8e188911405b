// Computes exp2 by multiply-adds. Kernels use it for a share of the exponentials, since the special-function unit does
// only 16 a clock.
#pragma once
#include <fmha/num.h>
#include <fmha/ptx/num.cuh>

namespace fmha {

// Splits x into an integer n and a fraction r by adding 1.5 * 2^23 rounding down, then a cubic in r, relative error
// 9e-5 (below f16's 5e-4), times 2^n; 0 below 2^-126, NaN for NaN. (Algorithm: Cody and Waite, 1980.)
FMHA_DEVICE float exp2_polynomial(float x) {
  constexpr float magic = 12582912.f;
  x = ptx::max_nan(x, -127.f);
  const float shifted = ptx::add_rm_ftz(x, magic);
  const float r = x - (shifted - magic);
  float y = fmaf(r, 0.077119090f, 0.227564394f);
  y = fmaf(r, y, 0.695146143f);
  y = fmaf(r, y, 1.f);
  return y * float_of((bits_of(shifted) << 23) + bits_of(1.f));
}

}  // namespace fmha
