// The decode kernel's work and numbers.
//
// A wave has 32 rows, which are (query, head of a KV head's group) pairs, query by query, and one part of the keys of
// their sequence. Up to head dimension 256 it shares nothing with other waves. Above 256, O of 32 rows does not fit a
// wave's registers beside Q and a tile: the four waves of a workgroup have the same rows and keys, and a quarter of the
// columns each (columns.h). O and the statistics of the softmax go to the workspace, and a second launch merges the
// parts (merge.h).
#pragma once
#include <fmha/cdna/config.h>
#include <fmha/cdna/decode/work.h>
#include <fmha/isa/sched.h>
#include <fmha/mma/cdna.h>
#include <fmha/range.h>

namespace fmha::cdna::decode {

constexpr int kTileKeys = kEdge;  // keys of a step of the loop

template <CdnaDecodeSpec spec>
struct Config {
  static constexpr int stored_bytes = size_bytes(spec.stored);
  // Number of waves that share the columns of their rows.
  static constexpr int column_waves = spec.column_waves;
  // Steps of K Q over a wave's columns of a padded row, 16 elements each, and the steps per load of a lane. A
  // load has 16 bytes, or 8 for one-byte columns that waves share, since a wave may have an odd number of steps.
  static constexpr int qk_steps = spec.head_dim_qk / column_waves / 16;
  static constexpr int steps_of_load = column_waves == 1 ? 2 / stored_bytes : 1;
  // V's columns are divided among the 32 lanes of half a wave, adjacent ones to a lane, so
  // that a load by all lanes reads two whole rows. Column n of every lane forms block n of O.
  static constexpr int columns = spec.head_dim_v / column_waves / kEdge;
  static constexpr int wave_columns = columns * kEdge;
  static constexpr int pv_steps = kTileKeys / 16;
  static constexpr int v_bytes = columns * stored_bytes;  // of a lane and key
  static constexpr int v_words = ceil_div(v_bytes, 4);
  // Steps whose columns of K are also columns of V, in latent rows, and how many are read once for both.
  static constexpr bool has_steps_of_v =
      column_waves > 1 && (spec.head_dim_qk == spec.head_dim_v + 64 || spec.head_dim_qk == spec.head_dim_v);
  static constexpr int steps_of_v = has_steps_of_v ? wave_columns / 16 : 0;
  static constexpr int latent_steps = spec.v_in_k ? steps_of_v : 0;
  static_assert(spec.head_dim_qk % (column_waves == 1 ? kEdge : 16 * column_waves) == 0, "a wave has whole steps");
  static_assert(qk_steps % steps_of_load == 0, "a wave has whole loads");
  static_assert(!spec.v_in_k || (column_waves > 1 && spec.load != LoadPath::Element && stored_bytes == 2),
                "latent rows are loaded wide, and as they are used");
  static_assert(columns == 1 || columns == 2 || columns == 4 || columns == 8, "a lane's columns are one load");
  static_assert(size_bytes(spec.dtype) == 2, "products are of 16-bit operands");
};

// The first element of a row that a lane has in step `step` of K Q. A lane's elements of two steps are
// adjacent: with one-byte elements they are one load. Any order that K and Q share would do; all cache
// types use one order, so that a quantised cache is bit-equal to a 16-bit one. Waves that share columns
// have a run each; in latent rows its columns of V, and then its part of the remaining columns.
template <CdnaDecodeSpec spec>
FMHA_DEVICE constexpr int first_elem(int step, int half, int i_wave) {
  using C = Config<spec>;
  if constexpr (C::column_waves == 1) return step / 2 * 32 + half * 16 + step % 2 * 8;
  if (C::steps_of_v == 0) return (i_wave * C::qk_steps + step) * 16 + half * 8;
  if (step < C::steps_of_v) return i_wave * C::wave_columns + step * 16 + half * 8;
  const int behind = i_wave * (C::qk_steps - C::steps_of_v) + step - C::steps_of_v;
  return spec.head_dim_v + behind * 16 + half * 8;
}

// Key of register or element `j` of step `step` of P V, within a tile: where the product K Q left its probability.
FMHA_DEVICE constexpr int key_of(int step, int j, int half) { return acc_row(8 * step + j, half); }

// Index of the wave among the waves that share the columns of its rows.
template <CdnaDecodeSpec spec>
FMHA_DEVICE int column_wave() {
  return Config<spec>::column_waves == 1 ? 0 : v_readfirstlane_b32(thread_idx() / kWaveSize);
}

using Tiles = PartTiles<kTileKeys>;

}  // namespace fmha::cdna::decode
