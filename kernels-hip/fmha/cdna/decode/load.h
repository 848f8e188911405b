// Loads Q, K and V from memory directly into the operands of matrix instructions, without LDS.
//
// K: lane l has key l % 32, 16 bytes of its row at a time. V: half a wave has one key's row, a run of adjacent
// columns in each lane; eight keys of a column make an operand, put together by byte permutes. Column n of lane m's
// run is then column m of the n-th block of O: the blocks interleave, and a lane ends with adjacent columns of O.
#pragma once
#include <fmha/amd/load_words.h>
#include <fmha/cache_rows.h>
#include <fmha/cdna/decode/config.h>
#include <fmha/isa/num.h>
#include <fmha/isa/widen.h>
#include <fmha/num.h>

namespace fmha::cdna::decode {

// Loads elements of a row from `first` on, `words` words of them. Elements beyond the row's end become 0. `ends_early`:
// the row is shorter than its padded length.
template <LoadPath load, int bytes, bool ends_early, int words = 4>
FMHA_DEVICE Vec<uint32_t, words> load_chunk(const uint8_t* row, int32_t first, int32_t dim) {
  if constexpr (load == LoadPath::Element) {
    Vec<uint32_t, words> chunk = {};
    opaque_in_vgpr(first);  // else the place of each element of a row is kept in a register of its own
#pragma unroll
    for (int i = 0; i < 4 * words / bytes; ++i) {
      const uint32_t code = load_code<bytes>(row + min(first + i, dim - 1) * bytes);
      chunk[i * bytes / 4] |= (first + i < dim ? code : 0) << (i * bytes % 4 * 8);
    }
    opaque_in_vgpr(chunk);  // and which of them are there in scalar registers, until the product
    sched_barrier();
    return chunk;
  } else {
    const Vec<uint32_t, words> chunk = load_global<OnDwords<words>>(row + (!ends_early || first < dim ? first : 0) * bytes);
    if constexpr (!ends_early) return chunk;
    // Rows are whole chunks; for a chunk beyond the row, the row's first chunk was read instead and is masked
    // to 0. The mask is opaque: compiler-made selects for a row's chunks would fill the scalar registers.
    uint32_t is_there = first < dim ? 0xffffffff : 0;
    opaque_in_vgpr(is_there);
    return chunk & is_there;
  }
}

// Converts byte `at` of a word to f32, by an instruction if the architecture supports the type, otherwise by its bits.
template <DType dtype, int at>
FMHA_DEVICE float widened(uint32_t word) {
  static_assert(is_fp8(dtype), "wider types have no bytes to widen");
#if defined(__gfx942__)
  if constexpr (dtype == DType::E4m3Fnuz) return v_cvt_f32_fp8<at>(word);
  if constexpr (dtype == DType::E5m2Fnuz) return v_cvt_f32_bf8<at>(word);
#elif defined(__gfx950__)
  if constexpr (dtype == DType::E4m3Fn) return v_cvt_f32_fp8<at>(word);
  if constexpr (dtype == DType::E5m2) return v_cvt_f32_bf8<at>(word);
#endif
  return fmha::decode(format_of(dtype), word >> (8 * at) & 0xff);
}

// Two FP8 codes, bytes `at` of two words, each times its factor, in a 16-bit type, each rounded once.
template <CdnaDecodeSpec spec, int at>
FMHA_DEVICE uint32_t widened_pair(uint32_t first, uint32_t second, float of_first, float of_second) {
  const float a = widened<spec.stored, at>(first) * of_first, b = widened<spec.stored, at>(second) * of_second;
  if constexpr (spec.dtype == DType::F16) return __builtin_bit_cast(uint32_t, Vec<f16, 2>{f16(a), f16(b)});
  return __builtin_bit_cast(uint32_t, Vec<bf16, 2>{bf16(a), bf16(b)});
}

// Eight adjacent FP8 codes, in two words, converted to 16 bits.
template <CdnaDecodeSpec spec>
FMHA_DEVICE Frag widened_chunk(uint32_t low, uint32_t high, float descale) {
  Frag frag;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t word = w < 2 ? low : high;
    frag[w] = w % 2 ? widened_pair<spec, 2>(word, word >> 8, descale, descale)
                    : widened_pair<spec, 0>(word, word >> 8, descale, descale);
  }
  return frag;
}

// A tile of K in registers, in the type in which memory has it.
template <CdnaDecodeSpec spec>
struct KTile {
  using C = Config<spec>;
  static constexpr int loads = C::qk_steps / C::steps_of_load;
  static constexpr int words = C::steps_of_load * 2 * C::stored_bytes;  // of a load
  Vec<uint32_t, words> chunks[loads];
  float factor;  // of the lane's key, where rows have scales of their own

