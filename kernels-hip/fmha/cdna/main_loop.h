// All tiles of keys, for one wave.
//
//   prologue   K0, V0, K1 to LDS; S0
//   step n     loads of K(n+2), V(n+1) are issued
//              S(n+1) = K(n+1) Q      between its instructions   P(n) = exp2(S(n) - max)
//              O += V(n) P(n)         between its instructions   the rest of P(n); max S(n+1);
//                                                                K(n+2), V(n+1) to LDS
//   drain      P and O of the last tile
//
// The order of the instructions is written out here: after each one of the matrix unit stands its share
// of the vector unit's work, and the compiler's scheduler may not mix the shares. Left to itself it puts
// the matrix instructions in one row and the exponentials behind them.
#pragma once
#include <fmha/cdna/direct.h>
#include <fmha/cdna/load.h>
#include <fmha/cdna/nonfinite.h>
#include <fmha/cdna/schedule.h>
#include <fmha/cdna/tile_step.h>
#include <fmha/isa/sched.h>
#include <fmha/isa/sync.h>

namespace fmha::cdna {

// Tiles of keys that some query of the workgroup sees: those of sink columns, then the band's.
struct TileWalk {
  int32_t num_sink_tiles, first_band_tile, num_tiles;

  template <CdnaSpec spec, CdnaTile tile>
  static FMHA_DEVICE TileWalk of(const Job& job, Range queries) {
    const Range band = k_range(job.band, queries, job.span.seqlen_k);
    const Range sinks = spec.sink_columns ? sink_range(job.band, queries, job.span.seqlen_k) : Range{0, 0};
    TileWalk walk;
    walk.num_sink_tiles = ceil_div(sinks.end, tile.block_n);
    walk.first_band_tile = max(band.begin / tile.block_n, walk.num_sink_tiles);
    const int32_t end = band.empty() ? 0 : ceil_div(band.end, tile.block_n);
    walk.num_tiles = walk.num_sink_tiles + max(end - walk.first_band_tile, 0);
    return walk;
  }

  FMHA_DEVICE int32_t tile_at(int32_t step) const {
    return step < num_sink_tiles ? step : first_band_tile + step - num_sink_tiles;
  }
};

FMHA_DEVICE Rows rows_of(const View& x, int64_t first_row, const SeqSpan& span, int32_t head, int32_t num_rows,
                         int32_t row_bytes, int32_t elem_bytes) {
  const int64_t first = row_offset(x, span.storage_batch, first_row, head);
  return {static_cast<const uint8_t*>(x.data) + first * elem_bytes, x.row * elem_bytes, num_rows, row_bytes};
}

// Where the tiles of K, or of V, lie: a tile near the one that is loaded next. How far beyond it a thread reads
// is its own business, up to 2^30 bytes.
template <CdnaTile tile>
struct Cursor {
  Rows rows;
  int64_t key_stride_bytes;
  bool keys_are_rows;
  int32_t key_bytes;

  FMHA_DEVICE void advance(int32_t tiles) {
    rows.data += int64_t(tiles) * tile.block_n * key_stride_bytes;
    if (keys_are_rows) {
      rows.num_rows -= tiles * tile.block_n;
    } else {
      rows.row_bytes -= tiles * tile.block_n * key_bytes;
    }
  }
};

template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE Cursor<tile> k_cursor(const CdnaParams& p, const Job& job) {
  using C = Config<spec, tile>;
  const Rows rows = rows_of(p.fwd.k, job.span.k_row, job.span, job.i_head_kv, job.span.seqlen_k,
                            p.head_dim_qk * C::qk_bytes, C::qk_bytes);
  return {rows, rows.stride_bytes, true, C::qk_bytes};
}

template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE Cursor<tile> v_cursor(const CdnaParams& p, const Job& job) {
  using C = Config<spec, tile>;
  Rows rows = rows_of(p.fwd.v, job.span.k_row, job.span, job.i_head_kv, job.span.seqlen_k,
                      p.head_dim_v * C::v_bytes, C::v_bytes);
  if constexpr (spec.v_layout == VLayout::RowMajor) return {rows, rows.stride_bytes, true, C::v_bytes};
  rows.stride_bytes = p.fwd.v.dim * C::v_bytes;
  rows.num_rows = p.head_dim_v;
  rows.row_bytes = job.span.seqlen_k * C::v_bytes;
  return {rows, p.fwd.v.row * C::v_bytes, false, C::v_bytes};
}

// Every wave of a workgroup walks alike: barriers are inside.
template <CdnaSpec spec, CdnaTile tile>
class MainLoop {
  using C = Config<spec, tile>;
#if defined(__gfx950__)
  using K = typename Choose<C::direct_k, DirectLoad<typename C::KMatrix, tile.block_n, C::num_threads>, KLoad<spec, tile>>::type;
  using V = typename Choose<C::direct_v, DirectLoad<typename C::VMatrix, tile.block_n, C::num_threads>, VLoad<spec, tile>>::type;
#else
  using K = KLoad<spec, tile>;
  using V = VLoad<spec, tile>;
#endif
  // Whether threads walk along the sequence, or the matrix comes to them.
  static constexpr bool k_walks = !spec.sink_columns, v_walks = k_walks && spec.v_layout == VLayout::RowMajor;
  static constexpr int ahead = C::slots_ahead;

