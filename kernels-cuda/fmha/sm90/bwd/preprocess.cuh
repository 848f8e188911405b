// What the main kernel wants of each query row: LSE in log2, and delta = dO . O - dLSE; and zeros where it sums dQ,
// or that nobody has had a turn. With `delta_beside` of the first heads' rows alone: the others' are made beside the products
// (make_delta.cuh).
//
// Rows behind a sequence in its last block get LSE = +infinity, so that their P are 0 and add nothing; so do rows that
// see no key, whose LSE is -infinity.
#pragma once
#include <fmha/bwd.h>
#include <fmha/num.h>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90/bwd/work.cuh>

namespace fmha::sm90::bwd {

constexpr int kPreprocessThreads = 256;

// A query block: `index` counts the blocks of the longest sequence, then heads, then sequences.
struct QueryBlock {
  SeqSpan span;
  int32_t i_head, first;  // its first query
};

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE QueryBlock resolve_query_block(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t index) {
  const int32_t head = index / schedule.num_q_blocks, i_batch = head / p.fwd.num_heads_q;
  return {resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch), head - i_batch * p.fwd.num_heads_q,
          (index - head * schedule.num_q_blocks) * tile.block_m};
}

// `dot`, and dO . O of eight columns, 16 bytes of each.
template <DType dtype>
FMHA_DEVICE float plus_dot8(float dot, const uint32_t (&xs)[4], const uint32_t (&ys)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (dtype == DType::Bf16) {
      dot = fmaf(float_of(xs[i] << 16), float_of(ys[i] << 16), dot);
      dot = fmaf(float_of(xs[i] & 0xffff0000u), float_of(ys[i] & 0xffff0000u), dot);
    } else {
      float low[2], high[2];
      ptx::unpack_f16x2(xs[i], low[0], high[0]);
      ptx::unpack_f16x2(ys[i], low[1], high[1]);
      dot = fmaf(low[0], low[1], dot);
      dot = fmaf(high[0], high[1], dot);
    }
  }
  return dot;
}
template <DType dtype>
FMHA_DEVICE float dot8(const void* a, const void* b) {
  const uint4 x = *static_cast<const uint4*>(a), y = *static_cast<const uint4*>(b);
  const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
  return plus_dot8<dtype>(0.f, xs, ys);
}

// What becomes of a row whose dO . O is known: `there` is whether the sequence has it.
template <BwdSpec spec>
FMHA_DEVICE void store_row_stats(const BwdParams& p, const QueryBlock& block, int32_t i, bool there, float lse, float dot) {
  float lse_log2 = infinity(), delta = 0.f;
  if (there) {
    if (lse != -infinity()) lse_log2 = lse * kLog2E;
    delta = spec.has_dlse ? dot - p.dlse[lse_offset(p.fwd, block.span, block.i_head, i)] : dot;
  }
  const int64_t at = stats_offset(p, block.span, block.i_head, i);
  p.lse_log2[at] = lse_log2;
  p.delta[at] = delta;
}

// Zeros in what is counted: claims, and by all CTAs of the launch turns and heads.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void clear_counts(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  const int32_t thread = blockIdx.x * kPreprocessThreads + threadIdx.x, threads = gridDim.x * kPreprocessThreads;
  if (tile.persistent && thread < kNumClaims) p.claimed[thread] = thread == kClaimOfDelta ? schedule.num_first_q_blocks : 0;
  if constexpr (counts_blocks<spec, tile>()) {
    for (int32_t i = thread; i < num_q_blocks_of_all(p, schedule); i += threads) p.turns[i] = 0;
  }
  if constexpr (tile.finishes_dq) {
    int32_t num = schedule.num_heads;
    if constexpr (tile.delta_beside) num += p.fwd.batch * p.fwd.num_heads_q;
    int32_t* first = done_key_blocks<spec, tile>(p, schedule, 0);
    for (int32_t i = thread; i < num; i += threads) first[i] = 0;
  }
}

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void preprocess(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  using S = Shape<spec, tile>;
  constexpr DType dtype = spec.fwd.dtype_o;
  constexpr int dim = spec.fwd.head_dim_v;
  constexpr int lanes = tile.vector_load && S::dim <= 128 ? S::dim / 8 : 32;  // of a row: a power of two
  wait_for_launch_before();
  clear_counts<spec, tile>(p, schedule);
  const QueryBlock block = resolve_query_block<spec, tile>(p, schedule, blockIdx.x);
  const SeqSpan& span = block.span;
  if (block.first >= span.seqlen_q) return;

  const int32_t lane = threadIdx.x % lanes;
#pragma unroll 2
  for (int32_t row = threadIdx.x / lanes; row < tile.block_m; row += kPreprocessThreads / lanes) {
    const int32_t i = block.first + row;
    const bool there = i < span.seqlen_q;
    float dot = 0.f;
    if (there) {
      const int64_t o = row_offset(p.fwd.o, span.storage_batch, int64_t(span.q_row) + i, block.i_head);
      const int64_t dout = row_offset(p.dout, span.storage_batch, int64_t(span.q_row) + i, block.i_head);
      if constexpr (tile.vector_load) {
        if (8 * lane < dim) {
          dot = dot8<dtype>(static_cast<const uint16_t*>(p.fwd.o.data) + o + 8 * lane,
                            static_cast<const uint16_t*>(p.dout.data) + dout + 8 * lane);
        }
      } else {
        for (int32_t d = lane; d < dim; d += lanes)
          dot += load_elem<dtype>(p.fwd.o.data, o + d) * load_elem<dtype>(p.dout.data, dout + d);
      }
    }
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) dot += ptx::shfl_xor(dot, step);
    if (lane == 0) {
      const float lse = there ? p.fwd.lse[lse_offset(p.fwd, span, block.i_head, i)] : 0.f;
      store_row_stats<spec>(p, block, i, there, lse, dot);
    }
  }
  if constexpr (!counts_blocks<spec, tile>()) {
    float4* sums = reinterpret_cast<float4*>(p.dq_sums + stats_offset(p, span, block.i_head, block.first) * S::dim);
    for (int32_t at = threadIdx.x; at < S::dq_block / 4; at += kPreprocessThreads) sums[at] = {0.f, 0.f, 0.f, 0.f};
  }
}

}  // namespace fmha::sm90::bwd
