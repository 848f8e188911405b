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
};

// S^T of one wave and tile; P in the order in which P V takes it.
template <FwdSpec spec, CdnaTile tile>
using Scores = Array<Acc, Config<spec, tile>::n_tiles>;
template <FwdSpec spec, CdnaTile tile>
using PFrags = Array<Frag, Config<spec, tile>::pv_steps>;

template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE Scores<spec, tile> scores(const Wave<spec, tile>& wave, const typename Config<spec, tile>::KMatrix& k) {
  using C = Config<spec, tile>;
  Scores<spec, tile> s;
#pragma unroll
  for (int n = 0; n < C::n_tiles; ++n) s[n] = Acc{};
  // Tiles inside steps: a product does not wait for the one before it.
#pragma unroll
  for (int c = 0; c + 1 < C::qk_steps; c += 2) {
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) {
      s[n] = mma_two_steps<spec.dtype_qk>(k.frag(n, c), wave.q[c], k.frag(n, c + 1), wave.q[c + 1], s[n]);
    }
  }
  if constexpr (C::qk_steps % 2 == 1) {
    constexpr int c = C::qk_steps - 1;
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) s[n] = mma_step<spec.dtype_qk>(k.frag(n, c), wave.q[c], s[n]);
  }
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

template <int n_tiles>
FMHA_DEVICE float max_of(const Array<Acc, n_tiles>& s) {
  float most = s[0][0];
#pragma unroll
  for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
    for (int i = 0; i < 16; ++i) most = v_max_f32(most, s[n][i]);
  }
  return v_max_f32(most, other_half(most));
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

template <FwdSpec spec>
FMHA_DEVICE void drop(Acc& p_tile, const FwdParams& p, const Job& job, int32_t query, int32_t first_key) {
  const int32_t batch_head = job.span.i_batch * p.num_heads_q + job.i_head;
#pragma unroll
  for (int i = 0; i < 16; i += kRun) {
    // A run of an accumulator's rows is one call of the generator.
    const Array<uint32_t, 4> words = dropout_words(p, batch_head, query, (first_key + acc_row(i, lane_half())) / kRun);
#pragma unroll
    for (int r = 0; r < kRun; ++r) p_tile[i + r] = words[r] < p.dropout_threshold ? p_tile[i + r] : 0.f;
  }
}

// P in fragments, and its sum into the row's.
template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE PFrags<spec, tile> probabilities(const Scores<spec, tile>& s, Wave<spec, tile>& wave, const FwdParams& p,
                                             const Job& job, int32_t first_key) {
  using C = Config<spec, tile>;
  PFrags<spec, tile> p_frags;
  const float scale_log2 = modifies_score(spec) ? 1.f : job.scale_log2;
  const float base = C::p_scale_log2 - finite_or_zero(wave.row.row_max);
  f32x2 sum = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < C::n_tiles; ++n) {
    Acc p_tile;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const f32x2 exponent = v_pk_fma_f32(f32x2{s[n][i], s[n][i + 1]}, f32x2{scale_log2, scale_log2}, f32x2{base, base});
      const f32x2 two = {v_exp_f32(exponent[0]), v_exp_f32(exponent[1])};
      sum += two;
      p_tile[i] = two[0], p_tile[i + 1] = two[1];
    }
    if constexpr (spec.dropout) drop<spec>(p_tile, p, job, wave.query, first_key + n * kEdge);
#pragma unroll
    for (int c = 0; c < C::pv_steps_per_tile; ++c) {
      p_frags[n * C::pv_steps_per_tile + c] = p_frag<spec.dtype_v>(p_tile, c * (16 / C::pv_steps_per_tile));
    }
  }
  wave.row.row_sum += sum[0] + sum[1];
  return p_frags;
}

template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE void weighted_values(Wave<spec, tile>& wave, const PFrags<spec, tile>& p_frags,
                                 const typename Config<spec, tile>::VMatrix& v) {
  using C = Config<spec, tile>;
#pragma unroll
  for (int c = 0; c + 1 < C::pv_steps; c += 2) {
#pragma unroll
    for (int d = 0; d < C::d_blocks; ++d) {
      wave.o[d] = mma_two_steps<spec.dtype_v>(v.frag(d, c), p_frags[c], v.frag(d, c + 1), p_frags[c + 1], wave.o[d]);
    }
  }
  if constexpr (C::pv_steps % 2 == 1) {
    constexpr int c = C::pv_steps - 1;
#pragma unroll
    for (int d = 0; d < C::d_blocks; ++d) wave.o[d] = mma_step<spec.dtype_v>(v.frag(d, c), p_frags[c], wave.o[d]);
  }
}

}  // namespace fmha::cdna
