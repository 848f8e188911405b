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
#include <fmha/cdna/load.h>
#include <fmha/cdna/nonfinite.h>
#include <fmha/cdna/tile_step.h>
#include <fmha/isa/sched.h>
#include <fmha/isa/sync.h>

namespace fmha::cdna {

// Tiles of keys that some query of the workgroup sees: those of sink columns, then the band's.
struct TileWalk {
  int32_t num_sink_tiles, first_band_tile, num_tiles;

  template <FwdSpec spec, CdnaTile tile>
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

template <FwdSpec spec>
FMHA_DEVICE Rows rows_of(const View& x, int64_t first_row, const SeqSpan& span, int32_t head, int32_t num_rows,
                         int32_t row_bytes, int32_t elem_bytes) {
  const int64_t first = row_offset(x, span.storage_batch, first_row, head);
  return {static_cast<const uint8_t*>(x.data) + first * elem_bytes, x.row * elem_bytes, num_rows, row_bytes};
}

// Where the tiles of K, or of V, lie: the tile that is loaded next.
template <CdnaTile tile>
struct Cursor {
  Rows rows;
  int64_t tile_bytes;
  bool keys_are_rows;
  int32_t key_bytes;

  FMHA_DEVICE void advance(int32_t tiles) {
    rows.data += tiles * tile_bytes;
    if (keys_are_rows) {
      rows.num_rows -= tiles * tile.block_n;
    } else {
      rows.row_bytes -= tiles * tile.block_n * key_bytes;
    }
  }
};

template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE Cursor<tile> k_cursor(const FwdParams& p, const Job& job) {
  using C = Config<spec, tile>;
  const Rows rows = rows_of<spec>(p.k, job.span.k_row, job.span, job.i_head_kv, job.span.seqlen_k, C::qk_row_bytes,
                                  C::qk_bytes);
  return {rows, tile.block_n * rows.stride_bytes, true, C::qk_bytes};
}

template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE Cursor<tile> v_cursor(const FwdParams& p, const Job& job) {
  using C = Config<spec, tile>;
  Rows rows = rows_of<spec>(p.v, job.span.k_row, job.span, job.i_head_kv, job.span.seqlen_k, C::v_row_bytes,
                            C::v_bytes);
  if constexpr (spec.v_layout == VLayout::RowMajor) return {rows, tile.block_n * rows.stride_bytes, true, C::v_bytes};
  rows.stride_bytes = p.v.dim * C::v_bytes;
  rows.num_rows = spec.head_dim_v;
  rows.row_bytes = job.span.seqlen_k * C::v_bytes;
  return {rows, tile.block_n * p.v.row * C::v_bytes, false, C::v_bytes};
}

// The items due in slot `done` of `slots`, of `items` dealt out evenly.
template <int done, int slots, int items, class Body>
FMHA_DEVICE void for_each_due(Body body) {
  constexpr auto before = [](int n) { return n >= slots ? items : n * items / slots; };
  if constexpr (done < slots) for_each<before(done), before(done + 1)>(body);
}

// Every wave of a workgroup walks alike: barriers are inside.
template <FwdSpec spec, CdnaTile tile>
class MainLoop {
  using C = Config<spec, tile>;
  using K = KLoad<spec, tile>;
  using V = VLoad<spec, tile>;
  static constexpr int ahead = C::slots_ahead;

 public:
  FMHA_DEVICE MainLoop(Wave<spec, tile>& wave, typename C::Lds& lds, const FwdParams& p, const Job& job,
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
    s_[0] = prologue(lds_.stage[odd], lds_.stage[1 - odd]);
    if (odd) {
      s_[1] = s_[0];
      step<1>(0);
    }
    for (int32_t n = odd; n < last; n += 2) {
      step<0>(n);
      step<1>(n + 1);
    }
    const PFrags<spec, tile> p_frags = probabilities<spec, tile>(s_[0], wave_, p_, job_, first_key(last));
    weighted_values<spec, tile>(wave_, p_frags, lds_.stage[0].v);
    return hidden_;
  }

