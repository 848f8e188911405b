// Conversion of scales in E8M0, which are powers of two.
#pragma once
#include <fmha/portable.h>

namespace fmha {

// The power of two of a code in E8M0. The smallest is subnormal in f32, and the largest code is NaN.
FMHA_DEVICE float e8m0(uint32_t code) {
  return float_of(code == 0xff ? 0x7fc00000u : code == 0 ? 1u << 22 : code << 23);
}

}  // namespace fmha
