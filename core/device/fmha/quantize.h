// Conversion of a tensor to a format with scales by blocks (CONTRACT.md, "Scales by blocks"), to the bits of the host's
// `BlockFormat::quantize`: integers decide wherever a quotient is rounded, so that the result depends neither on the
// order of f32 operations, nor on flushed subnormals, nor on a compiler's division.
//
// A thread converts one block of numbers; with NVFP4 blocks down columns it converts two, whose elements share bytes. A
// block of NVFP4 has seven least magnitudes, one for each element but 0, and each number is compared with three of
// them: no number is divided.
#pragma once
#include <fmha/num.h>
#include <fmha/quantize_params.h>

namespace fmha::quantize {

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000, kLargest = 0x7f7fffff;

// Words that are contiguous in memory, for one load or store.
template <int count>
struct alignas(4 * count) Words {
  uint32_t words[count];
};

// A positive f32 number as mantissa * 2^exponent, its mantissa in [2^23, 2^24).
struct Scaled {
  uint32_t mantissa;
  int32_t exponent;
};
FMHA_DEVICE Scaled scaled(uint32_t bits) {
  int32_t shift = 0;
  if (bits < 1u << 23) {
    // A subnormal number is a whole number of 2^-149, and so exact as a normal one.
    bits = bits_of(float(bits));
    shift = -149;
  }
  return {(bits & 0x7fffff) | 1u << 23, int32_t(bits >> 23) - 150 + shift};
}

// Index of the highest bit of a number in [1, 2^31).
FMHA_DEVICE int32_t highest_bit(uint32_t x) {
  const int32_t bit = int32_t(bits_of(float(x)) >> 23) - 127;
  return x >> bit == 0 ? bit - 1 : bit;  // float may have rounded up
}

// Magnitude of a number, as f32 bits. For infinity it is the largest finite number, and for NaN 0.
FMHA_DEVICE uint32_t magnitude_of(float x) {
  const uint32_t bits = bits_of(x) & kMagnitude;
  return bits > kInfinity ? 0 : min(bits, kLargest);
}

// x / 2688 to the nearest f32, and 1 where that is not normal. x is a magnitude's bits.
FMHA_DEVICE uint32_t tensor_scale(uint32_t x) {
  constexpr uint32_t one = 127u << 23;
  if (x == 0) return one;
  const Scaled of = scaled(x);
  // The divisor 2688 is 21 * 2^7.
  const uint32_t quotient = (of.mantissa << 8) / 21, is_more = (of.mantissa << 8) % 21 != 0;
  const int32_t high = highest_bit(quotient), exponent = high + of.exponent - 15;
  if (exponent < -127) return one;
  const int32_t dropped = high - 23 + (exponent == -127 ? 1 : 0);
  const uint32_t rest = quotient & ((1u << dropped) - 1), half = 1u << (dropped - 1);
  uint32_t units = quotient >> dropped;
  units += rest > half || (rest == half && (is_more || units % 2));
  // A subnormal number that rounds up to 2^23 units becomes the smallest normal number.
  const uint32_t bits = (uint32_t(max(exponent, -126) + 126) << 23) + units;
  return bits < 1u << 23 ? one : bits;
}

// Smallest power of two that is not below magnitude / largest, where the largest element is 1.75 * 2^top.
FMHA_DEVICE uint32_t power_at_least(uint32_t magnitude, int32_t top) {
  const int32_t exponent = int32_t(magnitude >> 23) - top + ((magnitude & 0x7fffff) > 0x600000 ? 1 : 0);
  return uint32_t(max(exponent, 0));
}

// magnitude / (6 * scale) to the nearest E4M3, ties to even, saturating.
FMHA_DEVICE uint32_t block_scale(uint32_t magnitude, uint32_t scale) {
  if (magnitude == 0) return 0;
  const Scaled x = scaled(magnitude), by = scaled(scale);
  // The quotient has at least 42 units, so that it has E4M3's four digits and one more.
  const uint32_t quotient = (x.mantissa << 8) / (3 * by.mantissa), is_more = (x.mantissa << 8) % (3 * by.mantissa) != 0;
  const int32_t exponent = x.exponent - by.exponent - 9;  // of the quotient's last bit
  const int32_t high = max(highest_bit(quotient) + exponent, -6);
  const int32_t dropped = high - 3 - exponent;
  if (dropped > 12) return 0;
  if (high > 8) return 0x7e;
  const uint32_t rest = quotient & ((1u << dropped) - 1), half = 1u << (dropped - 1);
  uint32_t units = quotient >> dropped;
  units += rest > half || (rest == half && (is_more || units % 2));
  return min(uint32_t(high + 6) * 8 + units, 0x7eu);
}

// Bits of the smallest f32 that is not below product * 2^exponent, or of the smallest above it. The product is in
// [2^23, 2^31).
FMHA_DEVICE uint32_t least(uint32_t product, int32_t exponent, bool above) {
  const int32_t top = highest_bit(product), high = top + exponent;
  if (high > 127) return kInfinity;
  const int32_t dropped = top - 23 + max(-126 - high, 0);
  if (dropped > 31) return 1;
  const uint32_t units = product >> dropped;
  const bool is_exact = units << dropped == product;
  return (uint32_t(max(high, -126) + 126) << 23) + units + (is_exact && !above ? 0 : 1);
}

// For each E2M1 element, the magnitude from which on a number of a block is rounded to it.
struct Steps {
  uint32_t of[8];

