// Gradients of captured tensors: a CTA owns a block of queries of a head, walks its keys, and adds to sums in memory
// what each pair adds to the elements that its score reads. It computes the products of S and dP a second time for
// this.
//
// A thread keeps the sum of the element that it added to last in a register. If a score reads only one element per
// head, a warp thus adds to memory once.
#pragma once
#include <fmha/sm80/bwd/owner.cuh>

namespace fmha::sm80::bwd {

// A thread's sums that it has not added to memory yet, one for each tensor element that the score reads.
struct CapturedSums {
  static constexpr int32_t reads = code::kNumReads > 0 ? code::kNumReads : 1;
  float* sums;
  int64_t element[reads];
  float sum[reads];

  FMHA_DEVICE explicit CapturedSums(float* to) : sums(to) {
#pragma unroll
    for (int32_t n = 0; n < reads; ++n) {
      element[n] = -1;
      sum[n] = 0.f;
    }
  }
  FMHA_DEVICE void add(int32_t n, int64_t at, float gradient) {
    if (at != element[n]) {
      if (sum[n] != 0.f) ptx::red_global_add_f32(sums + element[n], sum[n]);
      element[n] = at;
      sum[n] = 0.f;
    }
    sum[n] += gradient;
  }
  // Adds the remaining sums to memory. All lanes of the warp call it together.
  FMHA_DEVICE void finish() {
#pragma unroll
    for (int32_t n = 0; n < code::kNumReads; ++n) {
      const int64_t first = __shfl_sync(ptx::kAllLanes, element[n], 0);
      if (__all_sync(ptx::kAllLanes, element[n] == first)) {
        sum[n] = lane_sum<simt::Warp>(sum[n]);
        if (threadIdx.x % 32 == 0 && sum[n] != 0.f) ptx::red_global_add_f32(sums + element[n], sum[n]);
      } else if (sum[n] != 0.f) {
        ptx::red_global_add_f32(sums + element[n], sum[n]);
      }
    }
  }
};

template <BwdSpec spec, Sm80BwdTile tile, class Keys>
FMHA_DEVICE void captured_owner(const BwdParams& p, Smem<spec, tile>& smem, const Keys& masks) {
  using Fragment = typename Owner<spec, tile, Keys>::Fragment;
  const int32_t heads = p.fwd.batch * p.fwd.num_heads_q, num_blocks = ceil_div(p.fwd.seqlen_q, tile.rows);
  if (int32_t(blockIdx.x) >= heads * num_blocks) return;
  const int32_t at = blockIdx.x / heads, head = blockIdx.x % heads;
  const int32_t i_batch = head / p.fwd.num_heads_q, i_head = head % p.fwd.num_heads_q;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const int32_t first_row = (num_blocks - 1 - at) * tile.rows;
  if (first_row >= span.seqlen_q) return;
  const MaskBand band = resolve_band(p.fwd.mask, span.seqlen_q, span.seqlen_k);
  const Range queries = {first_row, min(first_row + tile.rows, span.seqlen_q)};
  const Range sinks = spec.fwd.sink_columns ? sink_range(band, queries, span.seqlen_k) : Range{0, 0};
  const Blocks blocks = blocks_of(k_range(band, queries, span.seqlen_k), sinks, tile.columns);
  Owner<spec, tile, Keys> owner{p, smem, span, band, i_head / p.fwd.gqa_ratio, first_row, i_head, masks};
  const auto own = OwnQueries<Fragment>::of(p, span, i_head, owner.first);
  CapturedSums sums(p.captured_sums);
  owner.walk(
      blocks.count(), [&](int32_t slot, int32_t i) { owner.load_block(slot, blocks.at(i)); },
      [&](int32_t slot, int32_t i) { owner.add_captured(slot, blocks.at(i), own, sums); });
  sums.finish();
}

}  // namespace fmha::sm80::bwd
