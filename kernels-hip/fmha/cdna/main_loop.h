// The software-pipelined main loop over the tiles of keys, for one wave.
//
//   prologue   K0, V0, K1 to LDS; S0
//   step n     loads of K(n+2), V(n+1) are issued
//              S(n+1) = K(n+1) Q      between its instructions   P(n) = exp2(S(n) - max)
//              O += V(n) P(n)         between its instructions   the rest of P(n); max S(n+1);
//                                                                K(n+2), V(n+1) to LDS
//   drain      P and O of the last tile
//
// The order of instructions is fixed here: after each matrix instruction comes a share of the vector work that it
// hides, fenced by sched_barrier. Left to itself, the compiler's scheduler emits all matrix instructions first and the
// exponentials after them, and nothing overlaps.
#pragma once
#include <fmha/cdna/direct.h>
#include <fmha/cdna/load.h>
#include <fmha/cdna/nonfinite.h>
#include <fmha/cdna/schedule.h>
#include <fmha/cdna/tile_step.h>
#include <fmha/isa/sched.h>
#include <fmha/isa/sync.h>

namespace fmha::cdna {

// The tiles of keys that some query of the workgroup sees: those of sink columns come first, then those of the band.
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

// Base address of a tile of K, or of V, near the one that is loaded next. Threads add 32-bit offsets to it, up to 2^30
// bytes, so it is moved along (`rebase_cursors`) before they run out.
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

// The walk over tiles of keys. Under masks as data it follows a list that an earlier launch has made.
template <CdnaSpec spec>
using WalkOf = typename Choose<spec.masks, ListWalk, TileWalk>::type;

// All waves of a workgroup run the same steps: there are barriers inside.
template <CdnaSpec spec, CdnaTile tile>
class MainLoop {
  using C = Config<spec, tile>;
  using Walk = WalkOf<spec>;
#if defined(__gfx950__)
  using K = typename Choose<C::direct_k, DirectLoad<typename C::KMatrix, tile.block_n, C::num_threads>, KLoad<spec, tile>>::type;
  using V = typename Choose<C::direct_v, DirectLoad<typename C::VMatrix, tile.block_n, C::num_threads>, VLoad<spec, tile>>::type;
#else
  using K = KLoad<spec, tile>;
  using V = VLoad<spec, tile>;
#endif
  // Whether each thread's own offset advances from tile to tile (cheaper), or the base address does.
  static constexpr bool k_advances_in_place = !spec.sink_columns;
  static constexpr bool v_advances_in_place = k_advances_in_place && spec.v_layout == VLayout::RowMajor;
  static constexpr int ahead = C::slots_ahead;

 public:
  FMHA_DEVICE MainLoop(Wave<spec, tile>& wave, typename C::Lds& lds, const CdnaParams& p, const Job& job,
                       Range queries, const Walk& walk)
      : wave_(wave), lds_(lds), p_(p), job_(job), queries_(queries), walk_(walk), k_cursor_(k_cursor<spec, tile>(p, job)),
        v_cursor_(v_cursor<spec, tile>(p, job)) {
    k_cursor_.advance(walk.tile_at(0));
    v_cursor_.advance(walk.tile_at(0));
  }

  // Processes all tiles. Returns true if a NaN or an infinity was zeroed in V: the caller then runs
  // `add_back_nonfinite` once O is written.
  FMHA_DEVICE bool run() {
    // Unrolled by two, so that registers and LDS stages have the same roles at the start of each round. An odd step is
    // peeled off in front: an exit in the middle of a round would need a copy of O.
    const int32_t last = walk_.num_tiles - 1, odd = last % 2;
    find_steps();
    s_[0] = prologue(lds_.stage[odd], lds_.stage[1 - odd]);
    if (starts_mid_round || odd) s_[1] = s_[0];
    if (odd && !starts_mid_round) step<1>(0);
    const int32_t tiles_at_once = tiles_per_rebase();
    for (int32_t n = starts_mid_round ? -odd : odd; n < last;) {
      const int32_t end = min(last, n + tiles_at_once), begin = max(n, 0);
      for (; n < end; n += 2) {
        if (!starts_mid_round || is_real_step(n)) step<0>(n);
        step<1>(n + 1);
      }
      rebase_cursors(n - begin);
    }
    const PFrags<spec, tile> p_frags = probabilities<spec, tile>(s_[0], wave_, p_, job_, first_key(last));
    weighted_values<spec, tile>(wave_, p_frags, lds_.stage[0].v);
    return had_nonfinite_ != 0;
  }

