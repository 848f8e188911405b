// Placement of a step's vector work among its matrix instructions: decided at compile time by a greedy balance of
// issue costs, so that every matrix instruction hides about the same amount of work.
//
// A share is the work between one matrix instruction and the next. Costs are in half instructions: a wave issues one
// instruction every four cycles, whatever it is.
#pragma once
#include <fmha/cdna/tile_step.h>

namespace fmha::cdna {

// Number of a sequence's work items that are placed before each share.
template <int shares>
struct Placement {
  int before[shares + 1] = {};
};

template <int shares>
struct Balance {
  int cost[shares] = {};

  // Places `items` of cost `each` among the shares `begin` .. `end`, each in the one with the least cost so far.
  constexpr void deal(Placement<shares>& due, int items, int each, int begin, int end) {
    for (int item = 0; item < items; ++item) {
      int emptiest = begin;
      for (int s = begin; s < end; ++s) {
        if (cost[s] < cost[emptiest]) emptiest = s;
      }
      cost[emptiest] += each;
      for (int s = emptiest; s < shares; ++s) ++due.before[s + 1];
    }
  }
};

// Schedule of one step: the shares of S = K Q, then those of O += V P.
template <CdnaSpec spec, CdnaTile tile, int num_loads, int num_stores>
struct Schedule {
  using C = Config<spec, tile>;
  using Qk = Mma<spec.dtype_qk>;
  using Pv = Mma<spec.dtype_v>;
  static constexpr int qk_shares = C::qk_slots * Qk::parts, pv_shares = C::pv_slots * Pv::parts;
  static constexpr int shares = qk_shares + pv_shares;
  // Stores to LDS must come before this share: its barrier tells the other waves that the stage is complete.
  static constexpr int before_barrier = qk_shares + (C::pv_slots - C::slots_ahead) * Pv::parts;
  // S has 16 registers for each tile of keys; the maximum takes two at a time.
  using P = Probabilities<spec, tile>;
  static constexpr int num_maxima = C::n_tiles * 8;
  static constexpr int parts_of_frag = kFragBytes / C::v_bytes;

  Placement<shares> loads, stores, parts, maxima;

  constexpr Schedule() {
    Balance<shares> balance;
    // Fixed costs, counted in compiled loops: at the end of a step the rest of the maximum, the row sum and the branch
    // to the rescaling of O; between the two products the test whether the tile needs a mask.
    constexpr int begins = 4, between = 6, ends = kArch == Arch::Gfx950 ? 20 : 12;
    balance.cost[0] += begins, balance.cost[qk_shares - 1] += between, balance.cost[shares - 1] += ends;
    constexpr int k_read = 2 * C::qk_at_once + 1, v_read = 2 * C::pv_at_once * (C::direct_v ? 2 : 1) + 1;
    for (int slot = 0; slot < C::qk_slots; ++slot) {
      balance.cost[slot * Qk::parts + Qk::parts - 1] += slot + C::slots_ahead < C::qk_slots ? k_read : v_read;
    }
    for (int slot = 0; slot < C::pv_slots; ++slot) {
      balance.cost[qk_shares + slot * Pv::parts + Pv::parts - 1] += slot + C::slots_ahead < C::pv_slots ? v_read : k_read;
    }
    // Loads go into the first half: a load needs most of a step to arrive.
    constexpr int load = C::direct_k || C::direct_v ? 8 : 4, load_shares = ceil_div(qk_shares, 2);
    balance.deal(loads, num_loads, load, 0, load_shares);
    constexpr int store = C::v_bytes == 2 ? 8 : 10, first_store = qk_shares + (before_barrier - qk_shares) / 4;
    if (first_store < before_barrier) balance.deal(stores, num_stores, store, first_store, before_barrier);
    // A pair is packed while the next pair is computed, and its fragment must be complete before the slot of P V that
    // reads it.
    constexpr int word = is_fp8(spec.dtype_v) ? 4 : kArch == Arch::Gfx950 ? 2 : 6;
    for (int i = 0; i < P::parts; ++i) {
      const int pair = P::pair_of(i), packed = max(pair - 1, 0) * 2, frag = packed / parts_of_frag;
      const bool packs = pair > 0 && (packed + 2) % P::per_word == 0;
      const auto what = P::what_of(i);
      const int cost = what == P::kPack                           ? (packs ? word : 0)
                       : what == P::kExp || what == P::kExpOfSecond ? 2 * (pair < P::pairs)
                       : what == P::kProducts                       ? 2 * (2 - C::packs_f32) * (pair + 1 < P::pairs)
                                                                    : 2 * (2 - C::packs_f32) * (pair > 0);
      balance.deal(parts, 1, cost, 0, qk_shares + frag / C::pv_at_once * C::d_blocks * Pv::parts);
    }
    const int after_s = min(qk_shares + 2, shares - 1);
    balance.deal(maxima, num_maxima, 2, after_s, max(shares - 1, after_s + 1));
  }
};

}  // namespace fmha::cdna
