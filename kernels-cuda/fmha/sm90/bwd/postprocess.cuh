// Computes dSink and, where the main kernel does not finish dQ itself (dq/finish.cuh), dQ: brings the main kernel's f32
// sums from the accumulators' order to rows, scales them and rounds them once.
#pragma once
#include <fmha/bwd.h>
#include <fmha/num.h>
#include <fmha/ptx/barrier.cuh>
#include <fmha/simt/bwd.h>
#include <fmha/sm90/bwd/dq/finish.cuh>

namespace fmha::sm90::bwd {

// Computes dSink of a head by all threads of a CTA. Each thread sums over every `threads`-th query of all sequences;
// then the threads' sums are added in the threads' order, so that repeated runs give equal bits.
template <BwdSpec spec>
FMHA_DEVICE void sink_gradient(const BwdParams& p, int32_t i_head) {
  __shared__ float sums[kRowThreads / 32];
  const float sink = scalar_of(p.fwd.sink, 0, i_head, -infinity());
  float sum = 0.f;
  for (int32_t b = 0; b < p.fwd.batch; ++b) {
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, b);
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < span.seqlen_q; i += kRowThreads)
      sum += sink_term(p, stats_offset(p, span, i_head, i), sink);
  }
  sum = lane_sum<simt::Warp>(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int32_t warp = 1; warp < kRowThreads / 32; ++warp) sum += sums[warp];
  p.dsink[i_head] = sum;
}

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void postprocess(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  wait_for_launch_before();
  // The first CTAs finish dQ, `ctas` of them for each query block; behind them there is one for each head of dSink.
  constexpr int ctas = finish_ctas<spec, tile>();
  const int32_t num_of_blocks = finishes_dq(tile) ? 0 : num_q_blocks_of_all(p, schedule) * ctas;
  if (spec.write_dsink && int32_t(blockIdx.x) >= num_of_blocks) {
    sink_gradient<spec>(p, blockIdx.x - num_of_blocks);
    return;
  }
  const int32_t i_block = blockIdx.x / ctas, i_cta = blockIdx.x - i_block * ctas;
  const QueryBlock block = resolve_query_block<spec, tile>(p, schedule, i_block);
  bool non_finite;
  if constexpr (keeps_dq_apart(tile)) {
    non_finite = finish_parts<spec, tile>(p, schedule, block, i_cta);
  } else {
    const int32_t thread = i_cta * kRowThreads + threadIdx.x;
    non_finite = finish_from_memory<spec, tile>(p, schedule, block, thread, ctas * kRowThreads);
  }
  if constexpr (repairs<spec>()) {
    const bool all_finite = ptx::bar_red_and<kRowThreads>(0, !non_finite);
    if (threadIdx.x == 0) non_finite_queries<tile>(p, schedule)[blockIdx.x] = !all_finite;
  }
}

}  // namespace fmha::sm90::bwd
