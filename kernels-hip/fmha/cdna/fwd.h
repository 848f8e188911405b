// The CDNA forward kernel: one workgroup, block_m queries of one head.
//
//   prologue   Q to registers; K0, V0, K1 to LDS; S0
//   steady n   loads of K(n+2), V(n+1) are issued
//              S(n+1) = K(n+1) Q      with   P(n) = exp2(S(n) - max)
//              O += V(n) P(n)         with   max S(n+1); K(n+2), V(n+1) to LDS
//              barrier
//   drain      P and O of the last tile; O / sum, LSE
//
// In each line the matrix unit has the left side and the vector unit the right one.
#pragma once
#include <fmha/cdna/epilogue.h>
#include <fmha/cdna/load.h>
#include <fmha/cdna/nonfinite.h>
#include <fmha/isa/sync.h>

namespace fmha::cdna {

// Hardware deals workgroups to dies in turn. Neighbours in a head share K and V, so each die gets a
// run of adjacent ones, and with them its own L2 the head's keys.
template <CdnaTile tile>
FMHA_DEVICE int32_t die_local_order(int32_t i_workgroup, int32_t num_workgroups) {
  if constexpr (tile.num_xcds == 1) return i_workgroup;
  const int32_t each = num_workgroups / tile.num_xcds, spare = num_workgroups % tile.num_xcds;
  const int32_t die = i_workgroup % tile.num_xcds;
  return die * each + min(die, spare) + i_workgroup / tile.num_xcds;
}

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

FMHA_DEVICE SeqSpan uniform(SeqSpan span) {
  return {v_readfirstlane_b32(span.i_batch), v_readfirstlane_b32(span.storage_batch),
          v_readfirstlane_b32(span.q_row),   v_readfirstlane_b32(span.seqlen_q),
          v_readfirstlane_b32(span.k_row),   v_readfirstlane_b32(span.seqlen_k)};
}

template <FwdSpec spec>
FMHA_DEVICE Job job_of(const FwdParams& p, int32_t i_batch, int32_t i_head) {
  Job job;
  job.span = uniform(resolve_seq(p, spec.seq, i_batch));
  job.i_head = i_head;
  job.i_head_kv = i_head / p.gqa_ratio;
  job.band = resolve_band(p.mask, job.span.seqlen_q, job.span.seqlen_k);
  float scale = p.softmax_scale;
  if constexpr (is_fp8(spec.dtype_qk)) {
    scale *= scalar_of(p.descale_q, i_batch, job.i_head_kv, 1.f) * scalar_of(p.descale_k, i_batch, job.i_head_kv, 1.f);
  }
  job.modifier = score_modifier<spec>(p, job.span, i_head, scale);
  job.scale_log2 = scale * kLog2E;
  return job;
}

// -x of each element; FNUZ has no -0, and the code that would be it is NaN.
template <DType dtype>
FMHA_DEVICE uint32_t negated(uint32_t word) {
  if constexpr (dtype == DType::E4m3Fnuz || dtype == DType::E5m2Fnuz) {
    const uint32_t magnitudes = word & 0x7f7f7f7f;
    const uint32_t not_zero = (magnitudes + 0x7f7f7f7f) & 0x80808080;
    return word ^ not_zero;
  } else {
    return word ^ (is_fp8(dtype) ? 0x80808080 : 0x80008000);
  }
}

// The maximum is taken over raw scores, so their scale must not turn them round: its sign goes into Q,
// and a scale of 0 is a Q of 0.
template <FwdSpec spec, int steps>
FMHA_DEVICE void move_sign_to_q(Job& job, Array<Frag, steps>& q) {
  if (modifies_score(spec) || job.scale_log2 > 0.f) return;
  const bool is_zero = job.scale_log2 == 0.f;
#pragma unroll
  for (int c = 0; c < steps; ++c) {
#pragma unroll
    for (int w = 0; w < 4; ++w) q[c][w] = is_zero ? 0 : negated<spec.dtype_qk>(q[c][w]);
  }
  job.scale_log2 = is_zero ? 1.f : -job.scale_log2;
}

template <FwdSpec spec>
FMHA_DEVICE Rows rows_of(const View& x, int64_t first_row, const SeqSpan& span, int32_t head, int32_t num_rows,
                         int32_t row_bytes, int32_t elem_bytes) {
  const int64_t first = row_offset(x, span.storage_batch, first_row, head);
  return {static_cast<const uint8_t*>(x.data) + first * elem_bytes, x.row * elem_bytes, num_rows, row_bytes};
}

template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE void issue_k(KLoad<spec, tile>& k, const FwdParams& p, const Job& job, int32_t first_key) {
  using C = Config<spec, tile>;
  k.issue(rows_of<spec>(p.k, int64_t(job.span.k_row) + first_key, job.span, job.i_head_kv,
                        job.span.seqlen_k - first_key, C::qk_row_bytes, C::qk_bytes));
}

template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE void issue_v(VLoad<spec, tile>& v, const FwdParams& p, const Job& job, int32_t first_key) {
  using C = Config<spec, tile>;
  const int32_t num_keys = job.span.seqlen_k - first_key;
  Rows values = rows_of<spec>(p.v, int64_t(job.span.k_row) + first_key, job.span, job.i_head_kv, num_keys,
                              C::v_row_bytes, C::v_bytes);
  if constexpr (spec.v_layout == VLayout::ColMajor) {
    values.stride_bytes = p.v.dim * C::v_bytes;
    values.num_rows = spec.head_dim_v;
    values.row_bytes = min(num_keys, tile.block_n) * C::v_bytes;
  }
  v.issue(values);
}

// For tests: every position inside the lengths, seen or not.
template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE void write_keep_mask(const FwdParams& p, const Job& job, Range queries) {
  const int32_t batch_head = job.span.i_batch * p.num_heads_q + job.i_head;
  const int32_t end = min(queries.end, job.span.seqlen_q);
  for (int32_t i = queries.begin; i < end; ++i) {
    uint8_t* row = p.keep_mask + (int64_t(batch_head) * p.seqlen_q + i) * p.seqlen_k;
    for (int32_t j = thread_idx(); j < job.span.seqlen_k; j += Config<spec, tile>::num_threads) {
      row[j] = !spec.dropout || dropout_keeps(p, batch_head, i, j);
    }
  }
}

// All tiles of keys, for one wave. Every wave of the workgroup walks alike: barriers are inside.
template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE bool main_loop(Wave<spec, tile>& wave, typename Config<spec, tile>::Lds& lds, const FwdParams& p,
                           const Job& job, Range queries, const TileWalk& walk) {
  auto first_key = [&](int32_t n) __attribute__((always_inline)) { return walk.tile_at(n) * tile.block_n; };
  const int32_t last = walk.num_tiles - 1;

  KLoad<spec, tile> k;
  VLoad<spec, tile> v;
  {
    KLoad<spec, tile> k1;
    issue_k(k, p, job, first_key(0));
    issue_v(v, p, job, first_key(0));
    issue_k(k1, p, job, first_key(1));  // beyond the last tile nobody reads it
    k.store(lds.stage[0].k);
    v.store(lds.stage[0].v);
    k1.store(lds.stage[1].k);
  }
  s_barrier();
  bool hidden = hide_nonfinite<spec, tile>(lds.stage[0].v, job, queries, first_key(0));
  Scores<spec, tile> s = scores<spec, tile>(wave, lds.stage[0].k);
  modify_and_mask<spec, tile>(s, job, wave, first_key(0));
  raise_row_max<spec, tile>(wave, job, max_of(s));
  s_barrier();  // the first step overwrites K0, which all have read now

  for (int32_t n = 0; n < last; ++n) {
    auto& now = lds.stage[n % 2];
    auto& next = lds.stage[(n + 1) % 2];
    issue_k(k, p, job, first_key(n + 2));
    issue_v(v, p, job, first_key(n + 1));
    Scores<spec, tile> s_next = scores<spec, tile>(wave, next.k);
    const PFrags<spec, tile> p_frags = probabilities<spec, tile>(s, wave, p, job, first_key(n));
    modify_and_mask<spec, tile>(s_next, job, wave, first_key(n + 1));
    weighted_values<spec, tile>(wave, p_frags, now.v);
    const float next_max = max_of(s_next);
    k.store(now.k);
    v.store(next.v);
    raise_row_max<spec, tile>(wave, job, next_max);
    s = s_next;
    s_barrier();
    hidden |= hide_nonfinite<spec, tile>(next.v, job, queries, first_key(n + 1));
  }

  const PFrags<spec, tile> p_frags = probabilities<spec, tile>(s, wave, p, job, first_key(last));
  weighted_values<spec, tile>(wave, p_frags, lds.stage[last % 2].v);
  return hidden;
}

template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE void fwd(const FwdParams& p) {
  using C = Config<spec, tile>;
  __shared__ typename C::Lds lds;

  const int32_t m_blocks = ceil_div(p.seqlen_q, tile.block_m);
  const int32_t num_workgroups = m_blocks * p.num_heads_q * p.batch;
  const int32_t at = die_local_order<tile>(workgroup_idx(), num_workgroups);
  // The last queries of a causal mask see most keys: longest work first.
  const int32_t m_block = m_blocks - 1 - at % m_blocks;
  const int32_t i_head = at / m_blocks % p.num_heads_q;
  Job job = job_of<spec>(p, at / m_blocks / p.num_heads_q, i_head);

  const Range queries = {m_block * tile.block_m, min((m_block + 1) * tile.block_m, job.span.seqlen_q)};
  if (queries.empty()) return;
  if constexpr (spec.write_keep_mask) write_keep_mask<spec, tile>(p, job, queries);

  Wave<spec, tile> wave;
  const int32_t i_wave = v_readfirstlane_b32(thread_idx() / kWaveSize);
  wave.first_query = queries.begin + i_wave * kEdge;
  wave.query = wave.first_query + lane_col();
  load_q<spec, tile>(wave.q,
                     rows_of<spec>(p.q, int64_t(job.span.q_row) + queries.begin, job.span, i_head,
                                   queries.end - queries.begin, C::qk_row_bytes, C::qk_bytes),
                     wave.query - queries.begin);
  move_sign_to_q<spec>(job, wave.q);
#pragma unroll
  for (int d = 0; d < C::d_blocks; ++d) wave.o[d] = Acc{};

  wave.row = OnlineRow{};

  const TileWalk walk = TileWalk::of<spec, tile>(job, queries);
  const bool hidden = walk.num_tiles > 0 && main_loop<spec, tile>(wave, lds, p, job, queries, walk);
  epilogue<spec, tile>(wave, p, job);
  if (hidden) {
#pragma nounroll
    for (int32_t n = 0; n < walk.num_tiles; ++n) {
      show_nonfinite<spec, tile>(wave, p, job, queries, walk.tile_at(n) * tile.block_n);
    }
  }
}

}  // namespace fmha::cdna
