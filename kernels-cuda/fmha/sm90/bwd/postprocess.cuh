// dSink; and dQ: the f32 sums of the main kernel, out of the order of its accumulators, scaled and rounded once. And rows of any
// gradient that are not finite where a mask may have let a hidden infinity through: computed again, pair by pair.
#pragma once
#include <fmha/bwd.h>
#include <fmha/num.h>
#include <fmha/simt/bwd.cuh>
#include <fmha/sm90/bwd/preprocess.cuh>

namespace fmha::sm90::bwd {

constexpr int kPostprocessThreads = 256;

// Where in its block an accumulator's element lies. Of 16 bytes of the sums at `at`, the `k`-th.
struct Place {
  int32_t row, dim;
};
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE Place place_of(int32_t at, int k) {
  constexpr int per_share = Shape<spec, tile>::dq_share / 4;
  const int32_t share = at / per_share, thread = at % mma::kWarpgroup, group = at % per_share / mma::kWarpgroup;
  const int32_t row = thread / 32 * 16 + thread % 32 / 4 + 8 * (k >> 1);
  const int32_t column = 8 * group + thread % 4 * 2 + (k & 1);
  const int32_t own_row = tile.split_dims ? row : share * mma::kRows + row;  // of the share, where dimensions are split
  return tile.transposed_dq ? Place{column, own_row} : Place{own_row, column};
}

// The keys of a tile whose warps found dK or dV that are not finite, a warp to a key.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void repair_keys(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t index) {
  const Work work = resolve_work<spec, tile>(p, schedule, index);
  for (int32_t row = threadIdx.x / 32; work.keys.begin + row < work.keys.end; row += kPostprocessThreads / 32) {
    // A consumer warp has 16 keys; where consumers share out the dimension, one of each has the same.
    const int32_t* suspects = &p.suspects[index * num_consumer_warps(tile) + row / 16];
    bool suspect = false;
#pragma unroll
    for (int c = 0; c < (tile.split_dims ? num_consumers(tile) : 1); ++c) suspect |= suspects[4 * c] != 0;
    if (suspect)
      bwd_key_row<spec, simt::Warp>(p, work.span, work.i_head_kv, work.keys.begin + row);
  }
}

// dSink of a head, by all threads: each sums every so many queries of every sequence, then their sums are added in the
// order of the threads, so that it has the same bits whenever it is computed.
template <BwdSpec spec>
FMHA_DEVICE void sink_gradient(const BwdParams& p, int32_t i_head) {
  __shared__ float sums[kPostprocessThreads / 32];
  const float sink_log2 = scalar_of(p.fwd.sink, 0, i_head, -infinity()) * kLog2E;
  float sum = 0.f;
  for (int32_t b = 0; b < p.fwd.batch; ++b) {
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, b);
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < span.seqlen_q; i += kPostprocessThreads)
      sum += sink_term(p, stats_offset(p, span, i_head, i), sink_log2);
  }
  sum = lane_sum<simt::Warp>(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int32_t warp = 1; warp < kPostprocessThreads / 32; ++warp) sum += sums[warp];
  p.dsink[i_head] = sum;
}

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void postprocess(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  using S = Shape<spec, tile>;
  constexpr int dim = spec.fwd.head_dim_qk;
  // A share of the sums at a time, where all would be too many.
  constexpr int num_passes = tile.split_dims ? S::consumers : 1, columns = S::dim / num_passes;
  __shared__ float rows[tile.block_m][columns + 1];
  __shared__ bool suspects[tile.block_m];
  // CTAs: query blocks, then a head of dSink each, then key blocks.
  const int32_t num_q_blocks = schedule.num_q_blocks * p.fwd.num_heads_q * p.fwd.batch;
  const int32_t num_sinks = spec.write_dsink ? p.fwd.num_heads_q : 0;
  if (spec.write_dsink && int32_t(blockIdx.x) >= num_q_blocks && int32_t(blockIdx.x) < num_q_blocks + num_sinks) {
    sink_gradient<spec>(p, blockIdx.x - num_q_blocks);
    return;
  }
  if constexpr (repairs<spec>()) {
    if (int32_t(blockIdx.x) >= num_q_blocks + num_sinks) {
      repair_keys<spec, tile>(p, schedule, blockIdx.x - num_q_blocks - num_sinks);
      return;
    }
    if (threadIdx.x < tile.block_m) suspects[threadIdx.x] = false;
  }
  const QueryBlock block = resolve_query_block<spec, tile>(p, schedule, blockIdx.x);
  const SeqSpan& span = block.span;
  if (block.first >= span.seqlen_q) return;

  const int64_t first = stats_offset(p, span, block.i_head, block.first);
  const float4* sums = reinterpret_cast<const float4*>(p.dq_sums + first * S::dim);
  // A query block that no key block has seen was never written.
  const bool none = takes_turns<spec>() && p.turns[first / tile.block_m] == 0;
#pragma unroll 1
  for (int pass = 0; pass < num_passes; ++pass) {
    if (pass > 0) __syncthreads();
#pragma unroll 4
    for (int32_t at = threadIdx.x; at < S::dq_block / 4 / num_passes; at += kPostprocessThreads) {
      float4 four = {0.f, 0.f, 0.f, 0.f};
      if (!none) four = sums[pass * (S::dq_block / 4 / num_passes) + at];
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const Place place = place_of<spec, tile>(at, k);
        rows[place.row][place.dim] = values[k];
      }
    }
    __syncthreads();

    constexpr int units = columns / 8;
    for (int32_t at = threadIdx.x; at < tile.block_m * units; at += kPostprocessThreads) {
      const int32_t row = at / units, own = at % units * 8, column = pass * columns + own, i = block.first + row;
      if (i >= span.seqlen_q || column >= dim) continue;
      const int64_t out = row_offset(p.dq, span.storage_batch, int64_t(span.q_row) + i, block.i_head) + column;
      float values[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) values[k] = rows[row][own + k] * p.fwd.softmax_scale;
      if constexpr (repairs<spec>()) {
        float zero = 0.f;
#pragma unroll
        for (int k = 0; k < 8; ++k) zero = fmaf(values[k], 0.f, zero);
        if (is_nan(zero)) suspects[row] = true;
      }
      if constexpr (tile.vector_store && spec.dtype_grad != DType::F32) {
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = ptx::cvt_rn_x2<spec.dtype_grad>(values[2 * k], values[2 * k + 1]);
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.dq.data) + out) = {words[0], words[1], words[2], words[3]};
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          if (column + k < dim) store_elem<spec.dtype_grad>(p.dq.data, out + k, values[k]);
        }
      }
    }
  }
  if constexpr (repairs<spec>()) {
    __syncthreads();
    for (int32_t row = threadIdx.x / 32; row < tile.block_m; row += kPostprocessThreads / 32) {
      if (suspects[row]) bwd_query_row<spec, simt::Warp>(p, span, block.i_head, block.first + row);
    }
  }
}

}  // namespace fmha::sm90::bwd