 public:
  FMHA_DEVICE MainLoop(Wave<spec, tile>& wave, typename C::Lds& lds, const CdnaParams& p, const Job& job,
                       Range queries, const TileWalk& walk)
      : wave_(wave), lds_(lds), p_(p), job_(job), queries_(queries), walk_(walk), k_cursor_(k_cursor<spec, tile>(p, job)),
        v_cursor_(v_cursor<spec, tile>(p, job)) {
    k_cursor_.advance(walk.tile_at(0));
    v_cursor_.advance(walk.tile_at(0));
  }

  // Whether V had NaN or infinity that was hidden: then `show_nonfinite` is due when O is written.
  FMHA_DEVICE bool run() {
    // Two steps a round, with everything in the registers and stages that the next round finds it in. An odd
    // step goes first: a way out in the middle of a round would cost a copy of O.
    const int32_t last = walk_.num_tiles - 1, odd = last % 2;
    find_steps();
    s_[0] = prologue(lds_.stage[odd], lds_.stage[1 - odd]);
    if (enters_in_the_middle || odd) s_[1] = s_[0];
    if (odd && !enters_in_the_middle) step<1>(0);
    const int32_t tiles_at_once = tiles_in_reach();
    for (int32_t n = enters_in_the_middle ? -odd : odd; n < last;) {
      const int32_t end = min(last, n + tiles_at_once), begin = max(n, 0);
      for (; n < end; n += 2) {
        if (!enters_in_the_middle || is_there(n)) step<0>(n);
        step<1>(n + 1);
      }
      bring_near(n - begin);
    }
    const PFrags<spec, tile> p_frags = probabilities<spec, tile>(s_[0], wave_, p_, job_, first_key(last));
    weighted_values<spec, tile>(wave_, p_frags, lds_.stage[0].v);
    return hidden_ != 0;
  }

 private:
  // Whether an odd step is the second half of the loop's first round, or has a text of its own. The text is a third
  // of what there is to compile; but with it the loop has 16 registers less, and no spills where eight waves share
  // them.
  static constexpr bool enters_in_the_middle = spec.modifies;

  // Not for the compiler to know: it would make a text of its own again.
  static FMHA_DEVICE bool is_there(int32_t n) {
    uint32_t sign = uint32_t(n) >> 31;
    computed_here_once(sign);
    return sign == 0;
  }

  FMHA_DEVICE int32_t first_key(int32_t n) const { return walk_.tile_at(n) * tile.block_n; }

  // The steps of which something holds. Without sink columns they are adjacent, and the loop asks no more than
  // whether a step is among them.
  struct Steps {
    int32_t begin, num;

    template <class Holds>
    static FMHA_DEVICE Steps of(int32_t num_tiles, Holds holds) {
      int32_t begin = 0, end = num_tiles;
      while (begin < end && !holds(begin)) ++begin;
      while (end > begin && !holds(end - 1)) --end;
      return {v_readfirstlane_b32(begin), v_readfirstlane_b32(end - begin)};
    }

