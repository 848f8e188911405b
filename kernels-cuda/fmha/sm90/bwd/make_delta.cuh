// LSE in log2 and delta of the rows of all heads but the first, for DqFinish::BesideWithDelta: the warp that finishes
// dQ computes them while it has no dQ to finish, beside the products. Reading O and dO takes a tenth of a short call's
// time, and in a launch of its own the tensor cores have nothing to do meanwhile.
//
// A row's dO . O on the diagonal of `mma.sync`, eight rows at a time, takes a third of the instructions and more
// time. With fewer than 40 registers ptxas gives up `setmaxnreg` beside one (C7507).
#pragma once
#include <fmha/ptx/shared.cuh>
#include <fmha/sm90/bwd/load.cuh>
#include <fmha/sm90/bwd/preprocess.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile>
struct DeltaMaker {
  using Rows = typename Shape<spec, tile>::DoutTile;
  static_assert(tile.block_m % 32 == 0, "a lane has a row of each 32");
  static_assert(leaves_far_queries<spec>(), "a far row is measured by the launch behind");
  const BwdParams& p;
  const Maps& maps;
  const Sm90BwdSchedule& schedule;
  Smem<spec, tile>& smem;

  // Computes delta of the next query block, if there is one. `phase` is the parity of the barrier `sums_full`.
  FMHA_DEVICE bool make_one(uint32_t& phase) const {
    const bool first_lane = threadIdx.x % 32 == 0;
    const int32_t index = ptx::uniform(first_lane ? atomicAdd(p.schedulers + kNextDeltaBlock, 1) : 0);
    if (index >= num_q_blocks_of_all(p, schedule)) return false;
    const QueryBlock block = resolve_query_block<spec, tile>(p, schedule, index);
    if (block.first < block.span.seqlen_q) make(block, phase);
    __syncwarp();
    if (first_lane) {
      int32_t* made = made_query_blocks<spec, tile>(p, schedule, index / schedule.num_q_blocks);
      ptx::red_release_gpu_add(made, 1);
    }
    return true;
  }

 private:
  FMHA_DEVICE void make(const QueryBlock& block, uint32_t& phase) const {
    const SeqSpan& span = block.span;
    const int32_t lane = threadIdx.x % 32;
    if (lane == 0) {
      const int32_t row = span.q_row + block.first;
      ptx::mbarrier_arrive_expect_tx(smem.sums_full, 2 * Rows::tile_bytes);
      const int32_t batch = span.storage_batch, head = block.i_head;
      load_rows(smem.rows_of_o, maps.o, smem.sums_full, batch, row, head, ptx::CacheHint::EvictFirst);
      load_rows(smem.rows_of_dout, maps.dout, smem.sums_full, batch, row, head, ptx::CacheHint::EvictLast);
    }
    __syncwarp();
    ptx::mbarrier_wait_parity(smem.sums_full, phase);
    phase ^= 1;
#pragma unroll 1
    for (int32_t row = lane; row < tile.block_m; row += 32) {
      const int32_t i = block.first + row;
      const bool there = i < span.seqlen_q;
      const float lse = there ? p.fwd.lse[lse_offset(p.fwd, span, block.i_head, i)] : 0.f;
      store_row_stats<spec>(p, block, i, there, lse, dot_of_row(row));
      if (has_origin<spec>(lse)) mark_far(block);
    }
  }
  FMHA_DEVICE void mark_far(const QueryBlock& block) const {
    const int32_t head = block.span.i_batch * p.fwd.num_heads_q + block.i_head;
    const int32_t index = head * schedule.num_q_blocks + block.first / tile.block_m;
    ptx::red_release_gpu_add(far_queries<spec, tile>(p, schedule, index), 1);
  }
  // Computes dO . O of a row. Eight neighbouring lanes read the same columns of eight rows, without bank conflicts.
  FMHA_DEVICE float dot_of_row(int32_t row) const {
    const uint32_t first = fmha::mma::word_offset<Rows>(row, 0);
    const uint32_t o = smem.rows_of_o.address() + first, dout = smem.rows_of_dout.address() + first;
    float dot = 0.f;
#pragma unroll 1
    for (int32_t piece = 0; piece < spec.fwd.head_dim_v / 8; ++piece) {
      const uint32_t chunk = piece / 8 * Rows::chunk_bytes, within = piece % 8 * 16;
      uint32_t os[4], douts[4];
      ptx::ld_shared_v4_b32(os, (o ^ within) + chunk);
      ptx::ld_shared_v4_b32(douts, (dout ^ within) + chunk);
      dot = plus_dot8<spec.fwd.dtype_o>(dot, os, douts);
    }
    return dot;
  }
};

}  // namespace fmha::sm90::bwd
