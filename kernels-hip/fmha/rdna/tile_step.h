// One step of the main loop, for one wave: 16 queries against one tile of keys.
//
//   S^T = K Q^T     accumulators hold keys along registers, queries along lanes
//   P^T = exp2(S^T) becomes the operand of the next product: in place on gfx12, by an exchange of half waves on gfx11
//   O^T += V^T P^T
#pragma once
#include <fmha/amd/mask_lanes.h>
#include <fmha/amd/score.h>
#include <fmha/dropout.h>
#include <fmha/isa/sched.h>
#include <fmha/mask.h>
#include <fmha/online_softmax.h>
#include <fmha/range.h>
#include <fmha/rdna/load.h>
#include <fmha/shown_words.h>

namespace fmha::rdna {

// A wave's state for its 16 rows. Lanes l and l + 16 share row l: each has half of a tile's keys and half of the head
// dims of O.
template <CdnaSpec spec, RdnaTile tile>
struct Wave {
  using C = Config<spec, tile>;
  Range queries;          // of the wave's rows
  int32_t query, i_head;  // of the lane's row
  Array<Vec<uint32_t, C::q_words>, C::qk_steps> q;
  Array<Acc, C::d_blocks> o;
  OnlineRow row;  // row_sum: this lane's half; row_max is natural where scores are
};

// Replacement for SharedColumns in a wave that has all columns of its rows: nothing is shared.
struct AllColumns {
  template <class Scores>
  FMHA_DEVICE void add_others(Scores&) const {}
};

// Whether scores are natural: if they are modified, and if parts of the keys are merged. Otherwise they are in log2.
template <CdnaSpec spec, RdnaTile tile>
constexpr bool kNatural = spec.modifies || tile.split;

template <CdnaSpec spec, RdnaTile tile>
constexpr float kMaxToLog2 = kNatural<spec, tile> ? kLog2E : 1.f;

// Power of two by which P is scaled, in log2. With bf16, whose V may reach f32's largest number, P is scaled below 1 by
// the number of keys, so that no sum of P V overflows f32 unless O does.
template <CdnaSpec spec, RdnaTile tile, class Job>
FMHA_DEVICE int p_scale_log2(const Job& job) {
  if constexpr (spec.dtype_v != DType::Bf16) return Config<spec, tile>::p_scale_log2;
  if constexpr (tile.split) return job.scale_below_keys();
  return __builtin_clz(job.span.seqlen_k | 1) - 32;
}

template <CdnaSpec spec, RdnaTile tile>
using Scores = Array<Acc, Config<spec, tile>::n_blocks>;

// Computes S^T of a tile over the wave's columns.
template <CdnaSpec spec, RdnaTile tile, class C = Config<spec, tile>>
FMHA_DEVICE Scores<spec, tile> scores(const Wave<spec, tile>& wave, const typename C::K& k) {
  const int lane = C::K::lane_offset(opaque_thread_idx()) + column_wave<C>() * C::wave_dim_qk * C::qk_bytes;
  Scores<spec, tile> s;
#pragma unroll
  for (int n = 0; n < C::n_blocks; ++n) s[n] = Acc{};
#pragma unroll
  for (int c = 0; c < C::qk_steps; ++c) {
    Operand<spec.dtype_qk> q;
    if constexpr (C::halves_of_q) q = joined<spec.dtype_qk>(wave.q[c]);
    else q = wave.q[c];
#pragma unroll
    for (int n = 0; n < C::n_blocks; ++n) {
      s[n] = mma<spec.dtype_qk>(k.template operand<spec.dtype_qk>(lane, n, c), q, s[n]);
      if constexpr (C::blocks_ahead == 1) sched_barrier();
    }
    // Keeps the compiler from reading all of K ahead, for which there are not enough registers.
    sched_barrier();
  }
  // Keeps products in place: otherwise they move after the branches on the mask, and operands stay live.
#pragma unroll
  for (int n = 0; n < C::n_blocks; ++n) opaque_in_vgpr(s[n]);
  return s;
}

// Calls `change(score, key)` for all of a lane's scores.
template <CdnaSpec spec, RdnaTile tile, class Change>
FMHA_DEVICE void for_each_score(Scores<spec, tile>& s, int32_t first_key, Change change) {
  const int half = lane_half(opaque_thread_idx());
#pragma unroll
  for (int n = 0; n < Config<spec, tile>::n_blocks; ++n) {
#pragma unroll
    for (int i = 0; i < kAccElems; ++i)
      s[n][i] = change(s[n][i], first_key + n * kEdge + acc_row(i, half));
  }
}

// A lane's scores of a tile: one row of scores, with keys along the registers.
template <CdnaSpec spec, RdnaTile tile>
struct TileOfScores {
  static constexpr int count = Config<spec, tile>::n_blocks * kAccElems;
  Scores<spec, tile>& s;
  int32_t query, first_key;