    FMHA_DEVICE bool has(int32_t n) const { return uint32_t(n - begin) < uint32_t(num); }
  };

  FMHA_DEVICE void find_steps() {
    if constexpr (spec.sink_columns) return;
    whole_ = Steps::of(walk_.num_tiles, [&](int32_t n) __attribute__((always_inline)) {
      return sees_all<spec, tile>(job_, wave_, first_key(n));
    });
    if constexpr (spec.mask == MaskKind::Full) {
      whole_.begin = 0;  // and takes no register
      return;
    }
    uncut_ = Steps::of(walk_.num_tiles, [&](int32_t n) __attribute__((always_inline)) {
      return !is_cut<spec, tile>(job_, queries_, first_key(n));
    });
  }

  // Modifiers, and the mask where the wave's tile needs one: its neighbours' edges cost it nothing.
  FMHA_DEVICE void modify_and_mask(Scores<spec, tile>& s, int32_t n) const {
    if constexpr (spec.modifies) modify<spec, tile>(s, p_, job_, wave_, first_key(n));
    const bool whole = spec.sink_columns ? sees_all<spec, tile>(job_, wave_, first_key(n)) : whole_.has(n);
    if (!whole) mask<spec, tile>(s, job_, wave_, first_key(n));
  }

  FMHA_DEVICE void hide(typename C::VMatrix& v, int32_t n) {
    if constexpr (spec.mask == MaskKind::Full) return;
    const bool uncut = spec.sink_columns ? !is_cut<spec, tile>(job_, queries_, first_key(n)) : uncut_.has(n);
    if (!uncut && hide_nonfinite<spec, tile>(v)) hidden_ = 1;
  }

  // An even number of tiles, so few that their rows can be read from where a cursor stands.
  FMHA_DEVICE int32_t tiles_in_reach() const {
    constexpr int64_t kReach = 1 << 30;
    const int64_t most_bytes = max(max(k_cursor_.key_stride_bytes, v_cursor_.key_stride_bytes) * tile.block_n, int64_t(1));
    return v_readfirstlane_b32(int32_t(min(kReach / most_bytes, kReach))) & ~1;
  }

  FMHA_DEVICE void bring_near(int32_t tiles) {
    if constexpr (k_walks) k_cursor_.advance(tiles), k_.move(k_cursor_.rows, -tiles);
    if constexpr (v_walks) v_cursor_.advance(tiles), v_.move(v_cursor_.rows, -tiles);
  }

  FMHA_DEVICE void advance_k(int32_t to) {
    if constexpr (k_walks) k_.move(k_cursor_.rows, 1);
    else k_cursor_.advance(walk_.tile_at(to) - walk_.tile_at(to - 1));
  }
  FMHA_DEVICE void advance_v(int32_t to) {
    if constexpr (v_walks) v_.move(v_cursor_.rows, 1);
    else v_cursor_.advance(spec.sink_columns ? walk_.tile_at(to) - walk_.tile_at(to - 1) : 1);
  }

  template <class Load, class Matrix>
  FMHA_DEVICE void issue_all(Load& load, const Rows& rows, Matrix& to) const {
    for_each<0, Load::issue_parts>(
        [&](auto part) __attribute__((always_inline)) { load.template issue<part.value>(rows, to, wave_bytes_); });
  }

  // Of registers' loads the compiler knows.
  static FMHA_DEVICE void loads_have_landed() {
    if constexpr (C::direct_k || C::direct_v) s_waitcnt_vmcnt<0>();
  }

