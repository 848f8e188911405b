// Backward on mma.sync: a CTA sums the gradients of its own rows over the blocks of the other side (config.cuh).
#pragma once
#include <fmha/sm80/bwd/captured.cuh>
#include <fmha/sm80/bwd/dbias.cuh>
#include <fmha/sm80/bwd/owner.cuh>
#include <fmha/sm80/bwd/store.cuh>

namespace fmha::sm80::bwd {

// Computes dQ of a block of queries of one head. The grid has a CTA for each block and head: blocks of queries with the
// most keys first, and for each block all heads.
template <BwdSpec spec, Sm80BwdTile tile, class Keys>
FMHA_DEVICE void query_owner(const BwdParams& p, Smem<spec, tile>& smem, const Keys& masks) {
  const int32_t heads = p.fwd.batch * p.fwd.num_heads_q, num_blocks = ceil_div(p.fwd.seqlen_q, tile.rows);
  if (int32_t(blockIdx.x) >= heads * num_blocks) return;
  const int32_t at = blockIdx.x / heads, head = blockIdx.x % heads;
  const int32_t i_batch = head / p.fwd.num_heads_q, i_head = head % p.fwd.num_heads_q;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const int32_t first_row = (spec.fwd.mask == MaskKind::Full ? at : num_blocks - 1 - at) * tile.rows;
  if (first_row >= span.seqlen_q) return;
  const MaskBand band = resolve_band(p.fwd.mask, span.seqlen_q, span.seqlen_k);
  const Range queries = {first_row, min(first_row + tile.rows, span.seqlen_q)};
  const Range sinks = spec.fwd.sink_columns ? sink_range(band, queries, span.seqlen_k) : Range{0, 0};
  const Blocks blocks = blocks_of(k_range(band, queries, span.seqlen_k), sinks, tile.columns);
  Owner<spec, tile, Keys> owner{p, smem, span, band, i_head / p.fwd.gqa_ratio, first_row, i_head, masks};
  owner.dscore[0].clear();

  const auto own = OwnQueries<typename Owner<spec, tile, Keys>::Fragment>::of(p, span, i_head, owner.first);
  owner.walk(
      blocks.count(), [&](int32_t slot, int32_t i) { owner.load_block(slot, blocks.at(i)); },
      [&](int32_t slot, int32_t i) { owner.add(slot, blocks.at(i), own); });

  const uint32_t found = store_gradient<spec, tile, spec.fwd.head_dim_qk>(
      p.dq, owner.dscore[0], p.fwd.softmax_scale, [&](int32_t row) { return owner.row_of_query(p.dq, owner.first + row); },
      [&](int32_t row) { return owner.first + row < span.seqlen_q; });
  if constexpr (hides_pairs(spec.fwd)) {
    for_each_found(found, [&](int32_t row) { bwd_query_row<spec, simt::Warp>(p, span, i_head, owner.first + row, masks); });
  }
}

// Computes dK and dV of a block of keys of one kv head, over all its query heads. The grid has the first blocks of keys
// first, since a causal mask shows them to most queries.
template <BwdSpec spec, Sm80BwdTile tile, class Keys>
FMHA_DEVICE void key_owner(const BwdParams& p, Smem<spec, tile>& smem, const Keys& masks) {
  const int32_t heads = p.fwd.batch * p.fwd.num_heads_kv;
  if (int32_t(blockIdx.x) >= heads * ceil_div(p.fwd.seqlen_k, tile.rows)) return;
  const int32_t head = blockIdx.x % heads;
  const int32_t i_batch = head / p.fwd.num_heads_kv, i_head_kv = head % p.fwd.num_heads_kv;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const int32_t first_row = blockIdx.x / heads * tile.rows;
  if (first_row >= span.seqlen_k) return;
  const MaskBand band = resolve_band(p.fwd.mask, span.seqlen_q, span.seqlen_k);
  const Range keys = {first_row, min(first_row + tile.rows, span.seqlen_k)};
  const Blocks blocks = blocks_of(query_range(band, keys, span.seqlen_q), {0, 0}, tile.columns);
  const int32_t first_head = i_head_kv * p.fwd.gqa_ratio;
  Owner<spec, tile, Keys> owner{p, smem, span, band, i_head_kv, first_row, first_head, masks};
  owner.dscore[0].clear();
  owner.dvalue[0].clear();

  using Fragment = typename Owner<spec, tile, Keys>::Fragment;
  const int32_t num = blocks.count();
  owner.walk(
      num * p.fwd.gqa_ratio,
      [&](int32_t slot, int32_t i) {
        owner.i_head = first_head + i / num;
        owner.load_block(slot, blocks.at(i % num));
      },
      [&](int32_t slot, int32_t i) {
        owner.i_head = first_head + i / num;
        owner.add(slot, blocks.at(i % num), WalkedQueries<Fragment>{smem.stats[slot]});
      });

  const auto is_there = [&](int32_t row) { return owner.first + row < span.seqlen_k; };
  uint32_t found = 0;
  if constexpr (sums_dk(tile)) {
    found |= store_gradient<spec, tile, spec.fwd.head_dim_qk>(
        p.dk, owner.dscore[0], p.fwd.softmax_scale, [&](int32_t row) { return owner.row_of_key(p.dk, owner.first + row); }, is_there);
  }
  if constexpr (sums_dv(tile)) {
    found |= store_gradient<spec, tile, spec.fwd.head_dim_v>(
        p.dv, owner.dvalue[0], 1.f, [&](int32_t row) { return owner.row_of_key(p.dv, owner.first + row); }, is_there);
  }
  if constexpr (hides_pairs(spec.fwd)) {
    for_each_found(found, [&](int32_t row) {
      bwd_key_row<spec, simt::Warp>(p, span, i_head_kv, owner.first + row, AllQueries{}, masks);
    });
  }
}

template <BwdSpec spec, Sm80BwdTile tile, class Keys = EveryKey>
FMHA_DEVICE void main(const BwdParams& p, const Keys& masks = {}) {
  static_assert(spec.fwd.dtype_qk == spec.fwd.dtype_v && size_bytes(spec.fwd.dtype_qk) == 2, "sm80: one 16-bit type");
  static_assert(tile.rows == mma::kRows * tile.warps, "sm80: a warp has 16 rows");
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<spec, tile>& smem = *reinterpret_cast<Smem<spec, tile>*>(raw);
  if constexpr (tile.sums == BwdSums::DBias) {
    bias_owner<spec, tile>(p, smem, masks);
  } else if constexpr (tile.sums == BwdSums::Captured) {
    captured_owner<spec, tile>(p, smem, masks);
  } else if constexpr (owns_queries(tile)) {
    query_owner<spec, tile>(p, smem, masks);
  } else {
    key_owner<spec, tile>(p, smem, masks);
  }
}

// Computes dSink of a head by one CTA. Each thread sums over every `threads`-th query of all sequences; then the
// threads' sums are added in the threads' order, so that repeated runs give equal bits.
template <BwdSpec spec>
FMHA_DEVICE void dsink(const BwdParams& p) {
  __shared__ float sums[32];
  const int32_t i_head = blockIdx.x, warps = blockDim.x / 32;
  const float sink = scalar_of(p.fwd.sink, 0, i_head, -infinity());
  float sum = 0.f;
  for (int32_t b = 0; b < p.fwd.batch; ++b) {
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, b);
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < span.seqlen_q; i += blockDim.x) sum += sink_term(p, stats_offset(p, span, i_head, i), sink);
  }
  sum = lane_sum<simt::Warp>(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int32_t warp = 1; warp < warps; ++warp) sum += sums[warp];
  p.dsink[i_head] = sum;
}

}  // namespace fmha::sm80::bwd