 private:
  // The odd step either enters the unrolled loop at its second half, or is a copy of the step in front of it. The copy
  // is a third of all code, but saves the loop 16 registers, without which eight waves a CU would spill.
  static constexpr bool starts_mid_round = spec.modifies;

  // Whether n >= 0, in a form that the compiler does not see through: otherwise it would peel the first iteration into
  // a copy.
  static FMHA_DEVICE bool is_real_step(int32_t n) {
    uint32_t sign = uint32_t(n) >> 31;
    opaque_in_sgpr(sign);
    return sign == 0;
  }

  FMHA_DEVICE int32_t first_key(int32_t n) const { return walk_.tile_at(n) * tile.block_n; }

  // The steps for which a property of the mask holds. Without sink columns they are contiguous: the loop only tests a
  // range.
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
    unmasked_ = Steps::of(walk_.num_tiles, [&](int32_t n) __attribute__((always_inline)) {
      return needs_no_mask<spec, tile>(job_, wave_, first_key(n));
    });
    if constexpr (spec.mask == MaskKind::Full) {
      unmasked_.begin = 0;  // a constant, so it takes no register
      return;
    }
    visible_to_all_ = Steps::of(walk_.num_tiles, [&](int32_t n) __attribute__((always_inline)) {
      return !is_partly_masked<spec, tile>(job_, queries_, walk_, n);
    });
  }

  // Applies modifiers, and the mask if this wave's part of the tile needs it; other waves' edges cost nothing.
  FMHA_DEVICE void modify_and_mask(Scores<spec, tile>& s, int32_t n) const {
    if constexpr (spec.modifies) modify<spec, tile>(s, p_, job_, wave_, first_key(n));
    if constexpr (spec.masks) {
      if (walk_.is_cut(n)) mask_by_data<spec, tile>(s, job_, wave_, first_key(n));
      return;
    }
    const bool whole = spec.sink_columns ? needs_no_mask<spec, tile>(job_, wave_, first_key(n)) : unmasked_.has(n);
    if (!whole) mask<spec, tile>(s, job_, wave_, first_key(n));
  }

  FMHA_DEVICE void hide(typename C::VMatrix& v, int32_t n) {
    if constexpr (spec.mask == MaskKind::Full) return;
    const bool visible_to_all =
        spec.sink_columns ? !is_partly_masked<spec, tile>(job_, queries_, walk_, n) : visible_to_all_.has(n);
    if (!visible_to_all && zero_nonfinite<spec, tile>(v)) had_nonfinite_ = 1;
  }

  // Number of tiles (even) that 32-bit offsets from one base address can reach.
  FMHA_DEVICE int32_t tiles_per_rebase() const {
    constexpr int64_t kReach = 1 << 30;
    const int64_t most_bytes = max(max(k_cursor_.key_stride_bytes, v_cursor_.key_stride_bytes) * tile.block_n, int64_t(1));
    return v_readfirstlane_b32(int32_t(min(kReach / most_bytes, kReach))) & ~1;
  }

  FMHA_DEVICE void rebase_cursors(int32_t tiles) {
    if constexpr (k_advances_in_place) k_cursor_.advance(tiles), k_.move(k_cursor_.rows, -tiles);
    if constexpr (v_advances_in_place) v_cursor_.advance(tiles), v_.move(v_cursor_.rows, -tiles);
  }

  FMHA_DEVICE void advance_k(int32_t to) {
    if constexpr (k_advances_in_place) k_.move(k_cursor_.rows, 1);
    else k_cursor_.advance(walk_.tile_at(to) - walk_.tile_at(to - 1));
  }
  FMHA_DEVICE void advance_v(int32_t to) {
    if constexpr (v_advances_in_place) v_.move(v_cursor_.rows, 1);
    else v_cursor_.advance(spec.sink_columns ? walk_.tile_at(to) - walk_.tile_at(to - 1) : 1);
  }