 private:
  FMHA_DEVICE int32_t first_key(int32_t n) const { return walk_.tile_at(n) * tile.block_n; }

  FMHA_DEVICE void advance(Cursor<tile>& cursor, int32_t to) const {
    cursor.advance(spec.sink_columns ? walk_.tile_at(to) - walk_.tile_at(to - 1) : 1);
  }

  FMHA_DEVICE Scores<spec, tile> prologue(typename C::Stage& first, typename C::Stage& second) {
    wave_.k_lane = C::KMatrix::lane_addresses();
    wave_.v_lane = C::VMatrix::lane_addresses();
    k_.find_places(k_cursor_.rows);
    v_.find_places(v_cursor_.rows);
    K k0 = k_;
#pragma unroll
    for (int i = 0; i < K::issue_parts; ++i) k0.issue(k_cursor_.rows, i);
#pragma unroll
    for (int i = 0; i < V::issue_parts; ++i) v_.issue(v_cursor_.rows, i);
    advance(k_cursor_, 1);
    advance(v_cursor_, 1);
#pragma unroll
    for (int i = 0; i < K::issue_parts; ++i) k_.issue(k_cursor_.rows, i);  // beyond the last tile nobody reads it
    advance(k_cursor_, 2);
#pragma unroll
    for (int i = 0; i < K::store_parts; ++i) k0.store(first.k, i);
#pragma unroll
    for (int i = 0; i < V::store_parts; ++i) v_.store(first.v, i);
#pragma unroll
    for (int i = 0; i < K::store_parts; ++i) k_.store(second.k, i);
    s_barrier();
    hidden_ = hide_nonfinite<spec, tile>(first.v, job_, queries_, first_key(0));
    Scores<spec, tile> s = scores<spec, tile>(wave_, first.k);
    modify_and_mask<spec, tile>(s, job_, wave_, first_key(0));
    raise_row_max<spec, tile>(wave_, job_, max_of<spec, tile>(s));
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

    Probabilities<spec, tile> made(s, wave_, job_);
    auto make = [&](auto part) __attribute__((always_inline)) {
      made.make(s, part.value, wave_, p_, job_, first_key(n));
    };
    scores_beside(make, s_next, next.k, now.v, v_ahead);
    advance(k_cursor_, n + 3);
    advance(v_cursor_, n + 2);
    modify_and_mask<spec, tile>(s_next, job_, wave_, first_key(n + 1));
    const float next_max = values_beside(make, made.frags, s_next, now, next, v_ahead);
    wave_.row.row_sum += made.sum[0] + made.sum[1];
    raise_row_max<spec, tile>(wave_, job_, next_max);
    hidden_ |= hide_nonfinite<spec, tile>(next.v, job_, queries_, first_key(n + 1));
  }

  // Parts of P that are made beside the second product: those of its second half, as far as they leave
  // both products equal work.
  static constexpr int p_parts = Probabilities<spec, tile>::parts;
  static constexpr int late_parts = C::pv_slots / C::d_blocks % 2 == 0 ? p_parts / 4 : 0;
  static constexpr int early_parts = p_parts - late_parts;

  // Operands are read two at a time where slots allow it: one wait for both.
  static constexpr bool reads_pairs = ahead == 4 && C::qk_slots % 2 == 0 && C::pv_slots % 2 == 0;
  template <int slot, class Read>
  static FMHA_DEVICE void read_ahead(Read read) {
    if constexpr (!reads_pairs) {
      read(Index<slot + ahead>{});
    } else if constexpr (slot % 2 == 1) {
      read(Index<slot - 1 + ahead>{});
      read(Index<slot + ahead>{});
    }
  }

