// Prepares what the main kernel needs of each query row: LSE in log2, the origin of scores, and delta = dO . O -
// dLSE; and zeros where it sums dQ, or in the semaphore that a block of dQ has. With DqFinish::BesideWithDelta it
// prepares the first heads' rows alone; the others' are made beside the products (make_delta.cuh).
//
// Rows behind a sequence in its last block get LSE = +infinity, so that their P are 0 and add nothing; so do rows that
// see no key, whose LSE is -infinity, and far ones that are left to the launch behind (repair.cuh).
#pragma once
#include <fmha/bwd.h>
#include <fmha/num.h>
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/simt/bwd.h>
#include <fmha/sm90/bwd/dq/sums.cuh>

namespace fmha::sm90::bwd {

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

// Whether some query of a block may see a key. A block that sees no key needs no sums of dQ: none are zeroed before the
// main kernel or read after it. B3 H40/8 of 11611 queries over 192 keys, D 248: 1417 us with them.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE bool sees_keys(const BwdParams& p, const QueryBlock& block) {
  if constexpr (spec.fwd.mask == MaskKind::Full) return true;
  const SeqSpan& span = block.span;
  const MaskBand band = resolve_band(p.fwd.mask, span.seqlen_q, span.seqlen_k);
  const Range queries = {block.first, min(block.first + tile.block_m, span.seqlen_q)};
  return !k_range(band, queries, span.seqlen_k).empty() || !sink_range(band, queries, span.seqlen_k).empty();
}

// Returns `dot` plus the dot product of eight columns of dO and O, 16 bytes of each.
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
// Stores LSE, origin and delta of a row, given its dO . O. `there`: the sequence has the row.
template <BwdSpec spec>
FMHA_DEVICE void store_row_stats(const BwdParams& p, const QueryBlock& block, int32_t i, bool there, float lse, float dot) {
  float lse_log2 = infinity(), delta = 0.f;
  if (there) {
    if (lse != -infinity() && !(leaves_far_queries<spec>() && has_origin<spec>(lse))) lse_log2 = lse * kLog2E;
    delta = spec.has_dlse ? dot - p.dlse[lse_offset(p.fwd, block.span, block.i_head, i)] : dot;
  }
  const int64_t at = stats_offset(p, block.span, block.i_head, i);
  p.lse_log2[at] = lse_log2;
  p.delta[at] = delta;
  p.score_origin[at] = 0.f;
}

// Computes the score origins of a block's far rows (large LSE), one row a warp.
template <BwdSpec spec, Sm90BwdTile tile, class Masks>
FMHA_DEVICE void measure_far_rows(const BwdParams& p, const QueryBlock& block, const Masks& masks) {
  const int32_t end = min(block.first + tile.block_m, block.span.seqlen_q);
#pragma unroll 1
  for (int32_t i = block.first + threadIdx.x / 32; i < end; i += kRowThreads / 32) {
    const float lse = p.fwd.lse[lse_offset(p.fwd, block.span, block.i_head, i)];
    if (!has_origin<spec>(lse)) continue;
    const int64_t at = stats_offset(p, block.span, block.i_head, i);
    const RowOrigin row = origin_of_far_row<spec, simt::Warp>(p, block.span, block.i_head, i, lse, p.delta[at], masks);
    if (threadIdx.x % 32 == 0) {
      p.score_origin[at] = row.origin;
      p.lse_log2[at] = row.lse_log2 == infinity() ? infinity() : marked_far(row.lse_log2);
    }
    __syncwarp();
  }
}

// Zeros the counters (dq/sums.cuh), the tiles' flags of non-finite values, and the counters of parts that wait for each
// other (head_sums.cuh). All CTAs of the launch share the work.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void clear_counts(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  const int32_t thread = blockIdx.x * kRowThreads + threadIdx.x, threads = gridDim.x * kRowThreads;
  if (tile.persistent && thread < kNumSchedulers)
    p.schedulers[thread] = thread == kNextDeltaBlock ? schedule.num_first_q_blocks : 0;
  if constexpr (repairs<spec>()) {
    for (int32_t i = thread; i < schedule.num_tiles * num_consumer_warps(tile); i += threads) non_finite_keys(p)[i] = 0;
  }
  if constexpr (has_semaphores<spec, tile>()) {
    for (int32_t i = thread; i < num_q_blocks_of_all(p, schedule); i += threads) p.dq_semaphores[i] = 0;
  }
  if constexpr (finishes_dq(tile)) {
    int32_t num = schedule.num_heads;
    if constexpr (makes_delta(tile)) num += p.fwd.batch * p.fwd.num_heads_q;
    int32_t* first = done_key_blocks<spec, tile>(p, schedule, 0);
    for (int32_t i = thread; i < num; i += threads) first[i] = 0;
  }
  if constexpr (has_own_parts<spec, tile>()) {
    const int32_t num_blocks = schedule.num_tiles / num_parts<tile>(schedule);
    int32_t* added = reinterpret_cast<int32_t*>(schedule.head_sums + num_head_sums<spec, tile>(schedule));
    for (int32_t i = thread; i < num_blocks * num_consumer_warps(tile); i += threads) added[i] = 0;
  }
  if constexpr (makes_delta(tile)) {
    // Clears the flags of the query blocks whose rows the main kernel checks.
    const int32_t end = num_q_blocks_of_all(p, schedule);
    for (int32_t i = schedule.num_first_q_blocks + thread; i < end; i += threads)
      *far_queries<spec, tile>(p, schedule, i) = 0;
  }
}

