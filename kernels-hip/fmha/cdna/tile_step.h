// The parts of one step of the main loop, for one wave: 32 queries against one tile of keys.
//
//   S^T = K Q^T     accumulators hold keys along registers, queries along lanes
//   P^T = exp2(S^T) stays in the same registers: they are the operand that the next product wants
//   O^T += V^T P^T
#pragma once
#include <fmha/cdna/config.h>
#include <fmha/mask.h>
#include <fmha/online_softmax.h>
#include <fmha/dropout.h>
#include <fmha/range.h>
#include <fmha/amd/mask_lanes.h>
#include <fmha/cdna/score.h>
#include <fmha/isa/sched.h>
#include <fmha/shown_words.h>

namespace fmha::cdna {

// Work of one workgroup.
struct Job {
  SeqSpan span;
  int32_t i_head, i_head_kv;
  MaskBand band;
  float scale;  // of raw scores: to natural ones where they are modified, else to log2, and not negative then
};

// A wave's state for its 32 queries. Lanes l and l + 32 share query l: each has half of a tile's keys and half of the
// head dimensions of O.
template <CdnaSpec spec, CdnaTile tile>
struct Wave {
  using C = Config<spec, tile>;
  int32_t first_query, query;
  Array<Frag, C::qk_steps> q;
  Array<Acc, C::d_blocks> o;
  OnlineRow row;    // row_sum: this lane's half, even keys only; row_max is natural where scores are modified
  float odd_key_sum;  // the same of odd keys: two sums, so that no add waits for the one before
  float exp2_offset;  // P = exp2(score * its scale + exp2_offset): p_scale_log2 less the maximum, unless `subtracted`
  bool subtracted;    // a maximum of the wave is so large that scores have theirs subtracted first (subtract_first)
  float opaque_neg_inf;  // -infinity whose value the compiler does not know, see RunningMax
  typename C::KMatrix::LaneAddresses k_lane;
  typename C::VMatrix::LaneAddresses v_lane;
};

// Factor that converts a row's maximum to log2. Modified scores
// stay natural: times log2(e) a finite bias may overflow f32.
template <CdnaSpec spec>
constexpr float kMaxToLog2 = spec.modifies ? kLog2E : 1.f;

// Power of two by which P is scaled, in log2 (Config). For bf16, whose V may reach f32's largest number, P is scaled
// below 1 by the number of keys, so that no sum of P V overflows f32 unless O does; scaling by a power of two changes
// no mantissa bit.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE int p_scale_log2(const Job& job) {
  if constexpr (spec.dtype_v != DType::Bf16) return Config<spec, tile>::p_scale_log2;
  return __builtin_clz(job.span.seqlen_k | 1) - 32;
}

// Accumulators of S^T for one wave and tile; the next type is P in the order of the product P V.
template <CdnaSpec spec, CdnaTile tile>
using Scores = Array<Acc, Config<spec, tile>::n_tiles>;
template <CdnaSpec spec, CdnaTile tile>
using PFrags = Array<Frag, Config<spec, tile>::pv_steps>;

// The A operand of a slot, read from LDS. Q K goes block by block of keys: a block of the previous scores has become P
// by the time its accumulators are overwritten. P V goes through all blocks of O for each step of P.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE typename Mma<spec.dtype_qk>::Operand k_operand(const Wave<spec, tile>& wave,
                                                        const typename Config<spec, tile>::KMatrix& k, int slot) {
  using C = Config<spec, tile>;
  const int n = slot / C::slots_per_tile, first = slot % C::slots_per_tile * C::qk_at_once;
  typename Mma<spec.dtype_qk>::Operand x;
#pragma unroll
  for (int c = 0; c < C::qk_at_once; ++c) x[c] = first + c < C::qk_steps ? k.frag(wave.k_lane, n, first + c) : Frag{};
  return x;
}

template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE typename Mma<spec.dtype_v>::Operand v_operand(const Wave<spec, tile>& wave,
                                                       const typename Config<spec, tile>::VMatrix& v, int slot) {
  using C = Config<spec, tile>;
  const int d = slot % C::d_blocks, first = slot / C::d_blocks * C::pv_at_once;
  typename Mma<spec.dtype_v>::Operand x;
#pragma unroll
  for (int c = 0; c < C::pv_at_once; ++c) x[c] = first + c < C::pv_steps ? v.frag(wave.v_lane, d, first + c) : Frag{};
  return x;
}

// A compile-time loop index: which work is placed between two slots must be known before loops are unrolled.
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