  // Computes the steps. `scale` is an E4M3 number without its sign, and neither 0 nor NaN.
  FMHA_DEVICE static Steps make(uint32_t scale, uint32_t tensor_scale) {
    const Scaled by = scaled(tensor_scale);
    const uint32_t mantissa = ((scale & 7) | (scale < 8 ? 0 : 8)) * by.mantissa;
    // The middles between elements are quarters: a tie is rounded up if that gives an even element.
    const int32_t exponent = max(int32_t(scale >> 3), 1) - 10 + by.exponent - 2;
    return {{0, least(mantissa, exponent, true), least(3 * mantissa, exponent, false),
             least(5 * mantissa, exponent, true), least(7 * mantissa, exponent, false),
             least(5 * mantissa, exponent + 1, true), least(7 * mantissa, exponent + 1, false),
             least(5 * mantissa, exponent + 2, true)}};
  }
  FMHA_DEVICE static Steps of_zeros() {
    Steps steps;
#pragma unroll
    for (int i = 0; i < 8; ++i) steps.of[i] = kInfinity;
    return steps;
  }

  FMHA_DEVICE uint32_t element(float x) const {
    const uint32_t magnitude = magnitude_of(x);
    const bool upper = magnitude >= of[4];
    const bool middle = magnitude >= (upper ? of[6] : of[2]);
    const bool last = magnitude >= (upper ? (middle ? of[7] : of[5]) : (middle ? of[3] : of[1]));
    return bits_of(x) >> 31 << 3 | uint32_t(upper) << 2 | uint32_t(middle) << 1 | uint32_t(last);
  }
};

// Converts x / 2^(power - 127) to FP8. A quotient that f32 cannot represent rounds to 0 in any case.
FMHA_DEVICE uint32_t eight_bits(SmallFloat format, float x, uint32_t power) {
  const uint32_t bits = bits_of(x), sign = bits & ~kMagnitude, magnitude = bits & kMagnitude;
  if (magnitude > kInfinity) return encode(format, x);
  // The factor 2^(127 - power) is a normal number, since a block's power is at most 2^120.
  const uint32_t factor = (254 - power) << 23;
  if (magnitude < 1u << 23) {
    // Numbers are counted in units of 2^-149: wherever the result is not 0, the sum of both exponents is in f32's
    // range.
    if (power > 20) return encode(format, float_of(sign));
    const float units = float(magnitude) * float_of(uint32_t(127 - 60) << 23);
    return encode(format, float_of(sign | bits_of(units * float_of(uint32_t(254 - power - 89) << 23))));
  }
  return encode(format, float_of(sign | min(magnitude, kLargest)) * float_of(factor));
}

template <QuantizeSpec spec>
struct Quantize {
  static constexpr bool is_nvfp4 = spec.format == kNvfp4;
  static constexpr int32_t block = is_nvfp4 ? 16 : 32;
  // Number of columns whose elements share a byte.
  static constexpr int32_t columns = is_nvfp4 && !spec.along_dim && !spec.pairs_of_rows ? 2 : 1;
  static constexpr int32_t elem_bytes = size_bytes(spec.dtype);
  static constexpr int32_t elems_of_word = 4 / elem_bytes;
  const QuantizeParams& p;

  // A row of the tensor: its sequence, its position there, and its head.
  struct Row {
    int32_t batch, row, head;
  };
  FMHA_DEVICE Row row_of(int64_t at) const {
    const int64_t rows = at / p.num_heads;
    return {int32_t(rows / p.seqlen), int32_t(rows % p.seqlen), int32_t(at % p.num_heads)};
  }
  FMHA_DEVICE static int64_t offset(const View& of, Row at) {
    return at.batch * of.batch + at.row * of.row + at.head * of.head;
  }

  FMHA_DEVICE float number(int64_t at) const { return load_elem<spec.dtype>(p.x.data, at); }
  FMHA_DEVICE static float number_of(uint32_t word, int half) {
    if constexpr (spec.dtype == DType::F32) {
      return float_of(word);
    } else {
      const uint16_t bits = uint16_t(word >> 16 * half);
      return load_elem<spec.dtype>(&bits, 0);
    }
  }

