// The CDNA forward kernel: one workgroup, block_m queries of one head.
#pragma once
#include <fmha/cdna/epilogue.h>
#include <fmha/cdna/main_loop.h>

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
  wave.p_base = C::p_scale_log2;
  wave.other_sum = 0.f;

  const TileWalk walk = TileWalk::of<spec, tile>(job, queries);
  const bool hidden = walk.num_tiles > 0 && MainLoop<spec, tile>(wave, lds, p, job, queries, walk).run();
  epilogue<spec, tile>(wave, p, job);
  if (hidden) {
#pragma nounroll
    for (int32_t n = 0; n < walk.num_tiles; ++n) {
      show_nonfinite<spec, tile>(wave, p, job, queries, walk.tile_at(n) * tile.block_n);
    }
  }
}

}  // namespace fmha::cdna