  FMHA_DEVICE float at(int e) const { return s[e / kAccElems][e % kAccElems]; }
  FMHA_DEVICE void set(int e, float x) { s[e / kAccElems][e % kAccElems] = x; }
  FMHA_DEVICE void add(int e, float x) { s[e / kAccElems][e % kAccElems] += x; }
  FMHA_DEVICE void multiply_slope(int, float) {}
  FMHA_DEVICE void forget_place() { opaque_in_vgpr(first_key); }
  FMHA_DEVICE Pair pair(int e) const {
    return {query, first_key, 0, e / kAccElems * kEdge + acc_row(e % kAccElems, 0)};
  }
};

// Converts scaled products to natural scores.
template <CdnaSpec spec, RdnaTile tile, class Job>
FMHA_DEVICE void modify(Scores<spec, tile>& s, const CdnaParams& params, const Job& job, const Wave<spec, tile>& wave,
                        int32_t first_key) {
  const TileOfScores<spec, tile> scores = {s, min(wave.query, job.span.seqlen_q - 1),
                                           first_key + acc_row(0, lane_half(opaque_thread_idx()))};
  apply_given<ExactTanh, !spec.masks>(scores, params.fwd, DType(params.dtype_bias), job.span, wave.i_head);
}

template <CdnaSpec spec, RdnaTile tile, class Job>
FMHA_DEVICE void mask(Scores<spec, tile>& s, const Job& job, int32_t query, int32_t first_key) {
  for_each_score<spec, tile>(s, first_key, [&](float x, int32_t key) {
    const bool seen = key < job.span.seqlen_k && (spec.mask == MaskKind::Full || visible(job.band, query, key));
    return seen ? x : -infinity();
  });
  if constexpr (tile.split) {
    if (!job.has_words()) return;
    static_assert(tile.block_n <= 32, "a tile's keys are the bits of a word");
    const uint32_t seen = job.shown_word(query, first_key);
    for_each_score<spec, tile>(s, 0, [&](float x, int32_t key) { return seen >> key & 1 ? x : -infinity(); });
  }
}

// Hides pairs of a partly masked tile that masks as data or a mask as code hide.
template <CdnaSpec spec, RdnaTile tile, class Job>
FMHA_DEVICE void mask_by_data(Scores<spec, tile>& s, const Job& job, const Wave<spec, tile>& wave, int32_t first_key) {
  constexpr int words = max(tile.block_n / 32, 1);
  const MaskedCdnaParams& p = reload_params<MaskedCdnaParams>();
  const int32_t last_query = job.span.seqlen_q - 1, query = min(wave.query, last_query);
  const Range rows = {min(wave.queries.begin, last_query), min(wave.queries.end, job.span.seqlen_q)};
  const ShownWords<MaskLanes> masks = {DataMasks{p.masks}};
  const auto shown = masks.template of_query<words>(job.span, wave.i_head, query, rows, first_key);
  const int own = acc_row(0, lane_half(opaque_thread_idx()));
#pragma unroll
  for (int n = 0; n < Config<spec, tile>::n_blocks; ++n) {
    const int shift = n * kEdge % 32 + own;
    const uint32_t seen = shown.seen[n * kEdge / 32] >> shift, full = shown.full[n * kEdge / 32] >> shift;
#pragma unroll
    for (int i = 0; i < kAccElems; ++i) {
      const int32_t row = acc_row(i, 0), key = first_key + own + n * kEdge + row;
      bool sees = key < job.span.seqlen_k && visible(job.band, query, key) && (seen >> row & 1);
      if constexpr (code::kIsGiven) {
        // No branch around the function: one hid pairs that it shows (clang 22, emulated; cause not found).
        const uint32_t by_function = Functions::of(p.cdna.fwd, job.span, wave.i_head).shows({query, key});
        sees &= ((full >> row | by_function) & 1) != 0;
      }
      s[n][i] = sees ? s[n][i] : -infinity();
    }
  }
}

// Whether all of `queries` see all keys of a tile.
template <CdnaSpec spec, RdnaTile tile, class Job>
FMHA_DEVICE bool needs_no_mask(const Job& job, Range queries, int32_t first_key) {
  const Range keys = {first_key, first_key + tile.block_n};
  if constexpr (tile.split) {
    if (job.may_hide(keys)) return false;
  }
  return keys.end <= job.span.seqlen_k &&
         (spec.mask == MaskKind::Full || block_class(job.band, queries, keys) == BlockClass::Inside);
}

// Updates the running maximum; sums and O are rescaled only if it rose for some query of the wave.
template <CdnaSpec spec, RdnaTile tile, class C = Config<spec, tile>>
FMHA_DEVICE void raise_row_max(Wave<spec, tile>& wave, const Scores<spec, tile>& s) {
  // Two independent chains are used, since each step waits for the one before.
  float most[2] = {-infinity(), -infinity()};
#pragma unroll
  for (int n = 0; n < C::n_blocks; ++n) {
#pragma unroll
    for (int i = 0; i < kAccElems; i += 2) most[i / 2 % 2] = v_max3_f32(most[i / 2 % 2], s[n][i], s[n][i + 1]);
  }
  float tile_max = v_max_f32(most[0], most[1]);
  tile_max = v_max_f32(tile_max, other_half(tile_max));
  if (v_cmp_ballot(tile_max > wave.row.row_max) == 0) return;
  const float before = wave.row.row_max;
  wave.row.row_max = v_max_f32(before, tile_max);
  const float correction = exp2_of((before - finite_or_zero(wave.row.row_max)) * kMaxToLog2<spec, tile>);
  wave.row.row_sum *= correction;
#pragma unroll
  for (int d = 0; d < C::d_blocks; ++d) wave.o[d] *= correction;
}

// Converts scores to P, and adds their sum to the row's.
template <CdnaSpec spec, RdnaTile tile, class Job, class C = Config<spec, tile>>
FMHA_DEVICE void probabilities(Scores<spec, tile>& s, Wave<spec, tile>& wave, const Job& job) {
  const float row_max = finite_or_zero(wave.row.row_max), scale_of_p = float(p_scale_log2<spec, tile>(job));
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < C::n_blocks; ++n) {
#pragma unroll
    for (int i = 0; i < kAccElems; ++i) {
      // The maximum is subtracted from scores that were rounded like it: in one multiply-add it would not cancel.
      s[n][i] = v_exp_f32((s[n][i] - row_max) * kMaxToLog2<spec, tile> + scale_of_p);
      sum[i % 2] += s[n][i];
    }
  }
  wave.row.row_sum += sum[0] + sum[1];
}

