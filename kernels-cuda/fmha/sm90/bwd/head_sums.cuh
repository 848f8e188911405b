// dK and dV of a kv head whose queries several tiles share (`head_parts`): each tile leaves the sums of its part in
// memory, and a launch of its own adds them in the order of the parts, so that they have the same bits whoever was
// first.
#pragma once
#include <fmha/sm90/bwd/epilogue.cuh>

namespace fmha::sm90::bwd {

// The numbers of a key, of dV and dK.
template <BwdSpec spec, Sm90BwdTile tile>
constexpr int kHeadSumsRow = 2 * Shape<spec, tile>::dim;

// Those of a sequence's first key, of one part. A key block's are accumulators, consumer after consumer: dV and then dK,
// four numbers of each thread of the warpgroup side by side.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE float* head_sums_of(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t i_batch, int32_t i_head_kv,
                                int32_t i_part) {
  const int64_t num_heads = int64_t(p.fwd.batch) * p.fwd.num_heads_kv;
  const int64_t head = i_part * num_heads + int64_t(i_batch) * p.fwd.num_heads_kv + i_head_kv;
  return schedule.head_sums + head * schedule.num_key_blocks * tile.block_n * kHeadSumsRow<spec, tile>;
}

// A consumer's accumulators to where its share begins, a thread's four numbers at a time.
template <int n>
FMHA_DEVICE void store_head_sums(float* share, const mma::Accumulator<n>& grad, float factor) {
  float* to = share + threadIdx.x % mma::kWarpgroup * 4;
#pragma unroll
  for (int e = 0; e < grad.num_elems; e += 4)
    ptx::st_global_v4_f32(to + e * mma::kWarpgroup, grad[e] * factor, grad[e + 1] * factor, grad[e + 2] * factor,
                          grad[e + 3] * factor);
}

// `kHeadSumsCtas` CTAs to a key block of a kv head. A thread takes eight columns of two keys eight apart, which four
// threads of a warpgroup had. With one CTA to a key block, and sums in the order of rows, most multiprocessors were idle:
// 48 heads over 3, S 384, D 128 took 125 us in all, and 62 so.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void head_sums(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  using S = Shape<spec, tile>;
  constexpr int groups_of_dv = S::dv_columns / 8, groups = groups_of_dv + S::dk_columns / 8, quads = 8, warps = 4;
  constexpr int share = mma::kRows * (S::dv_columns + S::dk_columns), units = S::consumers * warps * groups * quads;
  const int32_t i_block = blockIdx.x / kHeadSumsCtas;
  const int32_t first = (blockIdx.x - i_block * kHeadSumsCtas) * kRowThreads + threadIdx.x;
  const int32_t head = i_block / schedule.num_key_blocks, key_block = i_block - head * schedule.num_key_blocks;
  wait_for_launch_before();
  const int32_t i_batch = head / p.fwd.num_heads_kv, i_head_kv = head - i_batch * p.fwd.num_heads_kv;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const int32_t num_parts = num_head_parts<spec, tile>(schedule, span) * schedule.num_query_parts;
  const int64_t first_key = int64_t(key_block) * tile.block_n;
  const float* first_part =
      head_sums_of<spec, tile>(p, schedule, i_batch, i_head_kv, 0) + first_key * kHeadSumsRow<spec, tile>;
  const int64_t to_next_part =
      int64_t(p.fwd.batch) * p.fwd.num_heads_kv * schedule.num_key_blocks * tile.block_n * kHeadSumsRow<spec, tile>;
  for (int32_t i = first; i < units; i += kHeadSumsCtas * kRowThreads) {
    const int32_t quad = i % quads, group = i / quads % groups, warp = i / (quads * groups) % warps;
    const int32_t consumer = i / (quads * groups * warps);
    const bool of_v = S::has_dv(consumer) || group < groups_of_dv;
    const int32_t column = S::first_column(consumer) + 8 * (group < groups_of_dv ? group : group - groups_of_dv);
    const int32_t dim = of_v ? spec.fwd.head_dim_v : spec.fwd.head_dim_qk;
    const int64_t key = first_key + (splits_dims(tile) ? 0 : consumer * mma::kRows) + warp * 16 + quad;
    if (key >= span.seqlen_k || column >= dim) continue;
    const float* from = first_part + consumer * share + (group * mma::kWarpgroup + warp * 32 + quad * 4) * 4;
    // So that a lone part keeps its zeros' signs, as a tile with all query heads does.
    float sums[2][8];
#pragma unroll
    for (int e = 0; e < 16; ++e) sums[e / 8][e % 8] = -0.f;
    // Two parts' loads are under way at a time.
#pragma unroll 2
    for (int32_t part = 0; part < num_parts; ++part) {
      const float4* fours = reinterpret_cast<const float4*>(from + part * to_next_part);
#pragma unroll
      for (int lane = 0; lane < 4; ++lane) {
        const float4 four = fours[lane];
        sums[0][2 * lane] += four.x;
        sums[0][2 * lane + 1] += four.y;
        sums[1][2 * lane] += four.z;
        sums[1][2 * lane + 1] += four.w;
      }
    }
    const View& view = of_v ? p.dv : p.dk;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (key + 8 * r >= span.seqlen_k) continue;
      const int64_t at = row_offset(view, span.i_batch, span.k_row + key + 8 * r, i_head_kv) + column;
      store_eight<spec.dtype_grad, tile.vector_store>(view.data, at, dim - column, sums[r]);
    }
  }
}

}  // namespace fmha::sm90::bwd
