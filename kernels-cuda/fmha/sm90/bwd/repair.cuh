// Recomputes what the launches before leave wrong, pair by pair as in fmha/row_bwd.h: rows of any gradient with a
// non-finite value, where a mask may have let a hidden infinity through, and the contributions of far queries, those
// with a large LSE (`leaves_far_queries`). This is a launch of its own: in the launch that converts dQ its registers
// would slow the conversion down.
#pragma once
#include <fmha/bwd.h>
#include <fmha/num.h>
#include <fmha/simt/bwd.h>
#include <fmha/sm90/bwd/order.cuh>
#include <fmha/sm90/bwd/preprocess.cuh>

namespace fmha::sm90::bwd {

constexpr int kRowWarps = kRowThreads / 32;

template <DType dtype, int dim>
FMHA_DEVICE bool has_non_finite(const View& x, int64_t row) {
  float zero = 0.f;
  for (int32_t d = threadIdx.x % 32; d < dim; d += 32) zero = fmaf(load_elem<dtype>(x.data, row + d), 0.f, zero);
  return __any_sync(ptx::kAllLanes, is_nan(zero));
}

// ---- Far queries.

template <BwdSpec spec, Sm90BwdTile tile, class Masks>
struct FarQueries {
  const BwdParams& p;
  const Sm90BwdSchedule& schedule;
  const SeqSpan span;
  const Masks& masks;  // as data

  // Flag that tells whether a query block has far queries. Preprocess, or the warp that computes delta, has written it.
  FMHA_DEVICE bool in_block(int32_t i_head, int32_t block) const {
    const int32_t head = span.i_batch * p.fwd.num_heads_q + i_head;
    return *far_queries<spec, tile>(p, schedule, head * schedule.num_q_blocks + block) != 0;
  }
  // Whether this thread, one of `threads` that together test all blocks of `heads`, finds a block with far queries.
  FMHA_DEVICE bool any(Range heads, int32_t thread, int32_t threads) const {
    const int32_t blocks = ceil_div(span.seqlen_q, tile.block_m), num = (heads.end - heads.begin) * blocks;
    bool found = false;
#pragma unroll 4
    for (int32_t at = thread; at < num; at += threads) found |= in_block(heads.begin + at / blocks, at % blocks);
    return found;
  }
  FMHA_DEVICE bool operator()(int32_t i_head, int32_t i) const {
    return has_origin<spec>(p.fwd.lse[lse_offset(p.fwd, span, i_head, i)]);
  }
  FMHA_DEVICE RowOrigin origin(int32_t i_head, int32_t i) const {
    const float lse = p.fwd.lse[lse_offset(p.fwd, span, i_head, i)];
    return origin_of_far_row<spec, simt::Warp>(p, span, i_head, i, lse, p.delta[stats_offset(p, span, i_head, i)],
                                               masks);
  }
  // Recomputes this warp's share of a head's far queries.
  template <class Row>
  FMHA_DEVICE void for_each(int32_t i_head, Row row) const {
#pragma unroll 1
    for (int32_t first = 0; first < span.seqlen_q; first += tile.block_m) {
      if (!in_block(i_head, first / tile.block_m)) continue;
      const int32_t end = min(first + tile.block_m, span.seqlen_q);
#pragma unroll 1
      for (int32_t i = first + threadIdx.x / 32; i < end; i += kRowWarps) {
        if ((*this)(i_head, i)) row(i);
      }
    }
  }
};

FMHA_DEVICE Range query_heads_of(const BwdParams& p, int32_t i_head_kv) {
  return {i_head_kv * p.fwd.gqa_ratio, (i_head_kv + 1) * p.fwd.gqa_ratio};
}

// Recomputes one kv head that has far queries: their origins and dQ, then their share of every key's dK and dV. It
// also recomputes rows with a non-finite value, which depend on these origins too. One CTA takes a head, however many
// such queries there are: 4096 of them, with as many keys, take seconds.
template <BwdSpec spec, Sm90BwdTile tile, class Masks>
FMHA_DEVICE void repair_head(const FarQueries<spec, tile, Masks>& far, int32_t i_head_kv) {
  const BwdParams& p = far.p;
  const SeqSpan& span = far.span;
  const Range heads = query_heads_of(p, i_head_kv);
  for (int32_t i_head = heads.begin; i_head < heads.end; ++i_head) {
    far.for_each(i_head, [&](int32_t i) {
      const RowOrigin row = far.origin(i_head, i);
      if (threadIdx.x % 32 == 0) {
        const int64_t at = stats_offset(p, span, i_head, i);
        p.score_origin[at] = row.origin;
        p.lse_log2[at] = row.lse_log2;
      }
      __syncwarp();
      bwd_query_row<spec, simt::Warp>(p, span, i_head, i, far.masks);
    });
  }
  __syncthreads();
  if constexpr (repairs<spec>()) {
    for (int32_t i_head = heads.begin; i_head < heads.end; ++i_head) {
      for (int32_t i = threadIdx.x / 32; i < span.seqlen_q; i += kRowWarps) {
        const int64_t row = row_offset(p.dq, span.storage_batch, int64_t(span.q_row) + i, i_head);
        if (has_non_finite<spec.dtype_grad, spec.fwd.head_dim_qk>(p.dq, row))
          bwd_query_row<spec, simt::Warp>(p, span, i_head, i, far.masks);
      }
    }
  }
#pragma unroll 1
  for (int32_t j = threadIdx.x / 32; j < span.seqlen_k; j += kRowWarps) {
    if constexpr (repairs<spec>()) {
      const int64_t key = span.k_row + int64_t(j);
      const int64_t dk = row_offset(p.dk, span.i_batch, key, i_head_kv), dv = row_offset(p.dv, span.i_batch, key, i_head_kv);
      if (has_non_finite<spec.dtype_grad, spec.fwd.head_dim_qk>(p.dk, dk) ||
          has_non_finite<spec.dtype_grad, spec.fwd.head_dim_v>(p.dv, dv)) {
        bwd_key_row<spec, simt::Warp>(p, span, i_head_kv, j, AllQueries{}, far.masks);
        continue;
      }
    }
    bwd_key_row<spec, simt::Warp, true>(p, span, i_head_kv, j, far, far.masks);
  }
}

// Share of far queries of all sequences in dSink of a head, in one order.
template <BwdSpec spec, Sm90BwdTile tile, class Masks>
FMHA_DEVICE void repair_sink(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t i_head, const Masks& masks) {
  __shared__ float sums[kRowWarps];
  const float sink = scalar_of(p.fwd.sink, 0, i_head, -infinity());
  float sum = 0.f;
  for (int32_t b = 0; b < p.fwd.batch; ++b) {
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, b);
    const FarQueries<spec, tile, Masks> far{p, schedule, span, masks};
    far.for_each(i_head, [&](int32_t i) {
      sum += sink_term(p, stats_offset(p, far.span, i_head, i), sink, far.origin(i_head, i));
    });
  }
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int32_t warp = 1; warp < kRowWarps; ++warp) sum += sums[warp];
  p.dsink[i_head] += sum;
}

