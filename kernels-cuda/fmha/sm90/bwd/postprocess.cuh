// dSink; and dQ: the f32 sums of the main kernel, out of the order of its accumulators, scaled and rounded once.
#pragma once
#include <fmha/bwd.h>
#include <fmha/num.h>
#include <fmha/ptx/barrier.cuh>
#include <fmha/simt/bwd.cuh>
#include <fmha/sm90/bwd/epilogue.cuh>
#include <fmha/sm90/bwd/preprocess.cuh>

namespace fmha::sm90::bwd {

constexpr int kPostprocessThreads = 256;

// What a thread takes of a block's sums: 16 rows of an accumulator and the four threads' eight columns of it hold whole
// pieces of 16 bytes of dQ. Of dQ these are eight dims of two queries eight apart; of its transpose 16 dims of two
// neighbouring queries. Threads beside each other have the pieces of a query that lie beside each other.
template <BwdSpec spec, Sm90BwdTile tile>
struct Unit {
  using S = Shape<spec, tile>;
  static constexpr int fours = tile.transposed_dq ? 8 : 4;  // float4 of the sums
  static constexpr int stride = tile.transposed_dq ? 4 : 1;  // from one to the next
  static constexpr int pieces = fours / 4;  // 16-byte pieces of either query
  static constexpr int count = S::dq_block / (4 * fours);
  static constexpr int next_query = tile.transposed_dq ? 1 : 8;
  int32_t first, query, dim;  // of the float4 in the block; of the elements

  FMHA_DEVICE explicit Unit(int32_t i) {
    constexpr int groups = S::dq_columns / 8, share_fours = S::dq_share / 4;
    if constexpr (tile.transposed_dq) {
      constexpr int row_blocks = S::dq_rows / 16;
      const int32_t row_block = i % row_blocks, pair = i / row_blocks % 4, group = i / (4 * row_blocks);
      first = row_block / 4 * share_fours + group * mma::kWarpgroup + row_block % 4 * 32 + pair;
      query = 8 * group + 2 * pair;
      dim = 16 * row_block;
    } else {
      const int32_t group = i % groups, row = i / groups % kSumRows, share = i / (groups * kSumRows);
      first = share * share_fours + group * mma::kWarpgroup + row * 4;
      query = row / 8 * 16 + row % 8 + (S::dq_by_columns ? 0 : share * mma::kRows);
      dim = first_dim(share, group);
    }
  }
  // Of a share's group of eight columns.
  FMHA_DEVICE static int32_t first_dim(int32_t share, int32_t group) {
    if constexpr (tile.score_parts > 1) {
      const int32_t behind_whole = 8 * group - S::Chunks::whole;
      return behind_whole < 0 ? S::Chunks::first_of_whole(share) + 8 * group
                              : S::Chunks::first_of_half(share) + behind_whole;
    } else {
      return 8 * group + (S::dq_by_columns ? share * S::dq_columns : 0);
    }
  }
  // Element `k` of piece `piece` of the query `q`, 0 or 1, of the sums that `load` has put in order.
  FMHA_DEVICE static float elem(const float4 (&sums)[fours], int q, int piece, int k) {
    const float4& four = tile.transposed_dq ? sums[k] : sums[k / 2];
    const int i = tile.transposed_dq ? 2 * piece + q : 2 * q + k % 2;
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
  }
  static constexpr int kSumRows = mma::kRows / 2;  // rows eight apart are one thread's
};

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
  using U = Unit<spec, tile>;
  constexpr int dim = spec.fwd.head_dim_qk;
  wait_for_launch_before();
  // CTAs: query blocks, then a head of dSink each.
  const int32_t num_q_blocks = schedule.num_q_blocks * p.fwd.num_heads_q * p.fwd.batch;
  if (spec.write_dsink && int32_t(blockIdx.x) >= num_q_blocks) {
    sink_gradient<spec>(p, blockIdx.x - num_q_blocks);
    return;
  }
  const QueryBlock block = resolve_query_block<spec, tile>(p, schedule, blockIdx.x);
  const SeqSpan& span = block.span;
  bool suspect = false;
  if (block.first < span.seqlen_q) {
    const int64_t first = stats_offset(p, span, block.i_head, block.first);
    const float4* block_sums = reinterpret_cast<const float4*>(p.dq_sums + first * Shape<spec, tile>::dim);
    // A query block that no key block has seen was never written.
    const bool none = counts_blocks<spec, tile>() && p.turns[first / tile.block_m] == 0;
    for (int32_t i = threadIdx.x; i < U::count; i += kPostprocessThreads) {
      const U unit(i);
      float4 sums[U::fours];
#pragma unroll
      for (int f = 0; f < U::fours; ++f)
        sums[f] = none ? float4{0.f, 0.f, 0.f, 0.f} : block_sums[unit.first + f * U::stride];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int32_t query = block.first + unit.query + q * U::next_query;
        const int64_t row = row_offset(p.dq, span.storage_batch, int64_t(span.q_row) + query, block.i_head);
#pragma unroll
        for (int piece = 0; piece < U::pieces; ++piece) {
          const int32_t column = unit.dim + 8 * piece;
          if (query >= span.seqlen_q || column >= dim) continue;
          float values[8], zero = 0.f;
#pragma unroll
          for (int k = 0; k < 8; ++k) values[k] = U::elem(sums, q, piece, k) * (p.fwd.softmax_scale * dropout_factor_of_ds<spec>(p.fwd));
          if constexpr (repairs<spec>()) {
#pragma unroll
            for (int k = 0; k < 8; ++k) zero = fmaf(values[k], 0.f, zero);
            suspect |= is_nan(zero);
          }
          store_eight<spec.dtype_grad, tile.vector_store>(p.dq.data, row + column, dim - column, values);
        }
      }
    }
  }
  if constexpr (repairs<spec>()) {
    const bool all_finite = ptx::bar_red_and<kPostprocessThreads>(0, !suspect);
    if (threadIdx.x == 0) suspect_blocks<tile>(p, schedule)[blockIdx.x] = !all_finite;
  }
}

}  // namespace fmha::sm90::bwd
