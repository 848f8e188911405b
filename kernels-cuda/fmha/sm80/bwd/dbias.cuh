// Computes dBias. A CTA owns a block of queries by a block of keys of one plane of the bias, and sums over the
// sequences and heads that share the plane, in their order. So the order of the sums is fixed, whichever axes are
// broadcast. The products of S and dP are computed a second time for this.
#pragma once
#include <fmha/sm80/bwd/owner.cuh>

namespace fmha::sm80::bwd {

template <BwdSpec spec, Sm80BwdTile tile, class Keys>
FMHA_DEVICE void bias_owner(const BwdParams& p, Smem<spec, tile>& smem, const Keys& masks) {
  using Fragment = typename Owner<spec, tile, Keys>::Fragment;
  const int32_t num_q = ceil_div(p.fwd.seqlen_q, tile.rows), num_k = ceil_div(p.fwd.seqlen_k, tile.columns);
  if (num_q * num_k == 0) return;
  const int32_t plane = blockIdx.x / (num_q * num_k), within = blockIdx.x % (num_q * num_k);
  const int32_t first_row = within / num_k * tile.rows, block = within % num_k;
  const int32_t heads = p.dbias_per_head ? p.fwd.num_heads_q : 1;
  const int32_t plane_batch = plane / heads, plane_head = plane % heads;
  if (plane_batch >= (p.dbias_per_batch ? p.fwd.batch : 1)) return;
  const Range batches = p.dbias_per_batch ? Range{plane_batch, plane_batch + 1} : Range{0, p.fwd.batch};
  const Range all_heads = p.dbias_per_head ? Range{plane_head, plane_head + 1} : Range{0, p.fwd.num_heads_q};
  const Range queries = {first_row, first_row + tile.rows}, keys = {block * tile.columns, (block + 1) * tile.columns};

  Fragment sum;
  sum.clear();
#pragma unroll 1
  for (int32_t b = batches.begin; b < batches.end; ++b) {
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, b);
    if (queries.begin >= span.seqlen_q || keys.begin >= span.seqlen_k) continue;
    const MaskBand band = resolve_band(p.fwd.mask, span.seqlen_q, span.seqlen_k);
    if (spec.fwd.mask != MaskKind::Full && block_class(band, queries, keys) == BlockClass::Skipped) continue;
#pragma unroll 1
    for (int32_t h = all_heads.begin; h < all_heads.end; ++h) {
      const Owner<spec, tile, Keys> owner{p, smem, span, band, h / p.fwd.gqa_ratio, first_row, h, masks};
      owner.load_own();
      owner.load_block(0, block);
      ptx::cp_async_commit_group();
      ptx::cp_async_wait_group<0>();
      __syncthreads();
      owner.add_gradient_of_scores(sum, block, OwnQueries<Fragment>::of(p, span, h, owner.first));
      // Waits until all threads have read the tiles.
      __syncthreads();
    }
  }

  const int32_t row = first_row + threadIdx.x / 32 * mma::kRows + threadIdx.x % 32 / 4;
  const int32_t column = keys.begin + fmha::mma::fragment_column();
  const int64_t at = plane_batch * p.dbias.batch + plane_head * p.dbias.head;
  void* data = const_cast<void*>(static_cast<const void*>(p.dbias.data));
#pragma unroll
  for (int e = 0; e < sum.num_elems; ++e) {
    const int32_t i = row + 8 * Fragment::row(e), j = column + Fragment::column(e);
    if (i < p.fwd.seqlen_q && j < p.fwd.seqlen_k) store_elem<spec.dtype_dbias>(data, at + i * p.dbias.row + j * p.dbias.dim, sum[e]);
  }
}

}  // namespace fmha::sm80::bwd
