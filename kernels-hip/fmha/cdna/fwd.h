// The CDNA forward kernel: a workgroup computes block_m queries of one head at a time.
#pragma once
#include <fmha/cdna/epilogue.h>
#include <fmha/cdna/main_loop.h>
#include <fmha/cdna/order.h>
#include <fmha/cdna/simple_loop.h>
#include <fmha/cdna/span.h>

namespace fmha::cdna {

template <CdnaSpec spec>
FMHA_DEVICE Job job_of(const FwdParams& p, int32_t i_batch, int32_t i_head) {
  Job job;
  job.span = uniform(resolve_seq(p, p.cu_seqlens_q ? QLayout::Packed : QLayout::Batch,
                                 p.cu_seqlens_k ? KvKind::Packed : KvKind::Strided, i_batch));
  job.i_head = i_head;
  job.i_head_kv = i_head / p.gqa_ratio;
  job.band = resolve_band(p.mask, job.span.seqlen_q, job.span.seqlen_k);
  float scale = p.softmax_scale;
  if constexpr (is_fp8(spec.dtype_qk)) {
    scale *= scalar_of(p.descale_q, i_batch, job.i_head_kv, 1.f) * scalar_of(p.descale_k, i_batch, job.i_head_kv, 1.f);
  }
  job.scale = spec.modifies ? scale : scale * kLog2E;
  return job;
}

// Negates each element; FNUZ has no -0, whose code is NaN, so 0 stays.
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

// The maximum is taken over unscaled scores, so the scale must not be negative: its sign is moved into Q. A scale of 0
// becomes Q = 0 with scale 1.
template <CdnaSpec spec, int steps>
FMHA_DEVICE void move_sign_to_q(Job& job, Array<Frag, steps>& q) {
  if (spec.modifies || job.scale > 0.f) return;
  const bool is_zero = job.scale == 0.f;
#pragma unroll
  for (int c = 0; c < steps; ++c) {
#pragma unroll
    for (int w = 0; w < 4; ++w) q[c][w] = is_zero ? 0 : negated<spec.dtype_qk>(q[c][w]);
  }
  job.scale = is_zero ? 1.f : -job.scale;
}

// Writes the keep mask for tests: the keep bit of every position within the lengths, masked or not.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void write_keep_mask(const CdnaParams& params, const Job& job, Range queries) {
  const FwdParams& p = params.fwd;
  const int64_t batch_head = int64_t(job.span.i_batch) * p.num_heads_q + job.i_head;
  const int32_t head = head_of_whole(p, job.span.i_batch, job.i_head);
  const int32_t end = min(queries.end, job.span.seqlen_q);
  for (int32_t i = queries.begin; i < end; ++i) {
    uint8_t* row = p.keep_mask + (batch_head * p.seqlen_q + i) * p.seqlen_k;
    for (int32_t j = thread_idx(); j < job.span.seqlen_k; j += Config<spec, tile>::num_threads) {
      const bool keeps = dropout_keeps(p, head, i, j);
      row[j] = keeps | !params.drops;
    }
  }
}

template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE WalkOf<spec> walk_of(const Job& job, Range queries, int32_t m_block) {
  if constexpr (spec.masks) {
    const int32_t past_end = ceil_div(job.span.seqlen_k, tile.block_n);
    return ListWalk::of(reload_params<MaskedCdnaParams>().list, job.span.i_batch, job.i_head, m_block, past_end);
  } else {
    return TileWalk::of<spec, tile>(job, queries);
  }
}

template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void fwd_tile(const CdnaParams& p, typename Config<spec, tile>::Lds& lds, int32_t m_block, int32_t i_head,
                          int32_t i_batch) {
  using C = Config<spec, tile>;
  Job job = job_of<spec>(p.fwd, i_batch, i_head);
  const Range queries = {m_block * tile.block_m, min((m_block + 1) * tile.block_m, job.span.seqlen_q)};
  if (queries.empty()) return;
  if (spec.dropout && p.fwd.keep_mask) write_keep_mask<spec, tile>(p, job, queries);

  Wave<spec, tile> wave;
  const int32_t thread = opaque_thread_idx();
  wave.first_query = queries.begin + v_readfirstlane_b32(thread / kWaveSize) * kEdge;
  wave.query = wave.first_query + lane_col(thread);
  const Rows q_rows = rows_of(p.fwd.q, int64_t(job.span.q_row) + queries.begin, job.span, i_head,
                              queries.end - queries.begin, p.head_dim_qk * C::qk_bytes, C::qk_bytes);
  if constexpr (C::by_element) load_q_by_element<spec, tile>(wave, lds, q_rows);
  else load_q<spec, tile>(wave.q, q_rows, wave.query - queries.begin);
  move_sign_to_q<spec>(job, wave.q);
#pragma unroll
  for (int d = 0; d < C::d_blocks; ++d) wave.o[d] = Acc{};

  wave.row = OnlineRow{};
  wave.exp2_offset = float(p_scale_log2<spec, tile>(job));
  wave.subtracted = false;
  wave.odd_key_sum = 0.f;

  const auto walk = walk_of<spec, tile>(job, queries, m_block);
  bool hidden = false;
  if (walk.num_tiles > 0) {
    // Waits until all waves have read the last V of the previous tile, so that LDS is free. (The simple loop starts
    // each step with a barrier.)
    if constexpr (tile.order == TileOrder::Static && !C::is_simple) s_barrier();
    using Loop = typename Choose<C::is_simple, SimpleLoop<spec, tile>, MainLoop<spec, tile>>::type;
    hidden = Loop(wave, lds, p, job, queries, walk).run();
  }
  // Parameters are reloaded and values recomputed here: kept across the loop, they would fill scalar registers.
  const CdnaParams& then = reload_params<CdnaParams>();
  job = job_of<spec>(then.fwd, i_batch, i_head);
  epilogue<spec, tile>(wave, lds, then, job);
  if (hidden) {
#pragma nounroll
    for (int32_t n = 0; n < walk.num_tiles; ++n) {
      if (!is_partly_masked<spec, tile>(job, queries, walk, n)) continue;
      add_back_nonfinite<spec, tile>(wave, then, job, walk.tile_at(n) * tile.block_n);
    }
  }
}

template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void fwd(const CdnaParams& params) {
  __shared__ typename Config<spec, tile>::Lds lds;
  const int32_t m_blocks = ceil_div(params.fwd.seqlen_q, tile.block_m);
  const auto compute = [&](const CdnaParams& p, int32_t at) __attribute__((always_inline)) {
    const int32_t m_blocks = ceil_div(p.fwd.seqlen_q, tile.block_m);
    const int32_t i_head = at / m_blocks % p.fwd.num_heads_q;
    fwd_tile<spec, tile>(p, lds, m_blocks - 1 - at % m_blocks, i_head, at / m_blocks / p.fwd.num_heads_q);
  };
  const auto tiles = Tiles<tile>::of(m_blocks * params.fwd.num_heads_q * params.fwd.batch);
  if constexpr (tile.order == TileOrder::Single) compute(params, tiles.at);
  else tiles.for_each([&](int32_t at) __attribute__((always_inline)) {
    // Parameters are reloaded for each tile: kept across tiles, they would fill the scalar registers.
    compute(reload_params<CdnaParams>(), at);
  });
}

}  // namespace fmha::cdna
