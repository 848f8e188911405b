// Waves that share the columns of their rows: each multiplies its columns of Q and K, and the products are added
// through LDS, so that every wave has all scores of the tile, computes P for itself and adds P V to its own columns
// of O.
//
// Latent attention, where V lies in K: a wave's columns of V are its columns of K. They come from memory once, as V's
// operands want them, and go through the wave's own part of LDS to become K's:
//
//   wave w            LDS                                  registers
//   put_latent        wave w writes keys as rows           reads them as operands of K Q
//   add_others        wave w writes its sums there         barrier; reads the sums of the three others
//                     barrier before the next put_latent
#pragma once
#include <fmha/cdna/decode/load.h>
#include <fmha/isa/sync.h>

namespace fmha::cdna::decode {

// Replacement for SharedColumns in a wave that has all columns: nothing is shared.
struct AllColumns {
  template <class V>
  FMHA_DEVICE void put_latent(const V&) {}
  FMHA_DEVICE Frag frag(int) const { return Frag{}; }
  FMHA_DEVICE void add_others(Acc&) {}
};

template <CdnaDecodeSpec spec>
class SharedColumns {
  using C = Config<spec>;
  using Keys = LdsMatrix<kTileKeys, C::wave_columns * C::stored_bytes>;
  static constexpr int words = C::columns * C::stored_bytes / 4;  // of a lane and key

 public:
  // One wave's part of LDS.
  union Part {
    Frag sums[4][kWaveSize];  // its scores, four registers of each lane side by side
    typename Choose<spec.v_in_k, Keys, Frag>::type keys;
  };
  struct Lds {
    Part of_waves[C::column_waves];
  };

  FMHA_DEVICE explicit SharedColumns(Lds& lds) : lds_(lds), i_wave_(column_wave<spec>()) {
    if constexpr (spec.v_in_k) lane_ = Keys::lane_addresses();
  }

  // A lane has adjacent columns of 16 keys, which it writes to the keys' rows in LDS.
  FMHA_DEVICE void put_latent(const VTile<spec>& v) {
    s_barrier();  // all waves have read the sums of the tile before
    if constexpr (spec.v_in_k) {
      static_assert(words == 2, "a lane's columns of a key are half a chunk");
      const int lane = opaque_thread_idx(), half = lane_half(lane), col = lane_col(lane);
      const int first = Keys::offset(half * kRun, col / 2) + col % 2 * (kFragBytes / 2);
      uint8_t* const to = lds_.of_waves[i_wave_].keys.bytes;
#pragma unroll
      for (int s = 0; s < C::pv_steps; ++s) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          *reinterpret_cast<u32x2*>(to + Keys::below(first, key_of(s, j, 0))) = u32x2{v.words[s][j][0], v.words[s][j][1]};
        }
      }
      lds_in_order();
    }
  }

  // K's operand of a step whose columns were loaded with V.
  FMHA_DEVICE Frag frag(int step) const {
    if constexpr (spec.v_in_k) return lds_.of_waves[i_wave_].keys.frag(lane_, 0, step);
    return Frag{};
  }

  // Adds the sums of the other waves: sums of two waves first,
  // then those of both pairs, so that all four get equal bits.
  FMHA_DEVICE void add_others(Acc& s) {
    static_assert(C::column_waves == 4, "two pairs of waves");
    uint32_t lane = uint32_t(opaque_thread_idx()) % kWaveSize;
    lds_in_order();  // the wave has read its keys
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      lds_.of_waves[i_wave_].sums[r][lane] = Frag{bits_of(s[4 * r]), bits_of(s[4 * r + 1]), bits_of(s[4 * r + 2]),
                                                  bits_of(s[4 * r + 3])};
    }
    s_barrier();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      // Splits the twelve reads: all at once would need 48 registers, and a tile's registers would spill.
      if (r == 2) opaque_in_vgpr(s), opaque_in_vgpr(lane);
      const Frag mate = lds_.of_waves[i_wave_ ^ 1].sums[r][lane], first = lds_.of_waves[i_wave_ ^ 2].sums[r][lane],
                 second = lds_.of_waves[i_wave_ ^ 3].sums[r][lane];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[4 * r + i] = (s[4 * r + i] + float_of(mate[i])) + (float_of(first[i]) + float_of(second[i]));
      }
    }
  }

 private:
  Lds& lds_;
  int i_wave_;
  typename Choose<spec.v_in_k, typename Keys::LaneAddresses, int>::type lane_;
};

}  // namespace fmha::cdna::decode
