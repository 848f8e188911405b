// A consumer warpgroup: its registers, its barriers, and the steps that every loop of the consume role takes
// (consume.cuh).
//
//   S^T  = K Q^T            scores, a key to a row: then P^T and dS^T lie in registers as A operands do
//   dP^T = V dO^T
//   P^T  = exp2(S^T - LSE),  dS^T = P^T (dP^T - delta)
//   dV  += P^T dO,  dK += dS^T Q
//   dQ   = dS K             of all keys of the block: dS goes through shared memory
#pragma once
#include <fmha/common/zero_rows.cuh>
#include <fmha/mma/sm90/transposed_product.cuh>
#include <fmha/ptx/barrier.cuh>
#include <fmha/sm90/bwd/dq/output.cuh>
#include <fmha/sm90/bwd/pairs.cuh>

namespace fmha::sm90::bwd {

// A consumer warpgroup's state. `Keys` says which keys queries see.
template <BwdSpec bwd_spec, Sm90BwdTile bwd_tile, class Keys = EveryKey>
struct Consumer {
  static constexpr BwdSpec spec = bwd_spec;
  static constexpr Sm90BwdTile tile = bwd_tile;
  using S = Shape<bwd_spec, bwd_tile>;
  using Scores = mma::Accumulator<num_columns(bwd_tile)>;
  using Operand = mma::RegisterTile<typename S::Elem, num_columns(bwd_tile)>;
  using Dq = mma::Accumulator<S::dq_columns>;
  static constexpr DType dtype = S::dtype;
  using Slopes = typename Pairs<bwd_spec, bwd_tile>::Slopes;
  using Biases = typename Pairs<bwd_spec, bwd_tile>::Biases;
  using Kept = typename Pairs<bwd_spec, bwd_tile>::Kept;
  using Shown = typename Pairs<bwd_spec, bwd_tile, Keys>::Shown;

  const BwdParams& p;
  Smem<bwd_spec, bwd_tile>& smem;
  const int32_t index;  // of the warpgroup among the consumers
  const Pairs<bwd_spec, bwd_tile, Keys> pairs;
  const bool signals = threadIdx.x % 32 == 0;  // one arrival a warp

  Slot<bwd_tile.stages_q> q_slot;
  Slot<bwd_tile.stages_dout> dout_slot;
  Slot<bwd_tile.stages_ds> ds_slot;
  DqOutput<bwd_spec, bwd_tile> dq_output{p, smem, index};
  uint32_t tile_phase = 0;
  mma::Accumulator<S::dk_columns> dk;
  mma::Accumulator<max(S::dv_columns, 8)> dv;  // of no columns zeros, which nothing is added to

  FMHA_DEVICE void arrive(Barrier& barrier) const { ptx::mbarrier_arrive_if(barrier, signals); }
  // Releases a slot of Q or dO after its last read: arrives at each CTA that loads a part of it.
  FMHA_DEVICE void release(Barrier& empty) const {
    if constexpr (in_clusters(tile)) {
      const uint32_t rank = threadIdx.x % 32;
      ptx::mbarrier_arrive_at_if(empty, rank, rank < uint32_t(cluster_size(tile)));
    } else {
      arrive(empty);
    }
  }
  FMHA_DEVICE void sync_consumers() const { ptx::bar_sync<num_consumer_threads(tile)>(kConsumersBarrier); }

  // Writes zeros to a tile's rows from `first` on. All consumers share the work.
  template <class Tile>
  FMHA_DEVICE void zero_rows(const Tile& t, int32_t first) const {
    fmha::zero_rows(t, first, int32_t(threadIdx.x) - mma::kWarpgroup, num_consumer_threads(tile));
  }
  FMHA_DEVICE void finish_zeros() const {
    ptx::fence_proxy_async();
    sync_consumers();
  }

  // Waits until Q (or dO) of a query block has arrived, and writes zeros to rows beyond the sequence. All consumers
  // must call it.
  FMHA_DEVICE void take_q(const Work& work, int32_t block, const Slot<tile.stages_q>& slot) const {
    ptx::mbarrier_wait_parity(smem.q_full[slot.index], slot.phase);
    zero_behind(work, block, smem.q[slot.index]);
  }
  FMHA_DEVICE void take_dout(const Work& work, int32_t block, const Slot<tile.stages_dout>& slot) const {
    ptx::mbarrier_wait_parity(smem.dout_full[slot.index], slot.phase);
    zero_behind(work, block, smem.dout[slot.index]);
  }
  template <class Tile>
  FMHA_DEVICE void zero_behind(const Work& work, int32_t block, const Tile& t) const {
    const int32_t there = work.span.seqlen_q - block * tile.block_m;
    if (there < tile.block_m && has_rows_behind<spec>(p)) {
      zero_rows(t, there);
      finish_zeros();
    }
  }