  // Loads `count` numbers of a row from `at` on, 16 bytes at a time if they are contiguous and aligned; numbers from
  // `end` on are 0.
  template <int32_t count>
  FMHA_DEVICE void load(int64_t at, int32_t end, float (&x)[count]) const {
    const uint8_t* from = static_cast<const uint8_t*>(p.x.data) + at * elem_bytes;
    if (p.x.dim == 1 && end >= count && reinterpret_cast<uint64_t>(from) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < count / elems_of_word / 4; ++i) {
        const Words<4> four = reinterpret_cast<const Words<4>*>(from)[i];
#pragma unroll
        for (int e = 0; e < 4 * elems_of_word; ++e) {
          x[4 * elems_of_word * i + e] = number_of(four.words[e / elems_of_word], e % elems_of_word);
        }
      }
      return;
    }
#pragma unroll
    for (int d = 0; d < count; ++d) x[d] = d < end ? number(at + d * p.x.dim) : 0.f;
  }

  // Stores contiguous bytes; those from `end` on do not exist.
  template <int32_t count>
  FMHA_DEVICE static void store(uint8_t* to, int32_t end, const uint32_t (&bytes)[count]) {
    constexpr int words = count / 4, of_store = words % 4 == 0 ? 4 : 2;
    if (end >= count && reinterpret_cast<uint64_t>(to) % (4 * of_store) == 0) {
#pragma unroll
      for (int i = 0; i < words; i += of_store) {
        Words<of_store> several;
#pragma unroll
        for (int w = 0; w < of_store; ++w) {
          const int first = 4 * (i + w);
          several.words[w] =
              bytes[first] | bytes[first + 1] << 8 | bytes[first + 2] << 16 | bytes[first + 3] << 24;
        }
        reinterpret_cast<Words<of_store>*>(to)[i / of_store] = several;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (i < end) to[i] = uint8_t(bytes[i]);
    }
  }

  FMHA_DEVICE uint32_t scale_of_tensor() const {
    return p.tensor_scale == nullptr ? 127u << 23 : bits_of(*p.tensor_scale);
  }

  // Computes the codes of a block's numbers, and its scale.
  FMHA_DEVICE uint32_t convert(const float (&x)[block], uint32_t of_tensor, uint32_t (&codes)[block]) const {
    uint32_t most = 0;
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < block; ++i) {
      most = max(most, magnitude_of(x[i]));
      has_nan |= (bits_of(x[i]) & kMagnitude) > kInfinity;
    }
    if constexpr (is_nvfp4) {
      // No block has a scale if the tensor's scale is not positive and finite.
      const bool is_wrong = of_tensor == 0 || of_tensor >= kInfinity;
      const uint32_t scale = has_nan || is_wrong ? 0x7f : block_scale(most, of_tensor);
      const bool has_elements = scale != 0 && scale != 0x7f;
      const Steps steps = has_elements ? Steps::make(scale, of_tensor) : Steps::of_zeros();
#pragma unroll
      for (int i = 0; i < block; ++i) codes[i] = has_elements ? steps.element(x[i]) : 0;
      return scale;
    } else {
      constexpr bool is_e4m3 = spec.format == kMxfp8E4m3;
      const uint32_t power = power_at_least(most, is_e4m3 ? 8 : 15);
#pragma unroll
      for (int i = 0; i < block; ++i) {
        codes[i] = eight_bits(format_of(is_e4m3 ? DType::E4m3Fn : DType::E5m2), x[i], power);
      }
      return power;
    }
  }

  FMHA_DEVICE uint8_t* elements_at(int64_t at) const {
    return static_cast<uint8_t*>(const_cast<void*>(static_cast<const void*>(p.elements.data))) + at;
  }
  FMHA_DEVICE void put_scale(int64_t at, uint32_t scale) const {
    static_cast<uint8_t*>(const_cast<void*>(static_cast<const void*>(p.scales.data)))[at] = uint8_t(scale);
  }

  FMHA_DEVICE int32_t units_of_row() const {
    return spec.along_dim ? ceil_div(p.dim, block) : ceil_div(p.dim, columns);
  }
  FMHA_DEVICE int32_t rows_of_sequence() const { return spec.along_dim ? p.seqlen : ceil_div(p.seqlen, block); }
  FMHA_DEVICE int64_t num_units() const {
    return int64_t(p.batch) * rows_of_sequence() * p.num_heads * units_of_row();
  }