  // S(n+1) = K(n+1) Q. Between: the loads, and most of P(n).
  template <class Make>
  FMHA_DEVICE void scores_beside(Make make, Scores<spec, tile>& s_next, const typename C::KMatrix& k,
                                 const typename C::VMatrix& v,
                                 Array<typename Mma<spec.dtype_v>::Operand, ahead>& v_ahead) {
    constexpr int slots = C::qk_slots, parts = Mma<spec.dtype_qk>::parts, shares = slots * parts;
    constexpr int load_shares = ceil_div(shares, 3);  // early: a load needs the whole product to arrive
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) s_next[n] = Acc{};
    for_each<0, slots>([&](auto slot) __attribute__((always_inline)) {
      constexpr int i = slot.value, n = i / C::slots_per_tile;
      auto read = [&](auto later) __attribute__((always_inline)) {
        constexpr int at = later.value;
        if constexpr (at < slots) k_ahead_[at % ahead] = k_operand<spec, tile>(wave_, k, at);
        else v_ahead[at - slots] = v_operand<spec, tile>(wave_, v, at - slots);
      };
      auto between = [&](auto part) __attribute__((always_inline)) {
        constexpr int done = i * parts + part.value;
        if constexpr (part.value == parts - 1) read_ahead<i>(read);
        for_each_due<done, load_shares, K::issue_parts>(
            [&](auto x) __attribute__((always_inline)) { k_.issue(k_cursor_.rows, x.value); });
        for_each_due<done, load_shares, V::issue_parts>(
            [&](auto x) __attribute__((always_inline)) { v_.issue(v_cursor_.rows, x.value); });
        for_each_due<done, shares, early_parts>(make);
        sched_barrier();
      };
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
    constexpr int before_barrier = (slots - ahead) * parts;
    constexpr int shares = slots * parts, before_max = shares / 2, max_shares = shares - before_max - 1;
    constexpr int stores = K::store_parts + V::store_parts, before_stores = before_barrier / 4;
    RunningMax<spec, tile> max;
    float both_halves = 0.f;
    auto store = [&](auto x) __attribute__((always_inline)) {
      if constexpr (x.value < K::store_parts) k_.store(now.k, x.value);
      else v_.store(next.v, x.value - K::store_parts);
    };
    if constexpr (before_barrier == 0) {
      for_each<0, stores>(store);
      s_barrier();
    }
    for_each<0, slots>([&](auto slot) __attribute__((always_inline)) {
      constexpr int i = slot.value;
      auto read = [&](auto later) __attribute__((always_inline)) {
        constexpr int at = later.value;
        if constexpr (at < slots) v_ahead[at % ahead] = v_operand<spec, tile>(wave_, now.v, at);
        else k_ahead_[at - slots] = k_operand<spec, tile>(wave_, now.k, at - slots);
      };
      auto between = [&](auto part) __attribute__((always_inline)) {
        constexpr int done = i * parts + part.value;
        if constexpr (part.value == parts - 1) read_ahead<i>(read);
        for_each_due<done, before_max, late_parts>(
            [&](auto x) __attribute__((always_inline)) { make(Index<early_parts + x.value>{}); });
        if constexpr (done >= before_max) {
          for_each_due<done - before_max, max_shares, max.parts>(
              [&](auto x) __attribute__((always_inline)) { max.take(s_next, x.value); });
        }
        if constexpr (done + 1 == shares) both_halves = v_max_f32(max.most, other_half(max.most));
        if constexpr (done >= before_stores && before_barrier > 0) {
          for_each_due<done - before_stores, before_barrier - before_stores, stores>(store);
        }
        if constexpr (done + 1 == before_barrier) s_barrier();
        sched_barrier();
      };
      Acc& o = wave_.o[i % C::d_blocks];
      o = mma_slot<spec.dtype_v, i / C::d_blocks * C::pv_at_once>(v_ahead[i % ahead], p_frags, o, between);
    });
    return both_halves;
  }

  Wave<spec, tile>& wave_;
  typename C::Lds& lds_;
  const FwdParams& p_;
  const Job& job_;
  Range queries_;
  const TileWalk& walk_;
  bool hidden_ = false;
  Cursor<tile> k_cursor_, v_cursor_;
  K k_;
  V v_;
  Scores<spec, tile> s_[2];
  Array<typename Mma<spec.dtype_qk>::Operand, ahead> k_ahead_;
};

}  // namespace fmha::cdna