// Issues the matrix instructions of one slot, C += A B over the steps from `first` on. After each of them `between`
// issues the vector work that is placed there.
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

// Computes S^T = K Q^T without interleaving.
template <CdnaSpec spec, CdnaTile tile>
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

// Applies soft-cap and bias; afterwards the scores in `s` are natural ones.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void modify(Scores<spec, tile>& s, const CdnaParams& p, const Job& job, const Wave<spec, tile>& wave,
                        int32_t first_key) {
  const ScorePlace place = {job.span.i_batch, job.i_head, min(wave.query, job.span.seqlen_q - 1), job.span.seqlen_q,
                            job.span.seqlen_k};
#pragma unroll
  for (int n = 0; n < Config<spec, tile>::n_tiles; ++n) {
    modify_block<!spec.masks>(s[n], p, place, job.scale, first_key + n * kEdge + acc_row(0, lane_half()));
  }
}

// Hides pairs of a tile that masks as data or a mask as code hide.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void mask_by_data(Scores<spec, tile>& s, const Job& job, const Wave<spec, tile>& wave, int32_t first_key) {
  constexpr int blocks = Config<spec, tile>::n_tiles;
  const MaskedCdnaParams& p = reload_params<MaskedCdnaParams>();
  const int32_t last_query = job.span.seqlen_q - 1, query = min(wave.query, last_query);
  const Range rows = {min(wave.first_query, last_query), min(wave.first_query + kEdge, job.span.seqlen_q)};
  const ShownWords<MaskLanes> masks = {DataMasks{p.masks}};
  const auto shown = masks.template of_query<blocks>(job.span, job.i_head, query, rows, first_key);
  const int32_t first = first_key + acc_row(0, lane_half());
#pragma unroll
  for (int n = 0; n < blocks; ++n) {
    const uint32_t seen = shown.seen[n] >> acc_row(0, lane_half()), full = shown.full[n] >> acc_row(0, lane_half());
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int32_t row = acc_row(i, 0), key = first + n * kEdge + row;
      bool sees = key < job.span.seqlen_k && visible(job.band, query, key) && (seen >> row & 1);
      if constexpr (code::kIsGiven) {
        // No branch around the function: one hid pairs that it shows (clang 22, emulated; cause not found).
        const uint32_t by_function = Functions::of(p.cdna.fwd, job.span, job.i_head).shows({query, key});
        sees &= ((full >> row | by_function) & 1) != 0;
      }
      s[n][i] = sees ? s[n][i] : -infinity();
    }
  }
}

template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void mask(Scores<spec, tile>& s, const Job& job, const Wave<spec, tile>& wave, int32_t first_key) {
  // Opaque values, which keep the compiler from hoisting 16 key indices per block out of the main loop.
  int32_t query = wave.query, first = first_key + acc_row(0, lane_half());
  opaque_in_vgpr(query), opaque_in_vgpr(first);
#pragma unroll
  for (int n = 0; n < Config<spec, tile>::n_tiles; ++n) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int32_t key = first + n * kEdge + acc_row(i, 0);
      const bool seen = key < job.span.seqlen_k && (spec.mask == MaskKind::Full || visible(job.band, query, key));
      s[n][i] = seen ? s[n][i] : -infinity();
    }
  }
}

// Whether the wave's tile needs no mask.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE bool needs_no_mask(const Job& job, const Wave<spec, tile>& wave, int32_t first_key) {
  const Range queries = {wave.first_query, wave.first_query + kEdge}, keys = {first_key, first_key + tile.block_n};
  return keys.end <= job.span.seqlen_k &&
         (spec.mask == MaskKind::Full || block_class(job.band, queries, keys) == BlockClass::Inside);
}

// Computes the maximum of a tile, two elements at a time (v_max3), in two independent chains to hide latency.
template <CdnaSpec spec, CdnaTile tile>
struct RunningMax {
  static constexpr int parts = Config<spec, tile>::n_tiles * 8;
  float opaque_neg_inf, most[2];

  // The maximum starts from a -infinity that the compiler cannot see through: starting from the first element, it
  // would add an instruction to quiet that element's NaN.
  FMHA_DEVICE explicit RunningMax(float opaque_neg_inf)
      : opaque_neg_inf(opaque_neg_inf), most{opaque_neg_inf, opaque_neg_inf} {}

  FMHA_DEVICE void take(const Scores<spec, tile>& s, int part) {
    const Acc& x = s[part / 8];
    const int i = part % 8 * 2;
    float& mine = most[part % 2];
    mine = v_max3_f32(mine, x[i], x[i + 1]);
  }