// Number of CTAs for far queries: one for each kv head of a sequence, and one for each head's sink.
template <BwdSpec spec>
FMHA_DEVICE int32_t num_ctas_of_far_queries(const BwdParams& p) {
  if (!leaves_far_queries<spec>()) return 0;
  return p.fwd.batch * p.fwd.num_heads_kv + (spec.write_dsink ? p.fwd.num_heads_q : 0);
}
template <BwdSpec spec, Sm90BwdTile tile, class Masks>
FMHA_DEVICE void repair_far(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t index, const Masks& masks) {
  const int32_t i_batch = index / p.fwd.num_heads_kv, i_head_kv = index - i_batch * p.fwd.num_heads_kv;
  if (i_batch >= p.fwd.batch) {
    if constexpr (spec.write_dsink) repair_sink<spec, tile>(p, schedule, index - p.fwd.batch * p.fwd.num_heads_kv,
                                                            masks);
    return;
  }
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const FarQueries<spec, tile, Masks> far{p, schedule, span, masks};
  const bool found = far.any(query_heads_of(p, i_head_kv), threadIdx.x, kRowThreads);
  if (!ptx::bar_red_and<kRowThreads>(0, !found)) repair_head(far, i_head_kv);
}

// ---- Rows that are not finite.

// Whether `repair_head` recomputes these rows anyway. A whole warp calls it.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE bool is_repaired_with_far(const BwdParams& p, const Sm90BwdSchedule& schedule, const SeqSpan& span,
                                      int32_t i_head_kv) {
  if constexpr (!leaves_far_queries<spec>()) return false;
  const NoMasks masks;
  const FarQueries<spec, tile, NoMasks> far{p, schedule, span, masks};
  return __any_sync(ptx::kAllLanes, far.any(query_heads_of(p, i_head_kv), threadIdx.x % 32, 32));
}

