// Rows of any gradient that are not finite where a mask may have let a hidden infinity through: computed again, pair by
// pair. A launch of its own, since its registers would slow down the conversion of dQ.
#pragma once
#include <fmha/bwd.h>
#include <fmha/num.h>
#include <fmha/simt/bwd.cuh>
#include <fmha/sm90/bwd/order.cuh>
#include <fmha/sm90/bwd/preprocess.cuh>

namespace fmha::sm90::bwd {

template <DType dtype, int dim>
FMHA_DEVICE bool has_non_finite(const View& x, int64_t row) {
  float zero = 0.f;
  for (int32_t d = threadIdx.x % 32; d < dim; d += 32) zero = fmaf(load_elem<dtype>(x.data, row + d), 0.f, zero);
  return __any_sync(ptx::kAllLanes, is_nan(zero));
}

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void repair_queries(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t index) {
  const QueryBlock block = resolve_query_block<spec, tile>(p, schedule, index);
  for (int32_t i = block.first; i < min(block.first + tile.block_m, block.span.seqlen_q); ++i) {
    const int64_t row = row_offset(p.dq, block.span.storage_batch, int64_t(block.span.q_row) + i, block.i_head);
    if (has_non_finite<spec.dtype_grad, spec.fwd.head_dim_qk>(p.dq, row))
      bwd_query_row<spec, simt::Warp>(p, block.span, block.i_head, i);
  }
}

// The keys of a tile of which `warps`, a bit each, found dK or dV that are not finite.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void repair_keys(const BwdParams& p, const Sm90BwdSchedule& schedule, int32_t index, uint32_t warps) {
  const Work work = resolve_work<spec, tile>(p, schedule, index);
  // A consumer warp has 16 keys; where consumers share out the dimension, one of each has the same.
  constexpr int sharers = splits_dims(tile) ? num_consumers(tile) : 1;
  for (int32_t row = 0; work.keys.begin + row < work.keys.end; ++row) {
    bool non_finite = false;
#pragma unroll
    for (int c = 0; c < sharers; ++c) non_finite |= warps >> (row / 16 + 4 * c) & 1;
    if (non_finite) bwd_key_row<spec, simt::Warp>(p, work.span, work.i_head_kv, work.keys.begin + row);
  }
}

// A warp to each tile, then one to each query block of a head. What they found is read before anything is worked out:
// behind other work a launch's code comes from memory line by line, and one that finds nothing took 8 us for the tile's
// place alone.
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void repair(const BwdParams& p, const Sm90BwdSchedule& schedule) {
  wait_for_launch_before();
  constexpr int words = num_consumer_warps(tile);
  const int32_t index = blockIdx.x * (kRowThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t q_block = index - schedule.num_tiles;
  if (q_block >= num_q_blocks_of_all(p, schedule)) return;
  const bool is_tile = q_block < 0;
  constexpr int words_of_queries = finish_ctas<spec, tile>();
  const int32_t* found = is_tile ? non_finite_keys(p) + int64_t(index) * words
                                 : non_finite_queries<tile>(p, schedule) + int64_t(q_block) * words_of_queries;
  const uint32_t non_finite = ptx::vote_ballot(lane < (is_tile ? words : words_of_queries) && found[lane] != 0);
  if (non_finite == 0) return;
  if (is_tile) {
    repair_keys<spec, tile>(p, schedule, index, non_finite);
  } else {
    repair_queries<spec, tile>(p, schedule, q_block);
  }
}

}  // namespace fmha::sm90::bwd