// Number of lanes that share a row, a power of two; each has eight columns at a time.
template <BwdSpec spec>
constexpr int kLanesOfRow = padded_dim(spec.fwd) <= 128 ? padded_dim(spec.fwd) / 8 : 32;

// A lane's part of a row's dO . O: eight columns at a time, summed in an order that does not depend on how the row is
// loaded. `ask` issues the loads, so that those of several rows are under way at a time.
template <BwdSpec spec, Sm90BwdTile tile, int lanes>
struct DotOfRow {
  static constexpr DType dtype = spec.fwd.dtype_o;
  static constexpr int dim = spec.fwd.head_dim_v;
  uint32_t os[4], douts[4];
  float dot = 0.f;

  FMHA_DEVICE void ask(const BwdParams& p, int64_t o, int64_t dout, int32_t lane, bool there) {
    if constexpr (tile.vector_load) {
      const bool inside = there && 8 * lane < dim;
      ptx::ld_global_v4_b32_if(os, static_cast<const uint16_t*>(p.fwd.o.data) + o + 8 * lane, inside);
      ptx::ld_global_v4_b32_if(douts, static_cast<const uint16_t*>(p.dout.data) + dout + 8 * lane, inside);
    } else if (there) {
      for (int32_t d = 8 * lane; d < min(8 * lane + 8, dim); ++d)
        dot = fmaf(load_elem<dtype>(p.fwd.o.data, o + d), load_elem<dtype>(p.dout.data, dout + d), dot);
    }
  }
  // Sum over all lanes of the row.
  FMHA_DEVICE float sum() {
    if constexpr (tile.vector_load) dot = plus_dot8<dtype>(0.f, os, douts);
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) dot += ptx::shfl_xor(dot, step);
    return dot;
  }
};

// Rows of a group of lanes whose loads are in flight at a time.
constexpr int kRowsAhead = 4;

template <BwdSpec spec, Sm90BwdTile tile, class Masks>
FMHA_DEVICE void preprocess_block(const BwdParams& p, const Sm90BwdSchedule& schedule, const QueryBlock& block,
                                  const Masks& masks) {
  using S = Shape<spec, tile>;
  constexpr int lanes = kLanesOfRow<spec>, rows_at_once = kRowThreads / lanes;
  const SeqSpan& span = block.span;
  const int64_t first_o = row_offset(p.fwd.o, span.storage_batch, int64_t(span.q_row) + block.first, block.i_head);
  const int64_t first_dout = row_offset(p.dout, span.storage_batch, int64_t(span.q_row) + block.first, block.i_head);
  const float* lse = p.fwd.lse + lse_offset(p.fwd, span, block.i_head, block.first);
  const int32_t lane = threadIdx.x % lanes;
  bool any_far = false;
#pragma unroll 1
  for (int32_t first = threadIdx.x / lanes; first < tile.block_m; first += kRowsAhead * rows_at_once) {
    DotOfRow<spec, tile, lanes> dots[kRowsAhead];
    float lses[kRowsAhead];
#pragma unroll
    for (int n = 0; n < kRowsAhead; ++n) {
      const int32_t row = first + n * rows_at_once;
      const bool there = row < tile.block_m && block.first + row < span.seqlen_q;
      dots[n].ask(p, first_o + row * p.fwd.o.row, first_dout + row * p.dout.row, lane, there);
      lses[n] = ptx::ld_global_f32_if(lse + row, there);
      any_far |= there && has_origin<spec>(lses[n]);
    }
#pragma unroll
    for (int n = 0; n < kRowsAhead; ++n) {
      const int32_t row = first + n * rows_at_once, i = block.first + row;
      const float dot = dots[n].sum();
      if (lane == 0 && row < tile.block_m) store_row_stats<spec>(p, block, i, i < span.seqlen_q, lses[n], dot);
    }
  }
  any_far = !ptx::bar_red_and<kRowThreads>(0, !any_far);
  if constexpr (leaves_far_queries<spec>()) {
    if (threadIdx.x == 0) *far_queries<spec, tile>(p, schedule, blockIdx.x) = any_far;
  } else {
    if (any_far) measure_far_rows<spec, tile>(p, block, masks);
  }
  if constexpr (kDqStart<spec, tile> == DqStart::Zeros) {
    float4* sums = reinterpret_cast<float4*>(p.dq_sums + stats_offset(p, span, block.i_head, block.first) * S::dq_dim);
    const int32_t end = sees_keys<spec, tile>(p, block) ? S::dq_block / 4 : 0;
    for (int32_t at = threadIdx.x; at < end; at += kRowThreads) sums[at] = {0.f, 0.f, 0.f, 0.f};
  }
}

// Prepares a query block. `masks` are the masks as data (tensors), if the call has any.
template <BwdSpec spec, Sm90BwdTile tile, class Masks = NoMasks>
FMHA_DEVICE void preprocess(const BwdParams& p, const Sm90BwdSchedule& schedule, const Masks& masks = {}) {
  wait_for_launch_before();
  const QueryBlock block = resolve_query_block<spec, tile>(p, schedule, blockIdx.x);
  if (block.first < block.span.seqlen_q) preprocess_block<spec, tile>(p, schedule, block, masks);
  clear_counts<spec, tile>(p, schedule);
}

}  // namespace fmha::sm90::bwd
