// dBias: a CTA computes blocks of it, each the sum over the sequences and heads that share it, in one order and in
// registers. S and dP are computed again, two products beside the main kernel's five, so that sums over broadcast axes
// need neither atomics nor f32 copies of the bias. Elements that no score used are zeros.
//
// One warp loads, the consumers have 64 keys each, as in the main kernel.
#pragma once
#include <fmha/mma/sm90/transposed_product.cuh>
#include <fmha/sm90/bwd/load.cuh>
#include <fmha/sm90/bwd/pairs.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile>
struct BiasSmem {
  using S = Shape<spec, tile>;
  typename S::KTile k[tile.stages_dbias];
  typename S::VTile v[tile.stages_dbias];
  typename S::QTile q[tile.stages_dbias];
  typename S::DoutTile dout[tile.stages_dbias];
  float lse_log2[tile.stages_dbias][tile.block_m];
  float delta[tile.stages_dbias][tile.block_m];
  Barrier full[tile.stages_dbias];   // the bytes of all of a step
  Barrier empty[tile.stages_dbias];  // one arrival per consumer warp
};

// A block of dBias: it belongs to one batch and head index of the bias, and sums over all sequences and heads that
// share this index.
struct BiasBlock {
  Range batches, heads;
  int32_t q_block, key_block;
  int64_t offset;  // of its batch and head
};
FMHA_DEVICE BiasBlock bias_block(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t index) {
  const int32_t q_blocks = index / schedule.num_key_blocks, shared = q_blocks / schedule.num_q_blocks;
  const int32_t num_heads = p.dbias_per_head ? p.fwd.num_heads_q : 1;
  const int32_t b = shared / num_heads, h = shared - b * num_heads;
  BiasBlock block;
  block.batches = {0, p.fwd.batch};
  if (p.dbias_per_batch) block.batches = {b, b + 1};
  block.heads = {0, p.fwd.num_heads_q};
  if (p.dbias_per_head) block.heads = {h, h + 1};
  block.q_block = q_blocks - shared * schedule.num_q_blocks;
  block.key_block = index - q_blocks * schedule.num_key_blocks;
  block.offset = b * p.dbias.batch + h * p.dbias.head;
  return block;
}

// Loop of one role over all blocks of this CTA: it begins each block, takes a step for each sequence and head that
// contributes to the block, and finishes it.
template <BwdSpec spec, Sm90BwdTile tile, class Role>
FMHA_DEVICE void walk_bias_blocks(const BwdParams& p, const Sm90BwdSchedule& schedule, Role& role) {
  for (int32_t index = blockIdx.x; index < schedule.num_bias_blocks; index += gridDim.x) {
    const BiasBlock block = bias_block(p, schedule, index);
    const int32_t first_query = block.q_block * tile.block_m, first_key = block.key_block * tile.block_n;
    role.begin();
    for (int32_t b = block.batches.begin; b < block.batches.end; ++b) {
      Work work;
      work.span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, b);
      work.band = resolve_band(p.fwd.mask, work.span.seqlen_q, work.span.seqlen_k);
      work.keys = {first_key, min(first_key + tile.block_n, work.span.seqlen_k)};
      const Range queries = {first_query, min(first_query + tile.block_m, work.span.seqlen_q)};
      if (queries.empty() || work.keys.empty()) continue;
      work.uncut = uncut_queries<spec, tile>(work);
      if (block_class(work.band, queries, work.keys) == BlockClass::Skipped) continue;
      for (int32_t h = block.heads.begin; h < block.heads.end; ++h) {
        work.i_head_kv = h / p.fwd.gqa_ratio;
        role.step(work, QueryTile{h, first_query, 0});
      }
    }
    role.finish(block);
  }
}

template <BwdSpec spec, Sm90BwdTile tile>
struct BiasLoader {
  using S = Shape<spec, tile>;
  const BwdParams& p;
  const Maps& maps;
  BiasSmem<spec, tile>& smem;
  Slot<tile.stages_dbias> slot;

  FMHA_DEVICE void begin() const {}
  FMHA_DEVICE void finish(const BiasBlock&) const {}
  FMHA_DEVICE void step(const Work& work, const QueryTile& at) {
    constexpr uint32_t stats_bytes = tile.block_m * sizeof(float);
    constexpr uint32_t bytes =
        S::KTile::tile_bytes + S::VTile::tile_bytes + S::QTile::tile_bytes + S::DoutTile::tile_bytes + 2 * stats_bytes;
    const int32_t s = slot.index, k_batch = k_batch_of<spec>(work.span), q_batch = work.span.storage_batch;
    const int32_t q_row = work.span.q_row + at.first_query, k_row = work.span.k_row + work.keys.begin;
    Barrier& full = smem.full[s];
    ptx::mbarrier_wait_parity(smem.empty[s], slot.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, bytes);
    load_rows(smem.k[s], maps.k, full, k_batch, k_row, work.i_head_kv, ptx::CacheHint::EvictLast);
    load_rows(smem.q[s], maps.q, full, q_batch, q_row, at.i_head, ptx::CacheHint::EvictLast);
    load_rows(smem.v[s], maps.v, full, k_batch, k_row, work.i_head_kv, ptx::CacheHint::EvictLast);
    load_rows(smem.dout[s], maps.dout, full, q_batch, q_row, at.i_head, ptx::CacheHint::EvictLast);
    const int64_t stats = stats_offset(p, work.span, at.i_head, at.first_query);
    ptx::cp_async_bulk(ptx::shared_address(smem.lse_log2[s]), p.lse_log2 + stats, stats_bytes, full);
    ptx::cp_async_bulk(ptx::shared_address(smem.delta[s]), p.delta + stats, stats_bytes, full);
    slot.advance();
  }
};

