// The parts of one step of the main loop, for one wave: 32 queries against one tile of keys.
//
//   S^T = K Q^T     accumulators hold keys along registers, queries along lanes
//   P^T = exp2(S^T) stays in the same registers: they are the operand that the next product wants
//   O^T += V^T P^T
#pragma once
#include <fmha/cdna/config.h>
#include <fmha/mask.h>
#include <fmha/online_softmax.h>
#include <fmha/philox.h>
#include <fmha/score.h>

namespace fmha::cdna {

// What one workgroup works on.
struct Job {
  SeqSpan span;
  int32_t i_head, i_head_kv;
  MaskBand band;
  ScoreModifier modifier;
  float scale_log2;  // of raw scores, not negative; unused where the modifier scales
};

// What one wave has of its 32 queries: lane l and lane l + 32 share query l, with half of the keys
// and of the output's rows each.
template <FwdSpec spec, CdnaTile tile>
struct Wave {
  using C = Config<spec, tile>;
  int32_t first_query, query;
  Array<Frag, C::qk_steps> q;
  Array<Acc, C::d_blocks> o;
  OnlineRow row;  // row_sum is this half's share
  typename C::KMatrix::LaneAddresses k_lane;
  typename C::VMatrix::LaneAddresses v_lane;
};

// S^T of one wave and tile; P in the order in which P V takes it.
template <FwdSpec spec, CdnaTile tile>
using Scores = Array<Acc, Config<spec, tile>::n_tiles>;
template <FwdSpec spec, CdnaTile tile>
using PFrags = Array<Frag, Config<spec, tile>::pv_steps>;

// What a matrix slot reads from LDS. S goes tile by tile, so that a tile of the step before is P by the
// time that the next one's accumulators are written; O goes through all its blocks for each part of P.
template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE typename Mma<spec.dtype_qk>::Operand k_operand(const Wave<spec, tile>& wave,
                                                        const typename Config<spec, tile>::KMatrix& k, int slot) {
  using C = Config<spec, tile>;
  const int n = slot / C::slots_per_tile, first = slot % C::slots_per_tile * C::qk_at_once;
  typename Mma<spec.dtype_qk>::Operand x;
#pragma unroll
  for (int c = 0; c < C::qk_at_once; ++c) x[c] = first + c < C::qk_steps ? k.frag(wave.k_lane, n, first + c) : Frag{};
  return x;
}

template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE typename Mma<spec.dtype_v>::Operand v_operand(const Wave<spec, tile>& wave,
                                                       const typename Config<spec, tile>::VMatrix& v, int slot) {
  using C = Config<spec, tile>;
  const int d = slot % C::d_blocks, first = slot / C::d_blocks * C::pv_at_once;
  typename Mma<spec.dtype_v>::Operand x;
#pragma unroll
  for (int c = 0; c < C::pv_at_once; ++c) x[c] = first + c < C::pv_steps ? v.frag(wave.v_lane, d, first + c) : Frag{};
  return x;
}

// An index that the compiler knows while it reads the text: what is dealt out between the slots must not
// wait for an unroller.
template <int i>
struct Index {
  static constexpr int value = i;
};

template <int begin, int end, class Body>
FMHA_DEVICE void for_each(Body body) {
  if constexpr (begin < end) {
    body(Index<begin>{});
    for_each<begin + 1, end>(body);
  }
}

// The instructions of one slot: C += A B over the steps from `first` on. `between` is what the vector
// unit has to do after each.
template <DType dtype, int first, int steps, class Between>
FMHA_DEVICE Acc mma_slot(const typename Mma<dtype>::Operand& a, const Array<Frag, steps>& b, Acc c, Between between) {
  using M = Mma<dtype>;
#if defined(__gfx950__)
  if constexpr (M::steps_at_once == 2 && first + 1 < steps) {
    c = mma_two_steps<dtype>(a[0], b[first], a[1], b[first + 1], c);
    for_each<0, M::parts>(between);
    return c;
  }
#endif
  for_each<0, M::parts>([&](auto part) __attribute__((always_inline)) {
    c = mma_part<dtype>(a[0], b[first], part.value, c);
    between(part);
  });
  return c;
}

// S^T alone.
template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE Scores<spec, tile> scores(const Wave<spec, tile>& wave, const typename Config<spec, tile>::KMatrix& k) {
  using C = Config<spec, tile>;
  Scores<spec, tile> s;
#pragma unroll
  for (int n = 0; n < C::n_tiles; ++n) s[n] = Acc{};
  for_each<0, C::qk_slots>([&](auto slot) __attribute__((always_inline)) {
    constexpr int i = slot.value, n = i / C::slots_per_tile;
    s[n] = mma_slot<spec.dtype_qk, i % C::slots_per_tile * C::qk_at_once>(k_operand<spec, tile>(wave, k, i), wave.q, s[n],
                                                                   [](auto) __attribute__((always_inline)) { sched_barrier(); });
  });
  return s;
}

// Afterwards s is in log2; for problems whose scores need more than their scale.
template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE void modify(Scores<spec, tile>& s, const Job& job, const Wave<spec, tile>& wave, int32_t first_key) {
  const int32_t query = min(wave.query, job.span.seqlen_q - 1), last_key = job.span.seqlen_k - 1;
#pragma unroll
  for (int n = 0; n < Config<spec, tile>::n_tiles; ++n) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      // Clamped: the bias ends where the sequence does.
      const int32_t key = min(first_key + n * kEdge + acc_row(i, lane_half()), last_key);
      s[n][i] = kLog2E * modified_score<spec>(job.modifier, s[n][i], query, key);
    }
  }
}

