// Conversions of number types by bit operations, correct on every device
// but slow. Kernels with conversion instructions use those instead.
#pragma once
#include <fmha/spec.h>

namespace fmha {

// A binary format of at most 16 bits: sign, exponent, mantissa.
struct SmallFloat {
  int32_t exponent_bits, mantissa_bits, bias;
  bool has_infinity;     // IEEE: the largest exponent holds infinities and NaN
  bool unsigned_zero;    // FNUZ: one zero, and the code of -0 is the only NaN
  bool saturates;        // on conversion, infinities too
  uint32_t largest;      // code of the largest finite value
};

FMHA_DEVICE constexpr SmallFloat format_of(DType dtype) {
  switch (dtype) {
    case DType::F16: return {5, 10, 15, true, false, false, 0x7bff};
    case DType::E4m3Fn: return {4, 3, 7, false, false, true, 0x7e};
    case DType::E5m2: return {5, 2, 15, true, false, true, 0x7b};
    case DType::E4m3Fnuz: return {4, 3, 8, false, true, true, 0x7f};
    default: return {5, 2, 16, false, true, true, 0x7f};  // E5m2Fnuz
  }
}

FMHA_DEVICE constexpr int32_t size_bytes(DType dtype) {
  return dtype == DType::F32 ? 4 : dtype == DType::F16 || dtype == DType::Bf16 ? 2 : 1;
}
FMHA_DEVICE constexpr bool is_fp8(DType dtype) { return size_bytes(dtype) == 1; }

FMHA_DEVICE float decode(SmallFloat f, uint32_t code) {
  const uint32_t sign = code >> (f.exponent_bits + f.mantissa_bits) << 31;
  const uint32_t magnitude = code & ((1u << (f.exponent_bits + f.mantissa_bits)) - 1);
  const bool is_special = f.unsigned_zero ? sign && magnitude == 0
                          : f.has_infinity ? magnitude >= (((1u << f.exponent_bits) - 1) << f.mantissa_bits)
                                           : magnitude > f.largest;
  if (is_special) {
    const bool is_infinity =
        f.has_infinity && magnitude == (((1u << f.exponent_bits) - 1) << f.mantissa_bits);
    return float_of(is_infinity ? sign | 0x7f800000u : 0x7fc00000u);
  }
  const uint32_t exponent = magnitude >> f.mantissa_bits;
  const uint32_t mantissa = magnitude & ((1u << f.mantissa_bits) - 1);
  if (exponent == 0) {
    const float unit = float_of(uint32_t(127 + 1 - f.bias - f.mantissa_bits) << 23);
    return float_of(sign | bits_of(float(mantissa) * unit));
  }
  return float_of(sign | (exponent - f.bias + 127) << 23 | mantissa << (23 - f.mantissa_bits));
}

// Rounds to nearest, ties to even.
FMHA_DEVICE uint32_t encode(SmallFloat f, float x) {
  const uint32_t sign = bits_of(x) >> 31 << (f.exponent_bits + f.mantissa_bits);
  const uint32_t infinity_code = ((1u << f.exponent_bits) - 1) << f.mantissa_bits;
  if (is_nan(x)) {
    return f.unsigned_zero  ? 1u << (f.exponent_bits + f.mantissa_bits)
           : f.has_infinity ? infinity_code | 1u << (f.mantissa_bits - 1)
                            : f.largest + 1;
  }
  const float a = abs_of(x);
  const float smallest_normal = float_of(uint32_t(127 + 1 - f.bias) << 23);
  uint32_t code;
  if (a < smallest_normal) {
    const float units = a * float_of(uint32_t(127 - 1 + f.bias + f.mantissa_bits) << 23);
    code = bits_of(units + 8388608.f) - bits_of(8388608.f);  // 2^23: the sum's last bit is a unit
  } else {
    const int32_t dropped = 23 - f.mantissa_bits;
    const uint32_t to_even = (bits_of(a) >> dropped & 1) + (1u << (dropped - 1)) - 1;
    code = ((bits_of(a) + to_even) >> dropped) - (uint32_t(127 - f.bias) << f.mantissa_bits);
    if (code > f.largest) code = f.saturates ? f.largest : infinity_code;
  }
  return f.unsigned_zero && code == 0 ? 0 : sign | code;
}

FMHA_DEVICE uint16_t bf16_of(float x) {
  if (is_nan(x)) return 0x7fc0;
  return uint16_t((bits_of(x) + 0x7fff + (bits_of(x) >> 16 & 1)) >> 16);
}

template <DType dtype>
FMHA_DEVICE float load_elem(const void* data, int64_t index) {
  if constexpr (dtype == DType::F32) {
    return static_cast<const float*>(data)[index];
  } else if constexpr (dtype == DType::Bf16) {
    return float_of(uint32_t(static_cast<const uint16_t*>(data)[index]) << 16);
  } else if constexpr (dtype == DType::F16) {
    return decode(format_of(dtype), static_cast<const uint16_t*>(data)[index]);
  } else {
    return decode(format_of(dtype), static_cast<const uint8_t*>(data)[index]);
  }
}

template <DType dtype>
FMHA_DEVICE void store_elem(void* data, int64_t index, float x) {
  if constexpr (dtype == DType::F32) {
    static_cast<float*>(data)[index] = x;
  } else if constexpr (dtype == DType::Bf16) {
    static_cast<uint16_t*>(data)[index] = bf16_of(x);
  } else if constexpr (dtype == DType::F16) {
    static_cast<uint16_t*>(data)[index] = uint16_t(encode(format_of(dtype), x));
  } else {
    static_cast<uint8_t*>(data)[index] = uint8_t(encode(format_of(dtype), x));
  }
}

// x rounded to the type and back.
template <DType dtype>
FMHA_DEVICE float round_to(float x) {
  if constexpr (dtype == DType::F32) {
    return x;
  } else if constexpr (dtype == DType::Bf16) {
    return float_of(uint32_t(bf16_of(x)) << 16);
  } else {
    return decode(format_of(dtype), encode(format_of(dtype), x));
  }
}

// Scale of P before P is rounded to FP8: the largest power of two within the type's range, so that small
// probabilities are not flushed to 0; 1 for wider types.
FMHA_DEVICE constexpr float p_scale(DType dtype) {
  switch (dtype) {
    case DType::E4m3Fn: return 256.f;
    case DType::E4m3Fnuz: return 128.f;
    case DType::E5m2:
    case DType::E5m2Fnuz: return 32768.f;
    default: return 1.f;
  }
}

}  // namespace fmha