// Score modifiers on a transposed fragment of a block: `j` and `i` are the thread's first key and query.
template <BwdSpec spec, int n>
FMHA_DEVICE void store_bias(const BwdParams& p, const mma::Accumulator<n>& sums, int64_t offset, int32_t i, int32_t j) {
  const float factor = dropout_factor_of_ds<spec>(p.fwd);
#pragma unroll
  for (int e = 0; e < n / 2; ++e) {
    const int32_t query = i + sums.column(e), key = j + 8 * sums.row(e);
    const bool there = query < p.fwd.seqlen_q && key < p.fwd.seqlen_k;
    const int64_t at = offset + query * p.dbias.row + key * p.dbias.dim;
    if constexpr (spec.dtype_dbias == DType::F32) {
      ptx::st_global_f32_if(static_cast<float*>(p.dbias.data) + at, sums[e] * factor, there);
    } else {
      const uint16_t half = uint16_t(ptx::cvt_rn_x2<spec.dtype_dbias>(sums[e] * factor, 0.f));
      ptx::st_global_u16_if(static_cast<uint16_t*>(p.dbias.data) + at, half, there);
    }
  }
  __syncwarp();
}

template <BwdSpec spec, Sm90BwdTile tile>
struct BiasConsumer {
  using Scores = mma::Accumulator<tile.block_m>;
  static constexpr DType dtype = Shape<spec, tile>::dtype;

  const BwdParams& p;
  BiasSmem<spec, tile>& smem;
  const int32_t index;  // of the warpgroup among the consumers
  const Pairs<spec, tile> pairs;
  Slot<tile.stages_dbias> slot;
  Scores sums;

  FMHA_DEVICE void begin() { sums.clear(); }
  FMHA_DEVICE void step(const Work& work, const QueryTile& at) {
    const int32_t s = slot.index;
    Scores scores, dp;
    const auto biases = pairs.biases(work, at);
    ptx::mbarrier_wait_parity(smem.full[s], slot.phase);
    mma::start_product_abt<dtype, 1>(scores, smem.k[s], index * mma::kRows, smem.q[s]);
    mma::start_product_abt<dtype, 1>(dp, smem.v[s], index * mma::kRows, smem.dout[s]);
    typename Pairs<spec, tile>::Kept kept;
    pairs.decide(kept, work, at);
    ptx::wgmma_wait_group<1>();
    typename Pairs<spec, tile>::Slopes unused;
    Scores probs = pairs.exponents(scores, smem.lse_log2[s], work, at, biases, unused);
    pairs.exponentiate(probs, work, at);
    ptx::wgmma_wait_group<0>();
    pairs.differentiate(dp, probs, smem.delta[s], at, kept);
    ptx::mbarrier_arrive_if(smem.empty[s], threadIdx.x % 32 == 0);
    // A hidden NaN of V or dO may have turned dP's zeros into NaN, so hidden elements are set to 0.
    if (pairs.is_edge(work, at.first_query)) pairs.mask(dp, work, at);
    // Rows of queries beyond the sequence may also hold NaN, so they are set to 0.
    if (work.span.seqlen_q - at.first_query < tile.block_m) {
      const int32_t there = work.span.seqlen_q - at.first_query - mma::fragment_column();
#pragma unroll
      for (int e = 0; e < dp.num_elems; ++e) dp[e] = dp.column(e) < there ? dp[e] : 0.f;
    }
#pragma unroll
    for (int e = 0; e < sums.num_elems; ++e) sums[e] += dp[e];
    slot.advance();
  }

  FMHA_DEVICE void finish(const BiasBlock& block) const {
    store_bias<spec>(p, sums, block.offset, block.q_block * tile.block_m + mma::fragment_column(),
                     block.key_block * tile.block_n + index * mma::kRows + mma::fragment_row());
  }
};

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void dbias(const BwdParams& p, const Maps& maps, const Sm90BwdSchedule& schedule) {
  extern __shared__ __align__(1024) unsigned char raw[];
  BiasSmem<spec, tile>& smem = *reinterpret_cast<BiasSmem<spec, tile>*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < tile.stages_dbias; ++i) {
      ptx::mbarrier_init(smem.full[i], 1);
      ptx::mbarrier_init(smem.empty[i], num_consumer_warps(tile));
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (ptx::uniform(threadIdx.x / mma::kWarpgroup) == 0) {
    ptx::setmaxnreg_dec<tile.load_registers>();
    BiasLoader<spec, tile> loader{p, maps, smem};
    if (threadIdx.x == 0) walk_bias_blocks<spec, tile>(p, schedule, loader);
  } else {
    ptx::setmaxnreg_inc<consume_regs(tile)>();
    const int32_t index = ptx::uniform(threadIdx.x / mma::kWarpgroup) - 1;
    BiasConsumer<spec, tile> consumer{p, smem, index, {p, index, p.fwd.softmax_scale * kLog2E}};
    walk_bias_blocks<spec, tile>(p, schedule, consumer);
  }
}

}  // namespace fmha::sm90::bwd