  // Pins the maxima at the end of a share, so that the work is not moved into later shares.
  FMHA_DEVICE void keep() { opaque_in_vgpr(most[0]), opaque_in_vgpr(most[1]); }

  FMHA_DEVICE float of_both_halves() const {
    return max_of_halves(v_max3_f32(opaque_neg_inf, most[0], most[1]), opaque_neg_inf);
  }
};

template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE float max_of(const Wave<spec, tile>& wave, const Scores<spec, tile>& s) {
  RunningMax<spec, tile> x(wave.opaque_neg_inf);
#pragma unroll
  for (int i = 0; i < x.parts; ++i) x.take(s, i);
  return x.of_both_halves();
}

// Updates the running maximum. Sums and O are rescaled only if it rose for some query of the wave. Tolerating a rise
// of up to 2^8 (lazy rescaling) was tried: the largest P is then rounded instead of exactly 1, and O's error reached
// 1.007 of the contract's bound in one case of 148 (bf16, emulated gfx942).
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void raise_row_max(Wave<spec, tile>& wave, const Job& job, float tile_max) {
  using C = Config<spec, tile>;
  const float scaled_max = spec.modifies ? tile_max : tile_max * job.scale;
  if (v_cmp_ballot(scaled_max > wave.row.row_max) == 0) return;
  const float before = wave.row.row_max;
  wave.row.row_max = v_max_f32(before, scaled_max);
  // A row without visible keys has a maximum of -inf, and -inf - -inf would be NaN.
  const float row_max = finite_or_zero(wave.row.row_max);
  const float correction = exp2_of((before - row_max) * kMaxToLog2<spec>);
  wave.row.row_sum *= correction;
  wave.odd_key_sum *= correction;
  const float base = row_max * kMaxToLog2<spec>;
  wave.subtracted = v_cmp_ballot(abs_of(base) >= kLargestShift) != 0;
  const float scale_of_p = float(p_scale_log2<spec, tile>(job));
  wave.exp2_offset = wave.subtracted ? scale_of_p : scale_of_p - base;
#pragma unroll
  for (int d = 0; d < C::d_blocks; ++d) wave.o[d] *= correction;
}

// For a wave with too large a maximum: scores are scaled and rounded like the maximum, which is then subtracted
// before the exponents are computed. Modified scores were scaled before, and are converted to log2 afterwards.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void subtract_first(Scores<spec, tile>& s, const Wave<spec, tile>& wave, const Job& job) {
  if (!wave.subtracted) return;
  const float row_max = finite_or_zero(wave.row.row_max);
#pragma unroll
  for (int n = 0; n < Config<spec, tile>::n_tiles; ++n) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float scaled = spec.modifies ? s[n][i] : s[n][i] * job.scale;
      opaque_in_vgpr(scaled);  // else one multiply-add again
      s[n][i] = scaled - row_max;
    }
  }
}

// Applies dropout to four consecutive keys.
template <CdnaSpec spec>
FMHA_DEVICE void drop_four(Acc& p_tile, int i, const CdnaParams& params, const Job& job, int32_t query,
                          int32_t first_key) {
  if (!params.drops) return;
  const FwdParams& p = params.fwd;
  const int32_t batch_head = head_of_whole(p, job.span.i_batch, job.i_head);
  const Array<uint32_t, 4> words = dropout_words_of_keys(p, batch_head, query, first_key + acc_row(i, lane_half()));
#pragma unroll
  for (int r = 0; r < kRun; ++r) p_tile[i + r] = words[r] < p.dropout_threshold ? p_tile[i + r] : 0.f;
}

// Converts a tile's scores to P in place, two elements at a time, and packs them into B operands.
template <CdnaSpec spec, CdnaTile tile>
struct Probabilities {
  using C = Config<spec, tile>;
  // Stages of a software pipeline over pairs of elements. After the last pair one more step drains the pipeline.
  enum What { kExp, kExpOfSecond, kProducts, kSums, kPack, kWhats };
  static constexpr int pairs = C::n_tiles * 8, parts = (pairs + 1) * kWhats;
  static constexpr int per_word = Mma<spec.dtype_v>::per_word;
  float scale_log2, base;
  f32x2 sum, exponent;  // of all so far; of the next two elements
  PFrags<spec, tile>& frags;