  FMHA_DEVICE Scores<spec, tile> prologue(typename C::Stage& first, typename C::Stage& second) {
    wave_bytes_ = v_readfirstlane_b32(thread_idx_here() / kWaveSize * kWaveSize * kFragBytes);
    computed_here_once(wave_bytes_);
    p_frags_ = {};
    wave_.lowest = -infinity();
    computed_here(wave_.lowest);
    wave_.k_lane = C::KMatrix::lane_addresses();
    wave_.v_lane = C::VMatrix::lane_addresses();
    k_.find_places(k_cursor_.rows);
    v_.find_places(v_cursor_.rows);
    K k0 = k_;
    issue_all(k0, k_cursor_.rows, first.k);
    issue_all(v_, v_cursor_.rows, first.v);
    advance_k(1);
    advance_v(1);
    issue_all(k_, k_cursor_.rows, second.k);  // beyond the last tile nobody reads it
    advance_k(2);
#pragma unroll
    for (int i = 0; i < K::store_parts; ++i) k0.store(first.k, i);
#pragma unroll
    for (int i = 0; i < V::store_parts; ++i) v_.store(first.v, i);
#pragma unroll
    for (int i = 0; i < K::store_parts; ++i) k_.store(second.k, i);
    loads_have_landed();
    s_barrier();
    hide(first.v, 0);
    Scores<spec, tile> s = scores<spec, tile>(wave_, first.k);
    modify_and_mask(s, 0);
    raise_row_max<spec, tile>(wave_, job_, max_of<spec, tile>(wave_, s));
#pragma unroll
    for (int i = 0; i < ahead; ++i) k_ahead_[i] = k_operand<spec, tile>(wave_, second.k, i);
    s_barrier();  // the first step overwrites K0, which all have read now
    return s;
  }

  template <int parity>
  FMHA_DEVICE void step(int32_t n) {
    auto& now = lds_.stage[parity];
    auto& next = lds_.stage[1 - parity];
    Scores<spec, tile>&s = s_[parity], &s_next = s_[1 - parity];
    Array<typename Mma<spec.dtype_v>::Operand, ahead> v_ahead;
    k_.keep_places();
    v_.keep_places();

    Probabilities<spec, tile> made(p_frags_, s, wave_, job_);
    auto make = [&](auto part) __attribute__((always_inline)) {
      made.make(s, part.value, wave_, p_, job_, first_key(n));
    };
    scores_beside(make, s_next, now, next, v_ahead);
    advance_k(n + 3);
    advance_v(n + 2);
    modify_and_mask(s_next, n + 1);
    const float next_max = values_beside(make, p_frags_, s_next, now, next, v_ahead);
    made.leave_sums(wave_);
    raise_row_max<spec, tile>(wave_, job_, next_max);
    hide(next.v, n + 1);
  }

  using Deal = Schedule<spec, tile, K::issue_parts + V::issue_parts, K::store_parts + V::store_parts>;
  static constexpr Deal kDeal{};

  // One wait for the operands of two slots, where they are read so far ahead that it costs nothing. Writes to
  // LDS since then make it longer than it had to be; the compiler sees to it that it is no shorter.
  template <int slot>
  static FMHA_DEVICE void wait_for_pair() {
    constexpr auto reads = [](int at) {
      const bool of_k = at % (C::qk_slots + C::pv_slots) < C::qk_slots;
      return of_k ? C::qk_at_once : C::pv_at_once * (C::direct_v ? 2 : 1);
    };
    if constexpr (ahead == 4 && slot % 2 == 0) {
      s_waitcnt_lgkmcnt<reads(slot + 2) + reads(slot + 3)>();
      sched_barrier();
    }
  }

  // S(n+1) = K(n+1) Q. Between: the loads, and most of P(n).
  template <class Make>
  FMHA_DEVICE void scores_beside(Make make, Scores<spec, tile>& s_next, typename C::Stage& now,
                                 typename C::Stage& next,
                                 Array<typename Mma<spec.dtype_v>::Operand, ahead>& v_ahead) {
    constexpr int slots = C::qk_slots, parts = Mma<spec.dtype_qk>::parts;
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) s_next[n] = Acc{};
    for_each<0, slots>([&](auto slot) __attribute__((always_inline)) {
      constexpr int i = slot.value, n = i / C::slots_per_tile;
      auto between = [&](auto part) __attribute__((always_inline)) {
        sched_barrier();
        constexpr int share = i * parts + part.value;
        if constexpr (part.value == parts - 1) {
          constexpr int at = i + ahead;
          if constexpr (at < slots) k_ahead_[at % ahead] = k_operand<spec, tile>(wave_, next.k, at);
          else v_ahead[at - slots] = v_operand<spec, tile>(wave_, now.v, at - slots);
        }
        for_each<kDeal.loads.before[share], kDeal.loads.before[share + 1]>([&](auto x) __attribute__((always_inline)) {
          if constexpr (x.value < K::issue_parts) k_.template issue<x.value>(k_cursor_.rows, now.k, wave_bytes_);
          else v_.template issue<x.value - K::issue_parts>(v_cursor_.rows, next.v, wave_bytes_);
        });
        for_each<kDeal.parts.before[share], kDeal.parts.before[share + 1]>(make);
        sched_barrier();
      };
      wait_for_pair<i>();
      s_next[n] = mma_slot<spec.dtype_qk, i % C::slots_per_tile * C::qk_at_once>(k_ahead_[i % ahead], wave_.q,
                                                                                s_next[n], between);
    });
  }

