// The RDNA forward kernel: a workgroup computes block_m queries of one head, a wave 16 of them.
#pragma once
#include <fmha/cdna/span.h>
#include <fmha/isa/sched.h>
#include <fmha/rdna/epilogue.h>

namespace fmha::rdna {

template <CdnaSpec spec>
FMHA_DEVICE Job job_of(const FwdParams& p, int32_t i_batch, int32_t i_head) {
  Job job;
  job.span = cdna::uniform(resolve_seq(p, p.cu_seqlens_q ? QLayout::Packed : QLayout::Batch,
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

// The tiles of keys that some query of a block sees: those of sink columns come first, then those of the band.
struct TileWalk {
  int32_t num_sink_tiles, first_tile, num_tiles;

  template <CdnaSpec spec, RdnaTile tile>
  static FMHA_DEVICE TileWalk of(const Job& job, Range queries) {
    const Range keys = k_range(job.band, queries, job.span.seqlen_k);
    const int32_t first = keys.empty() ? 0 : keys.begin / tile.block_n;
    const int32_t end = keys.empty() ? 0 : ceil_div(keys.end, tile.block_n);
    int32_t sinks = 0;
    if constexpr (spec.sink_columns) sinks = ceil_div(sink_range(job.band, queries, job.span.seqlen_k).end, tile.block_n);
    const int32_t from = max(first, sinks);
    return {sinks, from, sinks + max(end - from, 0)};
  }

  FMHA_DEVICE int32_t tile_at(int32_t n) const { return n < num_sink_tiles ? n : first_tile + n - num_sink_tiles; }
};

// The walk over tiles of keys. Under masks as data it follows a list that an earlier launch has made.
template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE auto walk_of(const Job& job, Range queries, int32_t m_block) {
  if constexpr (spec.masks) {
    const int32_t past_end = ceil_div(job.span.seqlen_k, tile.block_n);
    return ListWalk::of(reload_params<MaskedCdnaParams>().list, job.span.i_batch, job.i_head, m_block, past_end);
  } else {
    return TileWalk::of<spec, tile>(job, queries);
  }
}

// Whether a mask may hide a part of the n-th tile that the loop visits.
template <CdnaSpec spec, RdnaTile tile, class Walk>
FMHA_DEVICE bool is_partly_masked(const Job& job, Range queries, const Walk& walk, int32_t n) {
  if constexpr (code::kIsGiven) return true;
  if constexpr (spec.masks) return walk.is_cut(n);
  const int32_t first_key = walk.tile_at(n) * tile.block_n;
  if constexpr (spec.mask == MaskKind::Full) return false;
  return block_class(job.band, queries, {first_key, first_key + tile.block_n}) != BlockClass::Inside;
}

// Writes the keep bit of every position within the lengths, masked or not, for tests.
template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE void write_keep_mask(const CdnaParams& params, const Job& job, Range queries) {
  const FwdParams& p = params.fwd;
  const int64_t batch_head = int64_t(job.span.i_batch) * p.num_heads_q + job.i_head;
  const int32_t head = head_of_whole(p, job.span.i_batch, job.i_head);
  for (int32_t i = queries.begin; i < queries.end; ++i) {
    uint8_t* const row = p.keep_mask + (batch_head * p.seqlen_q + i) * p.seqlen_k;
    for (int32_t j = thread_idx(); j < job.span.seqlen_k; j += Config<spec, tile>::num_threads) {
      const bool keeps = dropout_keeps(p, head, i, j);
      row[j] = keeps | !params.drops;
    }
  }
}

// Rows from `first` on of one head of a tensor with elements of `size` bytes.
FMHA_DEVICE Rows rows_of(const View& x, int32_t storage_batch, int64_t first, int32_t head, int64_t elem_stride, int size,
                         int32_t num_rows, int32_t num_elems) {
  return {static_cast<const uint8_t*>(x.data) + row_offset(x, storage_batch, first, head) * size, x.row * size,
          elem_stride * size, num_rows, num_elems};
}

template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE void fwd_tile(const CdnaParams& params, typename Config<spec, tile>::Lds& lds, int32_t m_block,
                          int32_t i_head, int32_t i_batch) {
  using C = Config<spec, tile>;
  const FwdParams& p = params.fwd;
  const Job job = job_of<spec>(p, i_batch, i_head);
  const SeqSpan& span = job.span;
  const Range queries = {m_block * tile.block_m, min((m_block + 1) * tile.block_m, span.seqlen_q)};
  if (queries.empty()) return;
  if (spec.dropout && p.keep_mask) write_keep_mask<spec, tile>(params, job, queries);

  Wave<spec, tile> wave;
  const int i_wave = v_readfirstlane_b32(thread_idx() / kWaveSize);
  wave.queries.begin = queries.begin + i_wave * kEdge;
  wave.queries.end = wave.queries.begin + kEdge;
  wave.query = wave.queries.begin + lane_col();
  wave.i_head = i_head;
  const Rows q = rows_of(p.q, span.storage_batch, span.q_row, i_head, 1, C::qk_bytes, span.seqlen_q, params.head_dim_qk);
  load_q<spec, tile>(wave.q, q, wave.query);
#pragma unroll
  for (int d = 0; d < C::d_blocks; ++d) wave.o[d] = Acc{};

  const auto walk = walk_of<spec, tile>(job, queries, m_block);
  uint32_t zeroed = 0;
#pragma nounroll
  for (int32_t n = 0; n < walk.num_tiles; ++n) {
    const int32_t first_key = walk.tile_at(n) * tile.block_n, num_keys = span.seqlen_k - first_key;
    const int32_t first = span.k_row + first_key;
    // Parameters are reloaded for each tile: kept in registers, those of modifiers, dropout and strides would spill
    // SGPRs.
    const CdnaParams& params = reload_params<CdnaParams>();
    const FwdParams& p = params.fwd;
    s_barrier();  // all waves have read the previous tile
    // The batch stride of a packed tensor is 0.
    copy_k<spec, tile>(lds.k, rows_of(p.k, span.i_batch, first, job.i_head_kv, 1, C::qk_bytes, num_keys,
                                      params.head_dim_qk));
    zeroed |= copy_v<spec, tile>(lds.v, rows_of(p.v, span.i_batch, first, job.i_head_kv, p.v.dim, C::v_bytes, num_keys,
                                                params.head_dim_v),
                                 is_partly_masked<spec, tile>(job, queries, walk, n));
    s_barrier();
    bool is_cut = true;
    if constexpr (spec.masks) is_cut = walk.is_cut(n);
    tile_step<spec, tile>(wave, lds, params, job, first_key, AllColumns{}, is_cut);
  }
  // Every wave must know whether any has zeroed values: each has its own word.
  const bool wave_zeroed = v_cmp_ballot(zeroed != 0) != 0;
  if (spec.mask != MaskKind::Full && lane_idx() == 0) lds.zeroed[i_wave] = wave_zeroed;
  const CdnaParams& then = reload_params<CdnaParams>();
  epilogue<spec, tile>(wave, lds, then, job);
  if constexpr (spec.mask != MaskKind::Full) {
    s_barrier();
    bool any = false;
#pragma unroll
    for (int w = 0; w < C::num_waves; ++w) any |= lds.zeroed[w] != 0;
    if (v_readfirstlane_b32(any)) {
#pragma nounroll
      for (int32_t n = 0; n < walk.num_tiles; ++n) {
        if (is_partly_masked<spec, tile>(job, queries, walk, n)) {
          add_back_nonfinite<spec, tile>(wave, then, job, walk.tile_at(n) * tile.block_n);
        }
      }
    }
  }
}

// The tiles of a head are adjacent, its last queries first: of a causal mask they see most keys.
template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE void fwd(const CdnaParams& p) {
  __shared__ typename Config<spec, tile>::Lds lds;
  const int32_t m_blocks = ceil_div(p.fwd.seqlen_q, tile.block_m), at = workgroup_idx();
  const int32_t i_head = at / m_blocks % p.fwd.num_heads_q;
  fwd_tile<spec, tile>(p, lds, m_blocks - 1 - at % m_blocks, i_head, at / m_blocks / p.fwd.num_heads_q);
}

}  // namespace fmha::rdna