  FMHA_DEVICE Probabilities(PFrags<spec, tile>& frags, const Scores<spec, tile>& s, const Wave<spec, tile>& wave,
                            const Job& job)
      : frags(frags), scale_log2(spec.modifies ? kLog2E : wave.subtracted ? 1.f : job.scale), base(wave.exp2_offset),
        sum{wave.row.row_sum, wave.odd_key_sum} {
    products(s, 0);
  }

  static constexpr int pair_of(int part) { return part / kWhats; }
  static constexpr What what_of(int part) { return What(part % kWhats); }

  // Two pairs are in flight: the multiply-add runs one pair ahead of the exponential, sums and packing one behind.
  FMHA_DEVICE void make(Scores<spec, tile>& s, int part, const Wave<spec, tile>& wave, const CdnaParams& p,
                        const Job& job, int32_t first_key) {
    const int pair = pair_of(part), i = pair % 8 * 2;
    switch (what_of(part)) {
      case kExp:
      case kExpOfSecond: {
        const int which = part % kWhats;
        if (pair < pairs) s[pair / 8][i + which] = v_exp_f32(exponent[which]);
        break;
      }
      case kProducts:
        if (pair + 1 < pairs) products(s, pair + 1);
        break;
      case kSums:
        if (pair > 0) add(s, pair - 1);
        break;
      default:
        if (pair > 0) pack_two(s, pair - 1, wave, p, job, first_key);
    }
  }

  FMHA_DEVICE void products(const Scores<spec, tile>& s, int pair) {
    const Acc& x = s[pair / 8];
    const int i = pair % 8 * 2;
    if constexpr (C::packs_f32) {
      exponent = v_pk_fma_f32(f32x2{x[i], x[i + 1]}, f32x2{scale_log2, scale_log2}, f32x2{base, base});
      opaque_in_vgpr(exponent);
    } else {
      float first = v_fma_f32(x[i], scale_log2, base), second = v_fma_f32(x[i + 1], scale_log2, base);
      opaque_in_vgpr(first), opaque_in_vgpr(second);
      exponent = f32x2{first, second};
    }
  }

  FMHA_DEVICE void add(const Scores<spec, tile>& s, int pair) {
    const Acc& x = s[pair / 8];
    const int i = pair % 8 * 2;
    if constexpr (C::packs_f32) {
      sum += f32x2{x[i], x[i + 1]};
      opaque_in_vgpr(sum);
    } else {
      float first = sum[0] + x[i], second = sum[1] + x[i + 1];
      opaque_in_vgpr(first), opaque_in_vgpr(second);
      sum = f32x2{first, second};
    }
  }

  // Packs once a 32-bit word is complete; with dropout, once the four keys of a Philox call are.
  FMHA_DEVICE void pack_two(Scores<spec, tile>& s, int pair, const Wave<spec, tile>& wave, const CdnaParams& p,
                            const Job& job, int32_t first_key) {
    Acc& x = s[pair / 8];
    const int done = pair % 8 * 2 + 2;
    if constexpr (spec.dropout) {
      if (done % kRun != 0) return;
      drop_four<spec>(x, done - kRun, p, job, wave.query, first_key + pair / 8 * kEdge);
      pack<kRun>(x, pair / 8, done - kRun);
    } else if (done % per_word == 0) {
      pack<per_word>(x, pair / 8, done - per_word);
    }
  }

  // Stores the row sums, after the last part.
  FMHA_DEVICE void write_sums(Wave<spec, tile>& wave) const { wave.row.row_sum = sum[0], wave.odd_key_sum = sum[1]; }

  template <int num>
  FMHA_DEVICE void pack(const Acc& x, int n, int first) {
#pragma unroll
    for (int i = first; i < first + num; i += per_word) {
      const int word = (n * 16 + i) / per_word;
      uint32_t made = p_word<spec.dtype_v>(x, i, frags[word / 4][word % 4]);
      opaque_in_vgpr(made);
      frags[word / 4][word % 4] = made;
    }
  }
};

// Computes P without interleaving, for the first and the last tile; its sum is added to the row's.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE PFrags<spec, tile> probabilities(Scores<spec, tile>& s, Wave<spec, tile>& wave, const CdnaParams& p,
                                             const Job& job, int32_t first_key) {
  PFrags<spec, tile> frags = {};
  Probabilities<spec, tile> made(frags, s, wave, job);
  for_each<0, made.parts>([&](auto part) __attribute__((always_inline)) {
    made.make(s, part.value, wave, p, job, first_key);
  });
  made.write_sums(wave);
  return frags;
}

// Computes O^T += V^T P^T without interleaving.
template <CdnaSpec spec, CdnaTile tile>
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
