// dK and dV of a kv head whose query heads several tiles share (`head_parts`): each tile leaves the sums of its heads
// in memory, and a launch of its own adds them in the order of the parts, so that they have the same bits whoever was
// first.
#pragma once
#include <fmha/sm90/bwd/epilogue.cuh>

namespace fmha::sm90::bwd {

// The numbers of a key: dK, then dV.
template <BwdSpec spec, Sm90BwdTile tile>
constexpr int kHeadSumsRow = 2 * Shape<spec, tile>::dim;

// Those of a sequence's first key, of one part.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE float* head_sums_of(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t i_batch, int32_t i_head_kv,
                                int32_t i_part) {
  const int64_t num_heads = int64_t(p.fwd.batch) * p.fwd.num_heads_kv;
  const int64_t head = i_part * num_heads + int64_t(i_batch) * p.fwd.num_heads_kv + i_head_kv;
  return schedule.head_sums + head * schedule.num_key_blocks * tile.block_n * kHeadSumsRow<spec, tile>;
}

// A CTA to a key block of a kv head; a thread takes eight columns of a key at a time.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void head_sums(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  constexpr int row_elems = kHeadSumsRow<spec, tile>, pieces = row_elems / 8;
  wait_for_launch_before();
  const int32_t head = blockIdx.x / schedule.num_key_blocks, key_block = blockIdx.x - head * schedule.num_key_blocks;
  const int32_t i_batch = head / p.fwd.num_heads_kv, i_head_kv = head - i_batch * p.fwd.num_heads_kv;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const float* first_part = head_sums_of<spec, tile>(p, schedule, i_batch, i_head_kv, 0);
  const int64_t to_next_part = head_sums_of<spec, tile>(p, schedule, i_batch, i_head_kv, 1) - first_part;
  for (int32_t i = threadIdx.x; i < tile.block_n * pieces; i += kRowThreads) {
    const int32_t key = key_block * tile.block_n + i / pieces, piece = i % pieces;
    const bool of_v = piece >= pieces / 2;
    const int32_t column = 8 * (of_v ? piece - pieces / 2 : piece);
    const int32_t dim = of_v ? spec.fwd.head_dim_v : spec.fwd.head_dim_qk;
    if (key >= span.seqlen_k || column >= dim) continue;
    float sums[8] = {};
    for (int32_t part = 0; part < schedule.num_head_parts; ++part) {
      const float* piece_of_part = first_part + part * to_next_part + int64_t(key) * row_elems + 8 * piece;
      const float4* from = reinterpret_cast<const float4*>(piece_of_part);
      const float4 low = from[0], high = from[1];
      const float eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int k = 0; k < 8; ++k) sums[k] += eight[k];
    }
    const View& view = of_v ? p.dv : p.dk;
    const int64_t at = row_offset(view, span.i_batch, int64_t(span.k_row) + key, i_head_kv) + column;
    store_eight<spec.dtype_grad, tile.vector_store>(view.data, at, dim - column, sums);
  }
}

}  // namespace fmha::sm90::bwd