  template <class Load, class Matrix>
  FMHA_DEVICE void issue_all(Load& load, const Rows& rows, Matrix& to) const {
    for_each<0, Load::issue_parts>(
        [&](auto part) __attribute__((always_inline)) { load.template issue<part.value>(rows, to, wave_bytes_); });
  }

  // The compiler inserts waits for loads into registers, but knows nothing of loads into LDS.
  static FMHA_DEVICE void wait_for_direct_loads() {
    if constexpr (C::direct_k || C::direct_v) s_waitcnt_vmcnt<0>();
  }

  FMHA_DEVICE Scores<spec, tile> prologue(typename C::Stage& first, typename C::Stage& second) {
    wave_bytes_ = v_readfirstlane_b32(opaque_thread_idx() / kWaveSize * kWaveSize * kFragBytes);
    opaque_in_sgpr(wave_bytes_);
    p_frags_ = {};
    wave_.opaque_neg_inf = -infinity();
    opaque_in_vgpr(wave_.opaque_neg_inf);
    wave_.k_lane = C::KMatrix::lane_addresses();
    wave_.v_lane = C::VMatrix::lane_addresses();
    k_.find_addresses(k_cursor_.rows);
    v_.find_addresses(v_cursor_.rows);
    K k0 = k_;
    issue_all(k0, k_cursor_.rows, first.k);
    issue_all(v_, v_cursor_.rows, first.v);
    advance_k(1);
    advance_v(1);
    issue_all(k_, k_cursor_.rows, second.k);  // may lie beyond the last tile: then it is loaded as 0 and not read
    advance_k(2);
#pragma unroll
    for (int i = 0; i < K::store_parts; ++i) k0.store(first.k, i);
#pragma unroll
    for (int i = 0; i < V::store_parts; ++i) v_.store(first.v, i);
#pragma unroll
    for (int i = 0; i < K::store_parts; ++i) k_.store(second.k, i);
    wait_for_direct_loads();
    s_barrier();
    hide(first.v, 0);
    Scores<spec, tile> s = scores<spec, tile>(wave_, first.k);
    modify_and_mask(s, 0);
    raise_row_max<spec, tile>(wave_, job_, max_of<spec, tile>(wave_, s));
    subtract_first<spec, tile>(s, wave_, job_);
#pragma unroll
    for (int i = 0; i < ahead; ++i) k_ahead_[i] = k_operand<spec, tile>(wave_, second.k, i);
    s_barrier();  // all waves have read K0, which the first step overwrites
    return s;
  }

  template <int parity>
  FMHA_DEVICE void step(int32_t n) {
    auto& now = lds_.stage[parity];
    auto& next = lds_.stage[1 - parity];
    Scores<spec, tile>&s = s_[parity], &s_next = s_[1 - parity];
    Array<typename Mma<spec.dtype_v>::Operand, ahead> v_ahead;
    k_.rematerialise_addresses();
    v_.rematerialise_addresses();

    Probabilities<spec, tile> made(p_frags_, s, wave_, job_);
    auto make = [&](auto part) __attribute__((always_inline)) {
      made.make(s, part.value, wave_, p_, job_, first_key(n));
    };
    interleaved_scores(make, s_next, now, next, v_ahead);
    advance_k(n + 3);
    advance_v(n + 2);
    modify_and_mask(s_next, n + 1);
    const float next_max = interleaved_values(make, p_frags_, s_next, now, next, v_ahead);
    made.write_sums(wave_);
    raise_row_max<spec, tile>(wave_, job_, next_max);
    subtract_first<spec, tile>(s_next, wave_, job_);
    hide(next.v, n + 1);
  }

  using Interleave = Schedule<spec, tile, K::issue_parts + V::issue_parts, K::store_parts + V::store_parts>;
  static constexpr Interleave kInterleave{};

  // One s_waitcnt for the operands of two slots, if they were read four slots ahead. The count ignores LDS
  // writes since then, so it may wait longer than needed, never shorter: the compiler's own waits come on top.
  template <int slot>
  static FMHA_DEVICE void wait_for_two_slots() {
    constexpr auto reads = [](int at) {
      const bool of_k = at % (C::qk_slots + C::pv_slots) < C::qk_slots;
      return of_k ? C::qk_at_once : C::pv_at_once * (C::direct_v ? 2 : 1);
    };
    if constexpr (ahead == 4 && slot % 2 == 0) {
      s_waitcnt_lgkmcnt<reads(slot + 2) + reads(slot + 3)>();
      sched_barrier();
    }
  }

