// The consume role: a warpgroup's 64 keys of the block against query block after query block. Head dimensions beyond 128
// leave no registers for that: there both consumers have the same 64 keys, and each half of the queries of S and half of
// the dimension of every gradient.
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
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90/bwd/epilogue.cuh>
#include <fmha/sm90/bwd/pairs.cuh>
#include <fmha/sm90/bwd/work.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile>
struct Consumer {
  using S = Shape<spec, tile>;
  using Scores = mma::Accumulator<num_columns(tile)>;
  using Operand = mma::RegisterTile<typename S::Elem, num_columns(tile)>;
  static constexpr DType dtype = S::dtype;
  using Slopes = typename Pairs<spec, tile>::Slopes;
  using Kept = typename Pairs<spec, tile>::Kept;
  static constexpr bool modifies = modifies_score(spec.fwd);

  const BwdParams& p;
  Smem<spec, tile>& smem;
  const int32_t index;  // of the warpgroup among the consumers
  const Pairs<spec, tile> pairs;
  const bool signals = threadIdx.x % 32 == 0;  // one arrival a warp

  Slot<tile.stages_q> q_slot;
  Slot<tile.stages_dout> dout_slot;
  Slot<tile.stages_ds> ds_slot;
  uint32_t dq_phase = 0, tile_phase = 0;
  mma::Accumulator<S::grad_columns> dk;
  mma::Accumulator<S::grad_columns> dv;

  FMHA_DEVICE void arrive(Barrier& barrier) const { ptx::mbarrier_arrive_if(barrier, signals); }
  FMHA_DEVICE void sync_consumers() const { ptx::bar_sync<num_consumer_threads(tile)>(kConsumersBarrier); }

  // Zeros in the rows of a tile from `first` on, by all consumers.
  template <class Tile>
  FMHA_DEVICE void zero_rows(const Tile& t, int32_t first) const {
    fmha::zero_rows(t, first, int32_t(threadIdx.x) - mma::kWarpgroup, num_consumer_threads(tile));
  }
  FMHA_DEVICE void finish_zeros() const {
    ptx::fence_proxy_async();
    sync_consumers();
  }

  FMHA_DEVICE void store_share(const mma::Accumulator<S::dq_columns>& dq) {
    ptx::mbarrier_wait_parity(smem.dq_empty[index], dq_phase ^ 1);
    const uint32_t to = ptx::shared_address(smem.dq[index]) + threadIdx.x % mma::kWarpgroup * 16;
#pragma unroll
    for (int e = 0; e < dq.num_elems; e += 4)
      ptx::st_shared_v4_f32(to + e / 4 * mma::kWarpgroup * 16, dq[e], dq[e + 1], dq[e + 2], dq[e + 3]);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(smem.dq_full[index]);
    dq_phase ^= 1;
  }