  // Loads the columns from step `latent_steps` on; earlier columns are loaded with V.
  template <class Places>
  FMHA_DEVICE void issue(const CdnaDecodeParams& params, const Job& job, KvRow at) {
    const FwdParams& p = params.call.fwd;
    const uint8_t* row;
    if constexpr (spec.row_bytes > 0) {
        // The columns after V's are bf16 elements.
        using Format = RowFormat<spec.row_bytes>;
        row = Places::template bytes_of<spec.row_bytes>(p, at).row + Format::rotary - 2 * Format::values;
    } else {
        row = static_cast<const uint8_t*>(p.k.data) + Places::template offset<false, C::stored_bytes>(p, at, job.i_head_kv);
    }
    if constexpr (spec.scaled) factor = Places::template factor<false>(at, job.i_head_kv);
    const int half = lane_half(), i_wave = column_wave<spec>();
#pragma unroll
    for (int c = C::latent_steps; c < loads; ++c) {
      chunks[c] = load_chunk<spec.load, C::stored_bytes, spec.ends_early, words>(
          row, first_elem<spec>(c * C::steps_of_load, half, i_wave), params.call.head_dim_qk);
    }
  }

  FMHA_DEVICE Frag frag(int step, float descale) const {
    if constexpr (C::stored_bytes == 2) {
      return chunks[step];
    } else if constexpr (words == 2) {
      return widened_chunk<spec>(chunks[step][0], chunks[step][1], descale);
    } else {
      const Frag& chunk = chunks[step / 2];
      return step % 2 ? widened_chunk<spec>(chunk[2], chunk[3], descale)
                      : widened_chunk<spec>(chunk[0], chunk[1], descale);
    }
  }
};

// A tile of V in registers, in the type in which memory has it: a lane's columns of 16 of its keys.
template <CdnaDecodeSpec spec>
struct VTile {
  using C = Config<spec>;
  uint32_t words[C::pv_steps][8][C::v_words];
  // Scale of the key that the lane's number is: bits of its row's own, or of rows of bytes those of the wave's columns.
  int scale = 0;
  // Factors of the eight keys of an operand.
  using Factors = Array<float, 8>;