  // O += V(n) P(n). Between: the rest of P(n), max S(n+1), and the stores to LDS. Once this wave has read
  // the last of V(n), a barrier: what lies in LDS then is read ahead for the next step.
  template <class Make>
  FMHA_DEVICE float values_beside(Make make, const PFrags<spec, tile>& p_frags, const Scores<spec, tile>& s_next,
                                  typename C::Stage& now, typename C::Stage& next,
                                  Array<typename Mma<spec.dtype_v>::Operand, ahead>& v_ahead) {
    constexpr int slots = C::pv_slots, parts = Mma<spec.dtype_v>::parts;
    RunningMax<spec, tile> max(wave_.lowest);
    float both_halves = 0.f;
    auto store = [&](auto x) __attribute__((always_inline)) {
      if constexpr (x.value < K::store_parts) k_.store(now.k, x.value);
      else v_.store(next.v, x.value - K::store_parts);
    };
    if constexpr (Deal::before_barrier == Deal::qk_shares) {
      for_each<0, K::store_parts + V::store_parts>(store);
      loads_have_landed();
      s_barrier();
    }
    for_each<0, slots>([&](auto slot) __attribute__((always_inline)) {
      constexpr int i = slot.value;
      auto between = [&](auto part) __attribute__((always_inline)) {
        sched_barrier();
        constexpr int share = Deal::qk_shares + i * parts + part.value;
        if constexpr (part.value == parts - 1) {
          constexpr int at = i + ahead;
          if constexpr (at < slots) v_ahead[at % ahead] = v_operand<spec, tile>(wave_, now.v, at);
          else k_ahead_[at - slots] = k_operand<spec, tile>(wave_, now.k, at - slots);
        }
        for_each<kDeal.parts.before[share], kDeal.parts.before[share + 1]>(make);
        for_each<kDeal.stores.before[share], kDeal.stores.before[share + 1]>(store);
        for_each<kDeal.maxima.before[share], kDeal.maxima.before[share + 1]>(
            [&](auto x) __attribute__((always_inline)) { max.take(s_next, x.value); });
        if constexpr (kDeal.maxima.before[share] < kDeal.maxima.before[share + 1]) max.keep();
        if constexpr (share + 1 == Deal::shares) both_halves = max.of_both_halves();
        if constexpr (share + 1 == Deal::before_barrier) loads_have_landed(), s_barrier();
        sched_barrier();
      };
      wait_for_pair<C::qk_slots + i>();
      Acc& o = wave_.o[i % C::d_blocks];
      o = mma_slot<spec.dtype_v, i / C::d_blocks * C::pv_at_once>(v_ahead[i % ahead], p_frags, o, between);
    });
    return both_halves;
  }

  Wave<spec, tile>& wave_;
  typename C::Lds& lds_;
  const CdnaParams& p_;
  const Job& job_;
  Range queries_;
  const TileWalk& walk_;
  int32_t hidden_ = 0;
  Steps whole_, uncut_;  // that need no mask; in which no query of the workgroup lacks a key
  uint32_t wave_bytes_;  // in a row of fragments of all threads: of the waves before this one
  Cursor<tile> k_cursor_, v_cursor_;
  K k_;
  V v_;
  Scores<spec, tile> s_[2];
  PFrags<spec, tile> p_frags_;  // of the step before, until this one's are there
  Array<typename Mma<spec.dtype_qk>::Operand, ahead> k_ahead_;
};

}  // namespace fmha::cdna