template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE void mask(Scores<spec, tile>& s, const Job& job, const Wave<spec, tile>& wave, int32_t first_key) {
#pragma unroll
  for (int n = 0; n < Config<spec, tile>::n_tiles; ++n) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int32_t key = first_key + n * kEdge + acc_row(i, lane_half());
      const bool seen = key < job.span.seqlen_k && (spec.mask == MaskKind::Full || visible(job.band, wave.query, key));
      s[n][i] = seen ? s[n][i] : -infinity();
    }
  }
}

// Modifiers, and the mask where the wave's tile needs one: its neighbours' edges cost it nothing.
template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE void modify_and_mask(Scores<spec, tile>& s, const Job& job, const Wave<spec, tile>& wave,
                                 int32_t first_key) {
  if constexpr (modifies_score(spec)) modify<spec, tile>(s, job, wave, first_key);
  const Range queries = {wave.first_query, wave.first_query + kEdge}, keys = {first_key, first_key + tile.block_n};
  const bool inside = keys.end <= job.span.seqlen_k &&
                      (spec.mask == MaskKind::Full || block_class(job.band, queries, keys) == BlockClass::Inside);
  if (!inside) mask<spec, tile>(s, job, wave, first_key);
}

// The maximum of a tile, two elements at a time.
template <FwdSpec spec, CdnaTile tile>
struct RunningMax {
  static constexpr int parts = Config<spec, tile>::n_tiles * 8;
  float most;

  FMHA_DEVICE void take(const Scores<spec, tile>& s, int part) {
    const Acc& x = s[part / 8];
    const int i = part % 8 * 2;
    most = v_max_f32(part == 0 ? x[0] : v_max_f32(most, x[i]), x[i + 1]);
    computed_here(most);
  }
};

template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE float max_of(const Scores<spec, tile>& s) {
  RunningMax<spec, tile> x;
#pragma unroll
  for (int i = 0; i < x.parts; ++i) x.take(s, i);
  return v_max_f32(x.most, other_half(x.most));
}

// Takes the tile's maximum in. Sums and outputs are rescaled only when it rose for some query of the
// wave. Waiting until it has risen by 2^8, as others do, leaves the largest P no longer 1 but rounded,
// and its error in O: 1.007 of what the contract allows in one case of 148 (bf16, emulated gfx942).
template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE void raise_row_max(Wave<spec, tile>& wave, const Job& job, float tile_max) {
  using C = Config<spec, tile>;
  const float tile_max_log2 = modifies_score(spec) ? tile_max : tile_max * job.scale_log2;
  if (v_cmp_ballot(tile_max_log2 > wave.row.row_max) == 0) return;
  const float correction = wave.row.raise_to(v_max_f32(wave.row.row_max, tile_max_log2));
#pragma unroll
  for (int d = 0; d < C::d_blocks; ++d) wave.o[d] *= correction;
}

// One run of four registers of P, which is one call of the generator.
template <FwdSpec spec>
FMHA_DEVICE void drop_run(Acc& p_tile, int i, const FwdParams& p, const Job& job, int32_t query, int32_t first_key) {
  const int32_t batch_head = job.span.i_batch * p.num_heads_q + job.i_head;
  const Array<uint32_t, 4> words = dropout_words(p, batch_head, query, (first_key + acc_row(i, lane_half())) / kRun);
#pragma unroll
  for (int r = 0; r < kRun; ++r) p_tile[i + r] = words[r] < p.dropout_threshold ? p_tile[i + r] : 0.f;
}