template <BwdSpec spec, Sm90BwdTile tile, class Masks>
FMHA_DEVICE void repair_queries(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t index,
                                const Masks& masks) {
  const QueryBlock block = resolve_query_block<spec, tile>(p, schedule, index);
  if (is_repaired_with_far<spec, tile>(p, schedule, block.span, block.i_head / p.fwd.gqa_ratio)) return;
  for (int32_t i = block.first; i < min(block.first + tile.block_m, block.span.seqlen_q); ++i) {
    const int64_t row = row_offset(p.dq, block.span.storage_batch, int64_t(block.span.q_row) + i, block.i_head);
    if (has_non_finite<spec.dtype_grad, spec.fwd.head_dim_qk>(p.dq, row))
      bwd_query_row<spec, simt::Warp>(p, block.span, block.i_head, i, masks);
  }
}

// Recomputes the keys of a tile whose dK or dV some consumer warps found to contain a NaN or an infinity. `warps` has a
// bit for each such warp.
template <BwdSpec spec, Sm90BwdTile tile, class Masks>
FMHA_DEVICE void repair_keys(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t index, uint32_t warps,
                             const Masks& masks) {
  // Tiles have the main kernel's order; under masks given as data that kernel reads lists of blocks.
  const Work work = resolve_work<spec, tile, EveryKey, !Masks::all>(p, schedule, index);
  if (is_repaired_with_far<spec, tile>(p, schedule, work.span, work.i_head_kv)) return;
  // A consumer warp has 16 keys; if consumers divide the dimension, one warp of each has equal keys.
  constexpr int sharers = splits_dims(tile) ? num_consumers(tile) : 1;
  for (int32_t row = 0; work.keys.begin + row < work.keys.end; ++row) {
    bool non_finite = false;
#pragma unroll
    for (int c = 0; c < sharers; ++c) non_finite |= warps >> (row / 16 + 4 * c) & 1;
    if (non_finite) bwd_key_row<spec, simt::Warp>(p, work.span, work.i_head_kv, work.keys.begin + row, AllQueries{},
                                                  masks);
  }
}

// The launch has a warp for each tile, then one for each query block of a head. A warp reads its flag before it
// computes anything else: code must be fetched from memory first, and the code that finds the tile's place alone took 8
// us in launches with nothing to repair.
template <BwdSpec spec, Sm90BwdTile tile, class Masks>
FMHA_DEVICE void repair_non_finite(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t i_cta,
                                   const Masks& masks) {
  constexpr int words = num_consumer_warps(tile);
  const int32_t index = i_cta * kRowWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t q_block = index - schedule.num_tiles;
  if (q_block >= num_q_blocks_of_all(p, schedule)) return;
  const bool is_tile = q_block < 0;
  constexpr int words_of_queries = finish_ctas<spec, tile>();
  const int32_t* found = is_tile ? non_finite_keys(p) + int64_t(index) * words
                                 : non_finite_queries<tile>(p, schedule) + int64_t(q_block) * words_of_queries;
  const uint32_t non_finite = ptx::vote_ballot(lane < (is_tile ? words : words_of_queries) && found[lane] != 0);
  if (non_finite == 0) return;
  if (is_tile) {
    repair_keys<spec, tile>(p, schedule, index, non_finite, masks);
  } else {
    repair_queries<spec, tile>(p, schedule, q_block, masks);
  }
}

// `masks`: the masks as data (tensors), if any.
template <BwdSpec spec, Sm90BwdTile tile, class Masks = NoMasks>
FMHA_DEVICE void repair(const BwdParams& p, const Sm90BwdSchedule& schedule, const Masks& masks = {}) {
  wait_for_launch_before();
  const int32_t of_far_queries = num_ctas_of_far_queries<spec>(p), i_cta = blockIdx.x;
  if (i_cta < of_far_queries) {
    if constexpr (leaves_far_queries<spec>()) repair_far<spec, tile>(p, schedule, i_cta, masks);
  } else {
    if constexpr (repairs<spec>()) repair_non_finite<spec, tile>(p, schedule, i_cta - of_far_queries, masks);
  }
}

}  // namespace fmha::sm90::bwd