  // Starts the products S and dP of a block's queries, or of part `part` of them in the loop of half blocks
  // (half_blocks.cuh).
  FMHA_DEVICE void start_scores(Scores& s, int32_t slot, int part = 0) const {
    mma::start_product_abt<dtype, 1, S::dim_qk>(s, smem.k, pairs.own_key(), smem.q[slot], pairs.own_query(part));
  }
  FMHA_DEVICE void start_dp(Scores& dp, int32_t slot, int part = 0) const {
    mma::start_product_abt<dtype, 1, S::dim_v>(dp, smem.v, pairs.own_key(), smem.dout[slot], pairs.own_query(part));
  }
  FMHA_DEVICE void take_v_and_start_dp(Scores& dp, const Work& work, const QueryBlocks& blocks) const {
    ptx::mbarrier_wait_parity(smem.v_full, tile_phase);
    take_dout(work, blocks.current, dout_slot);
    start_dp(dp, dout_slot.index);
  }

  FMHA_DEVICE QueryTile query_tile(const QueryBlocks& blocks, int part = 0) const {
    const int32_t first_row = pairs.own_query(part);
    return {blocks.i_head, blocks.current * tile.block_m + first_row, first_row};
  }

  // Computes P of a block from its S.
  template <Edges edges>
  FMHA_DEVICE Scores probs(const Scores& s, const Work& work, const QueryTile& at, const Biases& biases,
                           Slopes& slopes, const Shown& shown = {}) const {
    Scores x = pairs.exponents(s, smem.lse_log2[q_slot.index], work, at, biases, slopes);
    pairs.template exponentiate<edges>(x, work, at, shown);
    return x;
  }

  // P after dropout; 1 / (1 - p_drop) multiplies dV when it is stored.
  FMHA_DEVICE Operand operand_of_dv(const Scores& s, const Kept& kept) const {
    Operand probs;
    if constexpr (spec.fwd.dropout) {
      probs.template from<dtype>(kept.kept_of(s), 0);
    } else {
      probs.template from<dtype>(s, 0);
    }
    return probs;
  }

  // Ends the step of a block, while its products dQ and dK, issued in that order, are in flight.
  FMHA_DEVICE void finish_step(const Dq& dq, const Work& work, const QueryBlocks& blocks) {
    ptx::wgmma_wait_group<1>();  // dQ
    dq_output.store(dq, work, blocks);
    ptx::wgmma_wait_group<0>();  // dK
    release(smem.q_empty[q_slot.index]);
    advance_slots();
  }
  FMHA_DEVICE void advance_slots() {
    q_slot.advance();
    dout_slot.advance();
    ds_slot.advance();
  }

  FMHA_DEVICE bool is_edge(const Work& work, const QueryBlocks& blocks) const {
    return pairs.is_edge(work, query_tile(blocks).first_query);
  }
  // Calls `step` for block after block while `more` holds. With `edges_apart`, blocks that the mask or the end of the
  // keys cuts have a loop of their own, so that the other loop, which most blocks take, has no mask. Lists have cut
  // blocks first.
  template <class Blocks, class More, class Step>
  FMHA_DEVICE void for_each_block(const Work& work, Blocks& blocks, More more, Step step) {
    if constexpr (Keys::has_tile_list && tile.edges_apart) {
      while (more()) {
#pragma unroll 1
        for (; more() && blocks.is_cut(); blocks.advance()) step.template operator()<Edges::All>();
#pragma unroll 1
        for (; more() && !blocks.is_cut(); blocks.advance()) step.template operator()<Edges::None>();
      }
    } else if constexpr (Keys::has_tile_list) {
#pragma unroll 1
      for (; more(); blocks.advance()) step.template operator()<Edges::All>();
    } else if constexpr (tile.edges_apart) {
      while (more()) {
#pragma unroll 1
        for (; more() && is_edge(work, blocks); blocks.advance()) step.template operator()<Edges::All>();
#pragma unroll 1
        for (; more() && !is_edge(work, blocks); blocks.advance()) step.template operator()<Edges::None>();
      }
    } else {
#pragma unroll 1
      for (; more(); blocks.advance()) step.template operator()<Edges::Some>();
    }
  }
};

}  // namespace fmha::sm90::bwd