// P of a tile in the place of its scores, two elements at a time, packed to fragments as it grows.
template <FwdSpec spec, CdnaTile tile>
struct Probabilities {
  using C = Config<spec, tile>;
  static constexpr int parts = C::n_tiles * 8;
  static constexpr int per_word = Mma<spec.dtype_v>::per_word;
  float scale_log2, base;
  f32x2 sum = {0.f, 0.f};
  f32x2 exponent;  // of the part that is made next
  PFrags<spec, tile> frags;

  FMHA_DEVICE Probabilities(const Scores<spec, tile>& s, const Wave<spec, tile>& wave, const Job& job)
      : scale_log2(modifies_score(spec) ? 1.f : job.scale_log2),
        base(C::p_scale_log2 - finite_or_zero(wave.row.row_max)),
        exponent(exponent_of(s, 0)) {}

  // Three parts are under way: an exponential's result is taken a part later, four passes after.
  FMHA_DEVICE void make(Scores<spec, tile>& s, int part, const Wave<spec, tile>& wave, const FwdParams& p,
                        const Job& job, int32_t first_key) {
    Acc& x = s[part / 8];
    const int i = part % 8 * 2;
    x[i] = v_exp_f32(exponent[0]), x[i + 1] = v_exp_f32(exponent[1]);
    if (part + 1 < parts) exponent = exponent_of(s, part + 1);
    if (part > 0) take(s, part - 1, wave, p, job, first_key);
    if (part + 1 == parts) take(s, part, wave, p, job, first_key);
  }

  FMHA_DEVICE void take(Scores<spec, tile>& s, int part, const Wave<spec, tile>& wave, const FwdParams& p,
                        const Job& job, int32_t first_key) {
    Acc& x = s[part / 8];
    const int i = part % 8 * 2, done = i + 2;
    sum += f32x2{x[i], x[i + 1]};
    computed_here(sum);
    if constexpr (spec.dropout) {
      if (done % kRun != 0) return;
      drop_run<spec>(x, done - kRun, p, job, wave.query, first_key + part / 8 * kEdge);
      pack<kRun>(x, part / 8, done - kRun);
    } else if (done % per_word == 0) {
      pack<per_word>(x, part / 8, done - per_word);
    }
  }

  FMHA_DEVICE f32x2 exponent_of(const Scores<spec, tile>& s, int part) const {
    const Acc& x = s[part / 8];
    const int i = part % 8 * 2;
    return v_pk_fma_f32(f32x2{x[i], x[i + 1]}, f32x2{scale_log2, scale_log2}, f32x2{base, base});
  }

  template <int num>
  FMHA_DEVICE void pack(const Acc& x, int n, int first) {
#pragma unroll
    for (int i = first; i < first + num; i += per_word) {
      const int word = (n * 16 + i) / per_word;
      uint32_t made = p_word<spec.dtype_v>(x, i);
      computed_here(made);
      frags[word / 4][word % 4] = made;
    }
  }
};

// P alone, and its sum into the row's.
template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE PFrags<spec, tile> probabilities(Scores<spec, tile>& s, Wave<spec, tile>& wave, const FwdParams& p,
                                             const Job& job, int32_t first_key) {
  Probabilities<spec, tile> made(s, wave, job);
#pragma unroll
  for (int i = 0; i < made.parts; ++i) made.make(s, i, wave, p, job, first_key);
  wave.row.row_sum += made.sum[0] + made.sum[1];
  return made.frags;
}

// O^T alone.
template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE void weighted_values(Wave<spec, tile>& wave, const PFrags<spec, tile>& p_frags,
                                 const typename Config<spec, tile>::VMatrix& v) {
  using C = Config<spec, tile>;
  for_each<0, C::pv_slots>([&](auto slot) __attribute__((always_inline)) {
    constexpr int i = slot.value;
    Acc& o = wave.o[i % C::d_blocks];
    o = mma_slot<spec.dtype_v, i / C::d_blocks * C::pv_at_once>(v_operand<spec, tile>(wave, v, i), p_frags, o,
                                                                [](auto) __attribute__((always_inline)) { sched_barrier(); });
  });
}

}  // namespace fmha::cdna