  // Converts a block of one row.
  FMHA_DEVICE void along_row(int64_t unit) const {
    const int32_t blocks = units_of_row(), i_block = int32_t(unit % blocks), first = i_block * block;
    const Row at = row_of(unit / blocks);
    const int32_t end = min(p.dim - first, block);
    float x[block];
    uint32_t codes[block];
    load(offset(p.x, at) + first * p.x.dim, end, x);
    put_scale(offset(p.scales, at) + i_block * p.scales.dim, convert(x, scale_of_tensor(), codes));
    if constexpr (is_nvfp4) {
      uint32_t bytes[block / 2];
#pragma unroll
      for (int i = 0; i < block / 2; ++i) bytes[i] = codes[2 * i] | codes[2 * i + 1] << 4;
      store(elements_at(offset(p.elements, at) + first / 2), ceil_div(end, 2), bytes);
    } else {
      store(elements_at(offset(p.elements, at) + first), end, codes);
    }
  }

  // Converts a block down a column, or two adjacent ones.
  FMHA_DEVICE void down_columns(int64_t unit) const {
    const int32_t groups = units_of_row(), d = int32_t(unit % groups) * columns;
    const int64_t of_head = unit / groups / p.num_heads;
    const int32_t blocks = rows_of_sequence(), i_block = int32_t(of_head % blocks);
    const Row at = {int32_t(of_head / blocks), i_block * block, int32_t(unit / groups % p.num_heads)};
    const int32_t end = min(p.seqlen - at.row, block);
    uint32_t codes[columns][block];
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      const bool is_there = d + c < p.dim;
      float x[block];
#pragma unroll
      for (int i = 0; i < block; ++i) {
        x[i] = is_there && i < end ? number(offset(p.x, at) + i * p.x.row + (d + c) * p.x.dim) : 0.f;
      }
      const uint32_t scale = convert(x, scale_of_tensor(), codes[c]);
      const Row to = {at.batch, i_block, at.head};
      if (is_there) put_scale(offset(p.scales, to) + (d + c) * p.scales.dim, scale);
    }
    if constexpr (spec.pairs_of_rows) {
      const Row to = {at.batch, at.row / 2, at.head};
      uint32_t bytes[block / 2];
#pragma unroll
      for (int i = 0; i < block / 2; ++i) bytes[i] = codes[0][2 * i] | codes[0][2 * i + 1] << 4;
      store(elements_at(offset(p.elements, to) + d * p.elements.dim), ceil_div(end, 2), bytes);
    } else {
      const int64_t to = offset(p.elements, at) + d / columns * p.elements.dim;
#pragma unroll
      for (int i = 0; i < block; ++i) {
        const uint32_t byte = columns == 2 ? codes[0][i] | codes[columns - 1][i] << 4 : codes[0][i];
        if (i < end) *elements_at(to + i * p.elements.row) = uint8_t(byte);
      }
    }
  }

  FMHA_DEVICE void convert_unit(int64_t unit) const {
    if constexpr (spec.along_dim) along_row(unit);
    else down_columns(unit);
  }

  // The largest magnitude in the pieces of the tensor that a group of lanes has.
  template <class Lanes>
  FMHA_DEVICE void maximum(int64_t group) const {
    constexpr int32_t piece = 16;
    const int32_t pieces = ceil_div(p.dim, piece);
    const int64_t all = int64_t(p.batch) * p.seqlen * p.num_heads * pieces;
    uint32_t most = 0;
#pragma unroll 2
    for (int64_t at = group * Lanes::count + Lanes::index(); at < all; at += int64_t(p.num_maxima) * Lanes::count) {
      const int32_t first = int32_t(at % pieces) * piece;
      float x[piece];
      load(offset(p.x, row_of(at / pieces)) + first * p.x.dim, min(p.dim - first, piece), x);
#pragma unroll
      for (int i = 0; i < piece; ++i) most = max(most, magnitude_of(x[i]));
    }
    most = of_lanes<Lanes>(most);
    if (Lanes::index() == 0) maxima()[group] = most;
  }

  // Computes the tensor's scale from all maxima, by one group of lanes.
  template <class Lanes>
  FMHA_DEVICE void write_scale() const {
    uint32_t most = 0;
#pragma unroll 4
    for (int32_t at = Lanes::index(); at < p.num_maxima; at += Lanes::count) most = max(most, maxima()[at]);
    most = of_lanes<Lanes>(most);
    if (Lanes::index() == 0) *const_cast<float*>(p.tensor_scale) = float_of(tensor_scale(most));
  }

  FMHA_DEVICE uint32_t* maxima() const { return reinterpret_cast<uint32_t*>(const_cast<float*>(p.maxima)); }

  template <class Lanes>
  FMHA_DEVICE static uint32_t of_lanes(uint32_t most) {
#pragma unroll
    for (int32_t apart = 1; apart < Lanes::count; apart *= 2) {
      most = max(most, bits_of(Lanes::from(float_of(most), Lanes::index() ^ apart)));
    }
    return most;
  }
};

}  // namespace fmha::quantize