  // Q of a query block is there, and nothing but zeros behind the sequence; likewise dO. All consumers together.
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
    if (there < tile.block_m && may_be_dirty<spec>(p)) {
      zero_rows(t, there);
      finish_zeros();
    }
  }

  FMHA_DEVICE void start_scores(Scores& s, int32_t slot) const {
    mma::start_product_abt<dtype, 1>(s, smem.k, pairs.own_key(), smem.q[slot], pairs.own_query());
  }
  FMHA_DEVICE void start_dp(Scores& dp, int32_t slot) const {
    mma::start_product_abt<dtype, 1>(dp, smem.v, pairs.own_key(), smem.dout[slot], pairs.own_query());
  }
  FMHA_DEVICE void start_dq(mma::Accumulator<S::dq_columns>& dq) const {
    const auto& ds = smem.ds[ds_slot.index][0];
    if constexpr (tile.transposed_dq) {
      mma::start_product_atbt<dtype>(dq, smem.k, index * mma::kRows, ds);
    } else {
      mma::start_product_ab<dtype>(dq, ds, index * mma::kRows, smem.k);
    }
  }

  // This consumer's rows of dS^T for all.
  FMHA_DEVICE void share_ds(const Operand& ds) const {
    // The other consumers have done their dQ with what a single slot held.
    if constexpr (tile.stages_ds == 1) sync_consumers();
    mma::store_transposed(smem.ds[ds_slot.index][0], ds, index * mma::kRows);
    ptx::fence_proxy_async();
    sync_consumers();
  }

  // P after dropout; 1 / (1 - p_drop) multiplies dV when it is stored.
  FMHA_DEVICE Operand operand_of_dv(const Scores& s, const Kept& kept) const {
    Operand probs;
    if constexpr (spec.fwd.dropout) {
      Scores kept_probs;
#pragma unroll
      for (int e = 0; e < s.num_elems; ++e) kept_probs[e] = kept.keeps(e) ? s[e] : 0.f;
      probs.template from<dtype>(kept_probs, 0);
    } else {
      probs.template from<dtype>(s, 0);
    }
    return probs;
  }

  // P and dS as operands of the products, dV started: before dS is made, where registers allow it.
  FMHA_DEVICE void differentiate_and_start_dv(Scores& s, Scores& dp, Operand& ds, const Work& work,
                                              const QueryTile& at, const Slopes& slopes) {
    Kept kept;
    pairs.decide(kept, work, at);
    Operand probs = operand_of_dv(s, kept);
    const auto& dout = smem.dout[dout_slot.index];
    if constexpr (tile.early_dv) {
      mma::start_product_ab<dtype>(dv, probs, dout);
      ptx::wgmma_wait_group<1>();  // dP
    } else {
      ptx::wgmma_wait_group<0>();
    }
    pairs.differentiate(dp, s, smem.delta[dout_slot.index], kept);
    pairs.uncap(dp, slopes);
    ds.template from<dtype>(dp, 0);
    if constexpr (!tile.early_dv) mma::start_product_ab<dtype>(dv, probs, dout);
  }

  FMHA_DEVICE QueryTile query_tile(const QueryBlocks& blocks) const {
    return {blocks.i_head, blocks.current * tile.block_m + pairs.own_query()};
  }

  FMHA_DEVICE void take_v_and_start_dp(Scores& dp, const Work& work, const QueryBlocks& blocks) const {
    ptx::mbarrier_wait_parity(smem.v_full, tile_phase);
    take_dout(work, blocks.current, dout_slot);
    start_dp(dp, dout_slot.index);
  }

  // The end of a block whose dQ and dK are under way, in that order.
  FMHA_DEVICE void finish_step(const mma::Accumulator<S::dq_columns>& dq) {
    ptx::wgmma_wait_group<1>();  // dQ
    store_share(dq);
    ptx::wgmma_wait_group<0>();  // dK
    arrive(smem.q_empty[q_slot.index]);
    q_slot.advance();
    dout_slot.advance();
    ds_slot.advance();
  }

  // A query block after another, each from its scores to its dK.
  FMHA_DEVICE void walk(const Work& work, QueryBlocks blocks) {
#pragma unroll 1
    for (; blocks.more(); blocks.advance()) {
      Scores s, dp;
      take_q(work, blocks.current, q_slot);
      start_scores(s, q_slot.index);
      if constexpr (!tile.late_dp) {
        take_v_and_start_dp(dp, work, blocks);
        ptx::wgmma_wait_group<1>();
      } else {
        ptx::wgmma_wait_group<0>();
      }
      Slopes slopes;
      const QueryTile at = query_tile(blocks);
      Scores x = pairs.exponents(s, smem.lse_log2[q_slot.index], work, at, slopes);
      pairs.exponentiate(x, work, at.first_query);
      if constexpr (tile.late_dp) take_v_and_start_dp(dp, work, blocks);
      Operand ds;
      differentiate_and_start_dv(x, dp, ds, work, at, slopes);
      share_ds(ds);
      mma::Accumulator<S::dq_columns> dq;
      start_dq(dq);
      ptx::wgmma_wait_group<1>();  // dV
      arrive(smem.dout_empty[dout_slot.index]);
      mma::start_product_ab<dtype>(dk, ds, smem.q[q_slot.index]);
      finish_step(dq);
    }
  }

  // The same where consumers share out the dimension: P and dS go through shared memory for both.
  FMHA_DEVICE void walk_split(const Work& work, QueryBlocks blocks) {
#pragma unroll 1
    for (; blocks.more(); blocks.advance()) {
      Scores s, dp;
      take_q(work, blocks.current, q_slot);
      start_scores(s, q_slot.index);
      take_v_and_start_dp(dp, work, blocks);
      ptx::wgmma_wait_group<1>();
      Slopes slopes;
      const QueryTile at = query_tile(blocks);
      Scores x = pairs.exponents(s, smem.lse_log2[q_slot.index], work, at, slopes);
      pairs.exponentiate(x, work, at.first_query);
      Kept kept;
      pairs.decide(kept, work, at);
      // Both consumers have done their products with what a single slot held.
      if constexpr (tile.stages_ds == 1) sync_consumers();
      const auto& [ds, probs] = smem.ds[ds_slot.index];
      mma::store_transposed(probs, operand_of_dv(x, kept), 0, pairs.own_query());
      ptx::wgmma_wait_group<0>();
      pairs.differentiate(dp, x, smem.delta[dout_slot.index], kept);
      pairs.uncap(dp, slopes);
      Operand own;
      own.template from<dtype>(dp, 0);
      mma::store_transposed(ds, own, 0, pairs.own_query());
      ptx::fence_proxy_async();
      sync_consumers();
      const int32_t first_column = S::first_column(index);
      mma::start_product_atb<dtype>(dv, probs, 0, smem.dout[dout_slot.index], first_column);
      mma::Accumulator<S::dq_columns> dq;
      mma::start_product_ab<dtype>(dq, ds, 0, smem.k, first_column);
      ptx::wgmma_wait_group<1>();  // dV
      arrive(smem.dout_empty[dout_slot.index]);
      mma::start_product_atb<dtype>(dk, ds, 0, smem.q[q_slot.index], first_column);
      finish_step(dq);
    }
  }

  // As `walk`, with the next block's scores started behind this one's dK, so that the tensor cores have work while dQ is
  // stored and, with dP, while P is made. Nothing is under way from turn to turn: ptxas would wait for each product.
  //
  //   tensor cores   dP(i)  dV(i)              dQ(i)  dK(i)  S(i+1)
  //   this group     P(i)   dS(i)  share dS(i)        store dQ(i)
  //
  // Modified scores stay as the product left them until dP is under way: their slopes need not be carried along.
  FMHA_DEVICE Scores carried(const Scores& s, const Work& work, const QueryBlocks& blocks) const {
    if constexpr (modifies) return s;
    Slopes none;
    return pairs.exponents(s, smem.lse_log2[q_slot.index], work, query_tile(blocks), none);
  }
  template <bool last>
  FMHA_DEVICE void turn(const Work& work, QueryBlocks& blocks, Scores& x) {
    Scores dp;
    take_dout(work, blocks.current, dout_slot);
    start_dp(dp, dout_slot.index);
    Slopes slopes;
    const QueryTile at = query_tile(blocks);
    if constexpr (modifies) x = pairs.exponents(x, smem.lse_log2[q_slot.index], work, at, slopes);
    pairs.exponentiate(x, work, at.first_query);
    Operand ds;
    differentiate_and_start_dv(x, dp, ds, work, at, slopes);
    share_ds(ds);
    mma::Accumulator<S::dq_columns> dq;
    start_dq(dq);
    ptx::wgmma_wait_group<1>();  // dV
    arrive(smem.dout_empty[dout_slot.index]);
    mma::start_product_ab<dtype>(dk, ds, smem.q[q_slot.index]);
    const int32_t done = q_slot.index;
    q_slot.advance();
    dout_slot.advance();
    ds_slot.advance();
    blocks.advance();
    ptx::wgmma_wait_group<1>();  // dQ
    store_share(dq);
    if constexpr (last) {
      ptx::wgmma_wait_group<0>();
    } else {
      Scores next;
      take_q(work, blocks.current, q_slot);
      start_scores(next, q_slot.index);
      ptx::wgmma_wait_group<0>();
      x = carried(next, work, blocks);
    }
    arrive(smem.q_empty[done]);
  }
  FMHA_DEVICE void walk_ahead(const Work& work, QueryBlocks blocks) {
    Scores s, x;
    take_q(work, blocks.current, q_slot);
    start_scores(s, q_slot.index);
    ptx::mbarrier_wait_parity(smem.v_full, tile_phase);
    ptx::wgmma_wait_group<0>();
    x = carried(s, work, blocks);
#pragma unroll 1
    for (int32_t left = blocks.count(); left > 1; --left) turn<false>(work, blocks, x);
    turn<true>(work, blocks, x);
  }

  FMHA_DEVICE void run_tile(const Sm90BwdSchedule& schedule, const Work& work) {
    ptx::mbarrier_wait_parity(smem.k_full, tile_phase);
    const int32_t there = work.keys.end - work.keys.begin;
    if (there < tile.block_n && may_be_dirty<spec>(p)) {
      ptx::mbarrier_wait_parity(smem.v_full, tile_phase);
      zero_rows(smem.k, there);
      zero_rows(smem.v, there);
      finish_zeros();
    }
    const QueryBlocks blocks = query_blocks<spec, tile>(p, schedule, work);
    if constexpr (tile.split_dims) {
      walk_split(work, blocks);
    } else if constexpr (tile.early_scores) {
      walk_ahead(work, blocks);
    } else {
      walk(work, blocks);
    }
    arrive(smem.kv_empty);
    tile_phase ^= 1;
  }

  FMHA_DEVICE void run(const Sm90BwdSchedule& schedule) {
    for_each_tile<tile>(schedule, smem, signals, [&](int32_t i) {
      const Work work = resolve_work<spec, tile>(p, schedule, i);
      if (work.keys.empty()) return;
      dk.clear();
      dv.clear();
      // Keys that no query sees have gradients of 0.
      if (!work.q_blocks.empty()) run_tile(schedule, work);
      const int32_t row = pairs.own_key() + mma::fragment_row(), column = S::first_column(index);
      store_rows<spec.dtype_grad, spec.fwd.head_dim_qk, tile.vector_store>(dk, p.dk, work, row, column,
                                                                             p.fwd.softmax_scale);
      store_rows<spec.dtype_grad, spec.fwd.head_dim_v, tile.vector_store>(
          dv, p.dv, work, row, column, spec.fwd.dropout ? p.fwd.dropout_scale : 1.f);
      if constexpr (repairs<spec>()) {
        bool suspect = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) suspect |= has_non_finite(dk, r) || has_non_finite(dv, r);
        suspect = __any_sync(ptx::kAllLanes, suspect);
        const int32_t warp = threadIdx.x / 32 - 4;
        if (signals) p.suspects[i * num_consumer_warps(tile) + warp] = suspect;
        __syncwarp();
      }
    });
  }
};

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void consume(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem) {
  const int32_t index = ptx::uniform(threadIdx.x / mma::kWarpgroup) - 1;
  Consumer<spec, tile> consumer{p, smem, index, {p, index, p.fwd.softmax_scale * kLog2E}};
  consumer.run(schedule);
}

}  // namespace fmha::sm90::bwd