// Sets P of dropped pairs to 0.
template <CdnaSpec spec, RdnaTile tile, class Job>
FMHA_DEVICE void drop(Scores<spec, tile>& s, const CdnaParams& params, const Job& job, const Wave<spec, tile>& wave,
                      int32_t first_key) {
  if (!params.drops) return;
  const FwdParams& p = params.fwd;
  const int32_t batch_head = head_of_whole(p, job.span.i_batch, wave.i_head);
  const int half = lane_half(opaque_thread_idx());
#pragma unroll
  for (int n = 0; n < Config<spec, tile>::n_blocks; ++n) {
    // Number of a lane's registers that lie in one group of four keys.
    constexpr int at_once = kRepeats ? 2 : 4;
#pragma unroll
    for (int i = 0; i < kAccElems; i += at_once) {
      const int32_t key = first_key + n * kEdge + acc_row(i, half);
      const Array<uint32_t, 4> words = dropout_words_of_keys(p, batch_head, wave.query, key & ~3);
#pragma unroll
      for (int r = 0; r < at_once; ++r) {
        const uint32_t word = kRepeats ? (half ? words[2 * r + 1] : words[2 * r]) : words[r];
        s[n][i + r] = word < p.dropout_threshold ? s[n][i + r] : 0.f;
      }
      // Keeps several calls of the generator from running at once: 24 spills at D 256 on gfx1100.
      opaque_in_vgpr(s[n]), sched_barrier();
    }
  }
}

template <CdnaSpec spec, RdnaTile tile, class C = Config<spec, tile>>
FMHA_DEVICE void weighted_values(Wave<spec, tile>& wave, const Scores<spec, tile>& p, const typename C::V& v) {
  const int lane = C::V::lane_offset(opaque_thread_idx()) + column_wave<C>() * C::wave_dim_v * C::V::stride;
#pragma unroll
  for (int n = 0; n < C::n_blocks; ++n) {
    const Operand<spec.dtype_v> p_operand = joined<spec.dtype_v>(packed_p<spec.dtype_v>(p[n]));
#pragma unroll
    for (int d = 0; d < C::d_blocks; ++d) {
      wave.o[d] = mma<spec.dtype_v>(v.template operand<spec.dtype_v>(lane, d, n), p_operand, wave.o[d]);
      if (d % C::blocks_ahead == C::blocks_ahead - 1) sched_barrier();
    }
  }
}

// Processes a tile. `columns`: how waves that share columns exchange sums. `is_cut`: masks as data hide a part of the
// tile.
template <CdnaSpec spec, RdnaTile tile, class Job, class Columns>
FMHA_DEVICE void tile_step(Wave<spec, tile>& wave, const typename Config<spec, tile>::Lds& lds, const CdnaParams& p,
                           const Job& job, int32_t first_key, const Columns& columns, bool is_cut = true) {
  Scores<spec, tile> s = scores<spec, tile>(wave, lds.k);
  columns.add_others(s);
  for_each_score<spec, tile>(s, first_key, [&](float x, int32_t) { return x * job.scale; });
  if constexpr (spec.modifies) modify<spec, tile>(s, p, job, wave, first_key);
  if constexpr (spec.masks) {
    if (is_cut) mask_by_data<spec, tile>(s, job, wave, first_key);
  } else if (!needs_no_mask<spec, tile>(job, wave.queries, first_key)) {
    mask<spec, tile>(s, job, wave.query, first_key);
  }
  raise_row_max<spec, tile>(wave, s);
  probabilities<spec, tile>(s, wave, job);
  if constexpr (spec.dropout) drop<spec, tile>(s, p, job, wave, first_key);
  weighted_values<spec, tile>(wave, s, lds.v);
}

}  // namespace fmha::rdna