  // Computes S(n+1) = K(n+1) Q, interleaved with the global loads and most of P(n).
  template <class Make>
  FMHA_DEVICE void interleaved_scores(Make make, Scores<spec, tile>& s_next, typename C::Stage& now,
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
        for_each<kInterleave.loads.before[share], kInterleave.loads.before[share + 1]>([&](auto x) __attribute__((always_inline)) {
          if constexpr (x.value < K::issue_parts) k_.template issue<x.value>(k_cursor_.rows, now.k, wave_bytes_);
          else v_.template issue<x.value - K::issue_parts>(v_cursor_.rows, next.v, wave_bytes_);
        });
        for_each<kInterleave.parts.before[share], kInterleave.parts.before[share + 1]>(make);
        sched_barrier();
      };
      wait_for_two_slots<i>();
      s_next[n] = mma_slot<spec.dtype_qk, i % C::slots_per_tile * C::qk_at_once>(k_ahead_[i % ahead], wave_.q,
                                                                                s_next[n], between);
    });
  }

  // Computes O += V(n) P(n), interleaved with the rest of P(n), the maximum of S(n+1) and the stores to LDS. The
  // barrier follows this wave's last read of V(n); after it the operands of the next step are read from LDS.
  template <class Make>
  FMHA_DEVICE float interleaved_values(Make make, const PFrags<spec, tile>& p_frags, const Scores<spec, tile>& s_next,
                                  typename C::Stage& now, typename C::Stage& next,
                                  Array<typename Mma<spec.dtype_v>::Operand, ahead>& v_ahead) {
    constexpr int slots = C::pv_slots, parts = Mma<spec.dtype_v>::parts;
    RunningMax<spec, tile> max(wave_.opaque_neg_inf);
    float both_halves = 0.f;
    auto store = [&](auto x) __attribute__((always_inline)) {
      if constexpr (x.value < K::store_parts) k_.store(now.k, x.value);
      else v_.store(next.v, x.value - K::store_parts);
    };
    if constexpr (Interleave::before_barrier == Interleave::qk_shares) {
      for_each<0, K::store_parts + V::store_parts>(store);
      wait_for_direct_loads();
      s_barrier();
    }
    for_each<0, slots>([&](auto slot) __attribute__((always_inline)) {
      constexpr int i = slot.value;
      auto between = [&](auto part) __attribute__((always_inline)) {
        sched_barrier();
        constexpr int share = Interleave::qk_shares + i * parts + part.value;
        if constexpr (part.value == parts - 1) {
          constexpr int at = i + ahead;
          if constexpr (at < slots) v_ahead[at % ahead] = v_operand<spec, tile>(wave_, now.v, at);
          else k_ahead_[at - slots] = k_operand<spec, tile>(wave_, now.k, at - slots);
        }
        for_each<kInterleave.parts.before[share], kInterleave.parts.before[share + 1]>(make);
        for_each<kInterleave.stores.before[share], kInterleave.stores.before[share + 1]>(store);
        for_each<kInterleave.maxima.before[share], kInterleave.maxima.before[share + 1]>(
            [&](auto x) __attribute__((always_inline)) { max.take(s_next, x.value); });
        if constexpr (kInterleave.maxima.before[share] < kInterleave.maxima.before[share + 1]) max.keep();
        if constexpr (share + 1 == Interleave::shares) both_halves = max.of_both_halves();
        if constexpr (share + 1 == Interleave::before_barrier) wait_for_direct_loads(), s_barrier();
        sched_barrier();
      };
      wait_for_two_slots<C::qk_slots + i>();
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
  const Walk& walk_;
  int32_t had_nonfinite_ = 0;
  Steps unmasked_, visible_to_all_;  // where this wave needs no mask; where every query of the workgroup sees every key
  uint32_t wave_bytes_;  // offset of this wave's fragments among those that all threads load at once
  Cursor<tile> k_cursor_, v_cursor_;
  K k_;
  V v_;
  Scores<spec, tile> s_[2];
  PFrags<spec, tile> p_frags_;  // of the previous step until this step's replace them
  Array<typename Mma<spec.dtype_qk>::Operand, ahead> k_ahead_;
};

}  // namespace fmha::cdna