  // Loads a tile. `at` is the place of the key whose number in the tile is the lane's, in both halves of the wave.
  template <class Places>
  FMHA_DEVICE void issue(const CdnaDecodeParams& params, const Job& job, KvRow at) {
    const View& v = params.call.fwd.v;
    int64_t offset;
    if constexpr (spec.row_bytes > 0) {
      static_assert(spec.v_in_k && spec.listed && C::columns == 4, "rows of bytes are latent, and a list's");
      const BytesOfRow own = Places::template bytes_of<spec.row_bytes>(params.call.fwd, at);
      const int i_wave = column_wave<spec>();
      // A wave's columns have one scale in f32, or two in E8M0.
      if constexpr (Format::in_page_tail) scale = int(load_code<2>(own.scales + 2 * i_wave));
      else scale = int(load_global<uint32_t>(own.scales + 4 * i_wave));
      offset = own.row - static_cast<const uint8_t*>(v.data);
    } else {
      offset = Places::template offset<true, C::stored_bytes>(params.call.fwd, at, job.i_head_kv);
      if constexpr (spec.scaled) scale = int(bits_of(Places::template factor<true>(at, job.i_head_kv)));
    }
    const float low = float_of(uint32_t(offset)), high = float_of(uint32_t(offset >> 32));  // bits
    const int half = lane_half(), first = column_wave<spec>() * C::wave_columns + lane_col() * C::columns;
#pragma unroll
    for (int s = 0; s < C::pv_steps; ++s) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int from = key_of(s, j, 0) + half * kRun;
        const uint64_t there = uint64_t(bits_of(ds_bpermute_b32(from, high))) << 32 | bits_of(ds_bpermute_b32(from, low));
        const uint8_t* row = static_cast<const uint8_t*>(v.data) + int64_t(there);
        if constexpr (spec.row_bytes > 0) load_bytes(words[s][j], row, first);
        else load(words[s][j], row, first, params.call.head_dim_v, v.dim);
      }
      // The barrier keeps the addresses of both halves from being live together: rows of 512 leave no registers for
      // that.
      if constexpr (C::column_waves > 1) sched_barrier();
    }
  }

  // Converts a tile of rows of bytes to bf16, in place: a lane has four
  // values of a key in its first word, or four bf16 elements in both words.
  FMHA_DEVICE void widen() {
    if constexpr (spec.row_bytes > 0) {
      const int half = lane_half(), column = column_wave<spec>() * C::wave_columns + lane_col() * C::columns;
      const bool is_wide = column >= Format::values;
      const int shift = column / Format::group % 2 * 8;
#pragma unroll
      for (int s = 0; s < C::pv_steps; ++s) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t code = uint32_t(ds_bpermute_b32(key_of(s, j, 0) + half * kRun, scale));
          float of_row;
          if constexpr (Format::in_page_tail) of_row = e8m0(code >> shift & 0xff);
          else of_row = float_of(code);
          const uint32_t word = words[s][j][0];
          words[s][j][0] = is_wide ? word : scaled_pair<0>(word, of_row);
          words[s][j][1] = is_wide ? words[s][j][1] : scaled_pair<2>(word, of_row);
        }
        // The barrier keeps the two steps' codes from being live at once.
        sched_barrier();
      }
    }
  }

  // Sets keys of a tile to 0 whose bit in `shown` is 0.
  FMHA_DEVICE void keep(uint32_t shown) {
    const uint32_t of_half = shown >> (lane_half() * kRun);
#pragma unroll
    for (int s = 0; s < C::pv_steps; ++s) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t mask = 0u - (of_half >> key_of(s, j, 0) & 1);
#pragma unroll
        for (int w = 0; w < C::v_words; ++w) words[s][j][w] &= mask;
      }
    }
  }

  // Factors of the keys of step `s`: `descale`, or their rows' own scales.
  FMHA_DEVICE Factors factors(int s, float descale) const {
    Factors factors;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if constexpr (spec.scaled) {
        factors[j] = float_of(uint32_t(ds_bpermute_b32(key_of(s, j, 0) + lane_half() * kRun, scale)));
      } else {
        factors[j] = descale;
      }
    }
    return factors;
  }

  // Eight keys of the lane's column `n`, an operand of step `s`.
  template <int n>
  FMHA_DEVICE Frag frag(int s, const Factors& factors) const {
    Frag frag;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t a = words[s][2 * w][n * C::stored_bytes / 4], b = words[s][2 * w + 1][n * C::stored_bytes / 4];
      if constexpr (C::stored_bytes == 1) {
        frag[w] = widened_pair<spec, n % 4>(a, b, factors[2 * w], factors[2 * w + 1]);
      } else {
        constexpr uint32_t kLowHalves = 0x05040100, kHighHalves = 0x07060302;
        frag[w] = v_perm_b32(b, a, n % 2 ? kHighHalves : kLowHalves);
      }
    }
    return frag;
  }

 private:
  using Format = RowFormat<(spec.row_bytes > 0 ? spec.row_bytes : 656)>;

  // Values `at` and `at + 1` of a word, multiplied by their scale.
  template <int at>
  static FMHA_DEVICE uint32_t scaled_pair(uint32_t word, float scale) {
    const float a = widened<DType::E4m3Fn, at>(word) * scale, b = widened<DType::E4m3Fn, at + 1>(word) * scale;
    return __builtin_bit_cast(uint32_t, Vec<bf16, 2>{bf16(a), bf16(b)});
  }

  // Loads four columns of a row of bytes. If a row's last columns
  // are V's too, the bytes after the values are not read further.
  static FMHA_DEVICE void load_bytes(uint32_t (&to)[C::v_words], const uint8_t* row, int32_t column) {
    if constexpr (Format::in_page_tail) {
      const int32_t wide = Format::rotary + 2 * (column - Format::values);
      const auto words = load_global<OnDwords<2>>(row + (column < Format::values ? column : wide));
      to[0] = words[0];
      to[1] = words[1];
    } else {
      to[0] = load_global<uint32_t>(row + column);
      to[1] = 0;
    }
  }

  // Loads a lane's columns. Columns beyond the row's end repeat other columns; their sums are not stored.
  static FMHA_DEVICE void load(uint32_t (&to)[C::v_words], const uint8_t* row, int32_t first, int32_t dim, int64_t step) {
    constexpr int bytes = C::stored_bytes;
    if constexpr (spec.load == LoadPath::Element) {
#pragma unroll
      for (int w = 0; w < C::v_words; ++w) to[w] = 0;
      opaque_in_vgpr(first);
#pragma unroll
      for (int n = 0; n < C::columns; ++n) {
        to[n * bytes / 4] |= load_code<bytes>(row + min(first + n, dim - 1) * step * bytes) << (n * bytes % 4 * 8);
      }
      sched_barrier();
    } else {
      const uint8_t* from = row + min(first, dim - C::columns) * bytes;
      if constexpr (C::v_bytes == 1) to[0] = load_global<uint8_t>(from);
      if constexpr (C::v_bytes == 2) to[0] = load_code<2>(from);
      if constexpr (C::v_bytes == 4) to[0] = load_global<uint32_t>(from);
      if constexpr (C::v_bytes > 4) {
        const auto words = load_global<OnDwords<C::v_words>>(from);
#pragma unroll
        for (int w = 0; w < C::v_words; ++w) to[w] = words[w];
      }
    }
  }
};

}  // namespace fmha::cdna::decode
