// The consume role: a warpgroup's 64 keys of the block against query block after query block. Head dimensions beyond 128
// leave no registers for that: there all consumers have the same 64 keys, and each a part of the queries of S and a part
// of the dimension of every gradient.
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
#include <fmha/ptx/flag.cuh>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90/bwd/epilogue.cuh>
#include <fmha/sm90/bwd/head_sums.cuh>
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
  using Biases = typename Pairs<spec, tile>::Biases;
  using Kept = typename Pairs<spec, tile>::Kept;
  static constexpr bool modifies = modifies_score(spec.fwd);
  // Where a query block is shorter than a key block, a mask leaves some of a warpgroup's blocks nothing to do.
  static constexpr bool passes_hidden = spec.fwd.mask != MaskKind::Full && tile.block_m < tile.block_n;

  const BwdParams& p;
  Smem<spec, tile>& smem;
  const int32_t index;  // of the warpgroup among the consumers
  const Pairs<spec, tile> pairs;
  const bool signals = threadIdx.x % 32 == 0;  // one arrival a warp

  Slot<tile.stages_q> q_slot;
  Slot<tile.stages_dout> dout_slot;
  Slot<tile.stages_ds> ds_slot;
  uint32_t dq_phase = 0, tile_phase = 0;
  int32_t dropout_head = -1;  // whose parts the generator has, of the tile's keys
  mma::Accumulator<S::dk_columns> dk;
  mma::Accumulator<S::dv_columns> dv;

  FMHA_DEVICE void arrive(Barrier& barrier) const { ptx::mbarrier_arrive_if(barrier, signals); }
  // A block of Q or dO has been used: said to all that load parts of it.
  FMHA_DEVICE void release(Barrier& empty) const {
    if constexpr (tile.cluster > 1) {
      const uint32_t rank = threadIdx.x % 32;
      ptx::mbarrier_arrive_at_if(empty, rank, rank < uint32_t(tile.cluster));
    } else {
      arrive(empty);
    }
  }
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

  // This consumer's share of a block's dQ on its way to memory.
  FMHA_DEVICE void store_share(const mma::Accumulator<S::dq_columns>& dq, const Work& work, const QueryBlocks& blocks) {
    if constexpr (tile.direct_dq) {
      add_share(dq, work, blocks);
    } else {
      hand_over_share(dq);
    }
  }
  FMHA_DEVICE int32_t share() const { return cluster_rank(tile) * S::consumers + index; }
  FMHA_DEVICE float* share_of(const Work& work, const QueryBlocks& blocks) const {
    const int32_t within = share() * S::dq_share + threadIdx.x % mma::kWarpgroup * 4;
    return p.dq_sums + first_row_of<tile>(p, work, blocks) * S::dim + within;
  }
  template <int first, int last>
  FMHA_DEVICE void add_elems(float* to, const mma::Accumulator<S::dq_columns>& dq, bool is_first = false) const {
    if (is_first) {
#pragma unroll
      for (int e = first; e < last; e += 4)
        ptx::st_global_v4_f32(to + e * mma::kWarpgroup, dq[e], dq[e + 1], dq[e + 2], dq[e + 3]);
    } else {
#pragma unroll
      for (int e = first; e < last; e += 4)
        ptx::red_global_add_v4_f32(to + e * mma::kWarpgroup, dq[e], dq[e + 1], dq[e + 2], dq[e + 3]);
    }
  }
  FMHA_DEVICE void add_share(const mma::Accumulator<S::dq_columns>& dq, const Work& work, const QueryBlocks& blocks) {
    float* sums = share_of(work, blocks);
    add_elems<0, S::dq_columns / 2>(sums, dq, wait_for_turn());
    end_turn();
  }

  // A turn at a block of dQ, where there are any: whether it is the first, when sums are stored, and nobody has to put zeros
  // there before. Who keeps the turns (keep_turns.cuh) is asked in shared memory: the counter's answer and the fence behind the
  // additions took some 900 of a step's 4750 clocks at D 256, both together.
  FMHA_DEVICE bool wait_for_turn() const {
    if constexpr (!takes_turns<spec>()) return false;
    ptx::mbarrier_wait_parity(smem.dq_empty[0], dq_phase);
    return smem.is_first_turn;
  }
  FMHA_DEVICE void end_turn() {
    if constexpr (takes_turns<spec>()) {
      __syncwarp();
      arrive(smem.dq_full[index]);
      dq_phase ^= 1;
    }
  }
  // Accumulators, one behind the other.
  template <class... Accumulators>
  FMHA_DEVICE void hand_over_share(const Accumulators&... dq) {
    ptx::mbarrier_wait_parity(smem.dq_empty[index], dq_phase ^ 1);
    uint32_t to = ptx::shared_address(smem.dq[index]) + threadIdx.x % mma::kWarpgroup * 16;
    const auto store = [&](const auto& part) {
#pragma unroll
      for (int e = 0; e < part.num_elems; e += 4, to += mma::kWarpgroup * 16)
        ptx::st_shared_v4_f32(to, part[e], part[e + 1], part[e + 2], part[e + 3]);
    };
    (store(dq), ...);
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

  FMHA_DEVICE void start_scores(Scores& s, int32_t slot, int part = 0) const {
    mma::start_product_abt<dtype, 1>(s, smem.k, pairs.own_key(), smem.q[slot], pairs.own_query(part));
  }
  FMHA_DEVICE void start_dp(Scores& dp, int32_t slot, int part = 0) const {
    mma::start_product_abt<dtype, 1, S::dim_v>(dp, smem.v, pairs.own_key(), smem.dout[slot], pairs.own_query(part));
  }
  FMHA_DEVICE void start_dq(mma::Accumulator<S::dq_columns>& dq) const {
    const auto& ds = smem.ds[ds_slot.index][0];
    if constexpr (tile.transposed_dq) {
      mma::start_product_atbt<dtype>(dq, smem.k, index * mma::kRows, ds);
    } else {
      mma::start_product_ab<dtype>(dq, ds, index * mma::kRows, smem.k);
    }
  }

  // This consumer's rows of dS^T for all; they are there when `sync_consumers` says so.
  template <int part = 0>
  FMHA_DEVICE void store_ds(const Operand& ds) const {
    // The other consumers have done their dQ with what a single slot held.
    if constexpr (tile.stages_ds == 1 && part == 0) sync_consumers();
    mma::store_transposed(smem.ds[ds_slot.index][0], ds, index * mma::kRows, pairs.own_query(part));
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

  FMHA_DEVICE void start_dv(const Operand& probs) {
    mma::start_product_ab<dtype>(dv, probs, smem.dout[dout_slot.index]);
  }
  // P and dS as operands of the products, dS stored, dV started: before dS is made where registers allow it, else behind
  // its stores, which are under way while the instructions of dV are issued.
  FMHA_DEVICE void differentiate_and_start_dv(Scores& s, Scores& dp, Operand& ds, const QueryTile& at,
                                              const Slopes& slopes, const Kept& kept) {
    Operand probs = operand_of_dv(s, kept);
    if constexpr (tile.early_dv) {
      start_dv(probs);
      ptx::wgmma_wait_group<1>();  // dP
    } else {
      ptx::wgmma_wait_group<0>();
    }
    pairs.differentiate(dp, s, smem.delta[dout_slot.index], at, kept);
    pairs.uncap(dp, slopes);
    ds.template from<dtype>(dp, 0);
    store_ds(ds);
    if constexpr (!tile.early_dv) start_dv(probs);
  }

  // The three products that take P and dS; dV is done, dQ and dK are under way.
  FMHA_DEVICE void start_gradients(mma::Accumulator<S::dq_columns>& dq, Scores& x, Scores& dp, const QueryTile& at,
                                   const Slopes& slopes, const Kept& kept) {
    Operand ds;
    differentiate_and_start_dv(x, dp, ds, at, slopes, kept);
    ptx::fence_proxy_async();
    sync_consumers();
    start_dq(dq);
    ptx::wgmma_wait_group<1>();  // dV
    release(smem.dout_empty[dout_slot.index]);
    mma::start_product_ab<dtype>(dk, ds, smem.q[q_slot.index]);
  }

  FMHA_DEVICE QueryTile query_tile(const QueryBlocks& blocks, int part = 0) const {
    const int32_t first_row = pairs.own_query(part);
    return {blocks.i_head, blocks.current * tile.block_m + first_row, first_row};
  }

  FMHA_DEVICE void take_v_and_start_dp(Scores& dp, const Work& work, const QueryBlocks& blocks) const {
    ptx::mbarrier_wait_parity(smem.v_full, tile_phase);
    take_dout(work, blocks.current, dout_slot);
    start_dp(dp, dout_slot.index);
  }

  // The end of a block whose dQ and dK are under way, in that order.
  FMHA_DEVICE void finish_step(const mma::Accumulator<S::dq_columns>& dq, const Work& work, const QueryBlocks& blocks) {
    ptx::wgmma_wait_group<1>();  // dQ
    store_share(dq, work, blocks);
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
  // Calls `step` for block after block while `more` holds. Blocks that are cut and those that are not have loops of their
  // own, where the tile has it so: then most have no mask in theirs.
  template <class More, class Step>
  FMHA_DEVICE void for_each_block(const Work& work, QueryBlocks& blocks, More more, Step step) {
    if constexpr (tile.edges_apart) {
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

  // P of the block whose product S is.
  template <Edges edges>
  FMHA_DEVICE Scores probs(const Scores& s, const Work& work, const QueryTile& at, const Biases& biases,
                           Slopes& slopes) const {
    Scores x = pairs.exponents(s, smem.lse_log2[q_slot.index], work, at, biases, slopes);
    pairs.template exponentiate<edges>(x, work, at.first_query);
    return x;
  }

  FMHA_DEVICE int32_t batch_head(const Work& work, int32_t i_head) const { return work.span.i_batch * p.fwd.num_heads_q + i_head; }
  FMHA_DEVICE auto& dropout_parts() const { return smem.dropout_parts[threadIdx.x / 32 - 4]; }
  // What dropout's generator has of the keys is made once for all queries of a head.
  FMHA_DEVICE void begin_head(const Work& work, int32_t i_head) {
    if constexpr (keeps_dropout_parts<spec, tile>()) {
      if (i_head == dropout_head) return;
      dropout_head = i_head;
      Kept::begin_head(p.fwd, dropout_parts(), batch_head(work, i_head), pairs.first_key(work));
    }
  }

  // A block whose queries see none of this warpgroup's keys: zeros of dS, and its share of the others' dQ.
  FMHA_DEVICE void pass_step(const Work& work, const QueryBlocks& blocks) {
    take_q(work, blocks.current, q_slot);
    take_dout(work, blocks.current, dout_slot);
    release(smem.dout_empty[dout_slot.index]);
    Operand ds = {};
    store_ds(ds);
    ptx::fence_proxy_async();
    sync_consumers();
    mma::Accumulator<S::dq_columns> dq;
    start_dq(dq);
    ptx::wgmma_wait_group<0>();
    store_share(dq, work, blocks);
    release(smem.q_empty[q_slot.index]);
    advance_slots();
  }

  // A query block after another, each from its scores to its dK.
  template <Edges edges>
  FMHA_DEVICE void step(const Work& work, const QueryBlocks& blocks) {
    Scores s, dp;
    const QueryTile at = query_tile(blocks);
    if constexpr (edges == Edges::All && passes_hidden) {
      if (pairs.sees_none(work, at.first_query)) return pass_step(work, blocks);
    }
    begin_head(work, at.i_head);
    take_q(work, blocks.current, q_slot);
    start_scores(s, q_slot.index);
    if constexpr (!tile.late_dp) take_v_and_start_dp(dp, work, blocks);
    const Biases biases = pairs.biases(work, at);
    Kept kept;
    if constexpr (keeps_dropout_parts<spec, tile>()) {
      kept.decide(p.fwd, dropout_parts(), batch_head(work, at.i_head), at.first_query);
    } else {
      pairs.decide(kept, work, at);
    }
    ptx::wgmma_wait_group<tile.late_dp ? 0 : 1>();
    Slopes slopes;
    Scores x = probs<edges>(s, work, at, biases, slopes);
    if constexpr (tile.late_dp) take_v_and_start_dp(dp, work, blocks);
    mma::Accumulator<S::dq_columns> dq;
    start_gradients(dq, x, dp, at, slopes, kept);
    finish_step(dq, work, blocks);
  }
  FMHA_DEVICE void walk(const Work& work, QueryBlocks blocks) {
    dropout_head = -1;
    for_each_block(work, blocks, [&] { return blocks.more(); }, [&]<Edges edges>() { step<edges>(work, blocks); });
  }

  // The same where dK and dV leave registers for the scores of half of a block's queries at a time (`score_parts`). The first
  // half's dV is under way beside the second's P and dS; dK, of both, beside dQ's way out.
  //
  //   tensor cores   S(0)  dP(0)  S(1)         dV(0)  dP(1)               dV(1)  dQ    dK
  //   this group              P(0)       dS(0)              P(1)   dS(1)               store dQ
  FMHA_DEVICE Operand part_of_ds(Scores& dp, const Scores& probs, const QueryTile& at, const Slopes& slopes,
                                 const Kept& kept) const {
    pairs.differentiate(dp, probs, smem.delta[dout_slot.index], at, kept);
    pairs.uncap(dp, slopes);
    Operand ds;
    ds.template from<dtype>(dp, 0);
    return ds;
  }
  template <int part>
  FMHA_DEVICE void start_part_of_dv(const Operand& probs) {
    mma::start_register_product_ab<dtype>(dv, probs, smem.dout[dout_slot.index], pairs.own_query(part));
  }
  FMHA_DEVICE void step_parts(const Work& work, const QueryBlocks& blocks) {
    Scores s, dp;
    take_q(work, blocks.current, q_slot);
    start_scores(s, q_slot.index, 0);
    take_v_and_start_dp(dp, work, blocks);
    QueryTile at = query_tile(blocks, 0);
    Biases biases = pairs.biases(work, at);
    Kept kept;
    pairs.decide(kept, work, at);
    ptx::wgmma_wait_group<1>();  // S(0)
    Slopes slopes;
    Scores x = probs<Edges::Some>(s, work, at, biases, slopes);
    start_scores(s, q_slot.index, 1);
    Operand of_dv = operand_of_dv(x, kept);
    ptx::wgmma_wait_group<1>();  // dP(0)
    store_ds<0>(part_of_ds(dp, x, at, slopes, kept));
    start_part_of_dv<0>(of_dv);
    start_dp(dp, dout_slot.index, 1);
    at = query_tile(blocks, 1);
    biases = pairs.biases(work, at);
    pairs.decide(kept, work, at);
    ptx::wgmma_wait_group<2>();  // S(1)
    x = probs<Edges::Some>(s, work, at, biases, slopes);
    ptx::wgmma_wait_group<0>();  // dV(0), dP(1)
    of_dv = operand_of_dv(x, kept);
    store_ds<1>(part_of_ds(dp, x, at, slopes, kept));
    start_part_of_dv<1>(of_dv);
    ptx::fence_proxy_async();
    sync_consumers();
    ptx::wgmma_wait_group<0>();  // dV(1): dQ takes its operand's registers
    release(smem.dout_empty[dout_slot.index]);
    const auto& ds = smem.ds[ds_slot.index][0];
    mma::Accumulator<S::Chunks::whole> dq;
    mma::Accumulator<S::Chunks::half> dq_of_half;
    mma::start_product_ab<dtype>(dq, ds, 0, smem.k, S::Chunks::first_of_whole(index));
    mma::start_product_ab<dtype>(dq_of_half, ds, 0, smem.k, S::Chunks::first_of_half(index));
    mma::start_product_atb<dtype>(dk, ds, index * mma::kRows, smem.q[q_slot.index], 0);
    ptx::wgmma_wait_group<1>();  // dQ
    hand_over_share(dq, dq_of_half);
    ptx::wgmma_wait_group<0>();  // dK
    release(smem.q_empty[q_slot.index]);
    advance_slots();
  }
  FMHA_DEVICE void walk_parts(const Work& work, QueryBlocks blocks) {
#pragma unroll 1
    for (; blocks.more(); blocks.advance()) step_parts(work, blocks);
  }

  // The same where consumers share out the dimension: P and dS go through shared memory for both.
  FMHA_DEVICE void share_probs(const Scores& x, const Kept& kept) const {
    // All consumers have done their products with what a single slot held.
    if constexpr (tile.stages_ds == 1) sync_consumers();
    mma::store_transposed(smem.ds[ds_slot.index][1], operand_of_dv(x, kept), 0, pairs.own_query());
  }
  FMHA_DEVICE void share_own_ds(Scores& dp, const Scores& x, const QueryTile& at, const Slopes& slopes,
                                const Kept& kept) const {
    pairs.differentiate(dp, x, smem.delta[dout_slot.index], at, kept);
    pairs.uncap(dp, slopes);
    Operand own;
    own.template from<dtype>(dp, 0);
    // The other CTA has what this slot held.
    if constexpr (tile.cluster > 1) ptx::mbarrier_wait_parity(smem.other_ds_empty[ds_slot.index], ds_slot.phase ^ 1);
    mma::store_transposed(smem.ds[ds_slot.index][0], own, 0, pairs.own_query());
    ptx::fence_proxy_async();
    sync_consumers();
  }
  FMHA_DEVICE void start_own_dq(mma::Accumulator<S::dq_columns>& dq) const {
    const auto& ds = smem.ds[ds_slot.index][0];
    if constexpr (tile.transposed_dq) {
      mma::start_product_atbt<dtype>(dq, smem.k, S::first_column(index), ds);
    } else {
      mma::start_product_ab<dtype>(dq, ds, 0, smem.k, S::first_column(index));
    }
  }
  FMHA_DEVICE void start_own_dv() {
    mma::start_product_atb<dtype>(dv, smem.ds[ds_slot.index][1], 0, smem.dout[dout_slot.index], S::first_column(index));
  }
  FMHA_DEVICE void start_own_dk() {
    mma::start_product_atb<dtype>(dk, smem.ds[ds_slot.index][0], 0, smem.q[q_slot.index], S::first_column(index));
  }
  template <Edges edges>
  FMHA_DEVICE void step_split(const Work& work, const QueryBlocks& blocks) {
    Scores s, dp;
    take_q(work, blocks.current, q_slot);
    start_scores(s, q_slot.index);
    take_v_and_start_dp(dp, work, blocks);
    const QueryTile at = query_tile(blocks);
    Kept kept;
    pairs.decide(kept, work, at);
    ptx::wgmma_wait_group<1>();
    Slopes slopes;
    Scores x = probs<edges>(s, work, at, pairs.biases(work, at), slopes);
    share_probs(x, kept);
    ptx::wgmma_wait_group<0>();
    share_own_ds(dp, x, at, slopes, kept);
    start_own_dv();
    mma::Accumulator<S::dq_columns> dq;
    start_own_dq(dq);
    ptx::wgmma_wait_group<1>();  // dV
    release(smem.dout_empty[dout_slot.index]);
    start_own_dk();
    finish_step(dq, work, blocks);
  }
  FMHA_DEVICE void walk_split(const Work& work, QueryBlocks blocks) {
    for_each_block(work, blocks, [&] { return blocks.more(); }, [&]<Edges edges>() { step_split<edges>(work, blocks); });
  }

  // As `walk_split`, with the next block's S started behind this one's three products, and its dP where half of dQ has left
  // the registers. L2 takes longer to add dQ than the tensor cores need for any one product, and a warp waits for it.
  template <bool last, Edges edges>
  FMHA_DEVICE void turn_split(const Sm90BwdSchedule& schedule, const Work& work, const QueryBlocks& blocks, Scores& s,
                              Scores& dp, Kept& kept) {
    Slopes slopes;
    const QueryTile at = query_tile(blocks);
    Scores x = probs<edges>(s, work, at, pairs.biases(work, at), slopes);
    share_probs(x, kept);
    share_own_ds(dp, x, at, slopes, kept);
    mma::Accumulator<S::dq_columns> dq;
    start_own_dq(dq);
    start_own_dv();
    start_own_dk();
    const int32_t done_q = q_slot.index, done_dout = dout_slot.index;
    advance_slots();
    constexpr int all = S::dq_columns / 2, half = all / 2;
    if constexpr (!last) {
      float* sums = share_of(work, blocks);
      QueryBlocks next = blocks;
      next.advance();
      take_q(work, next.current, q_slot);
      start_scores(s, q_slot.index);
      ptx::wgmma_wait_group<3>();  // dQ
      const bool is_first = wait_for_turn();
      add_elems<0, half>(sums, dq, is_first);
      take_dout(work, next.current, dout_slot);
      start_dp(dp, dout_slot.index);
      add_elems<half, all>(sums, dq, is_first);
      end_turn();
      pairs.decide(kept, work, query_tile(next));
      ptx::wgmma_wait_group<2>();  // dV, dK
      release(smem.dout_empty[done_dout]);
      release(smem.q_empty[done_q]);
      ptx::wgmma_wait_group<0>();
    } else {
      ptx::wgmma_wait_group<2>();  // dQ
      add_share(dq, work, blocks);
      ptx::wgmma_wait_group<0>();
      release(smem.dout_empty[done_dout]);
      release(smem.q_empty[done_q]);
    }
  }

  // The same by the CTAs of a cluster, which send each other their dS while the tensor cores have dK and dQ of their own. dV
  // is started before dS is made: dO, of which there is one block at a time, is then free for the next.
  //
  //   tensor cores          dV(i)    dK(i)  dQ(i)  dQ(i) of the other's dS  S(i+1)        dP(i+1)
  //   this group     P(i)   dS(i)    send dS(i)                             half of dQ    the rest   P(i+1)
  template <bool last, Edges edges>
  FMHA_DEVICE void turn_cluster(const Sm90BwdSchedule& schedule, const Work& work, const QueryBlocks& blocks, Scores& s,
                                Scores& dp, Kept& kept) {
    Slopes slopes;
    const QueryTile at = query_tile(blocks);
    Scores x = probs<edges>(s, work, at, pairs.biases(work, at), slopes);
    share_probs(x, kept);
    ptx::fence_proxy_async();
    sync_consumers();
    start_own_dv();
    share_own_ds(dp, x, at, slopes, kept);
    send_ds();
    start_own_dk();
    mma::Accumulator<S::dq_columns> dq;
    mma::start_product_ab<dtype>(dq, smem.ds[ds_slot.index][0], 0, smem.k, share() * S::dq_columns);
    ptx::wgmma_wait_group<2>();  // dV
    release(smem.dout_empty[dout_slot.index]);
    ptx::mbarrier_wait_parity(smem.other_ds_full[ds_slot.index], ds_slot.phase);
    mma::start_product_ab<dtype, true>(dq, smem.other_ds[ds_slot.index], 0, smem.other_k, index * S::dq_columns);
    Barrier& done_q = smem.q_empty[q_slot.index];
    Barrier& done_ds = smem.other_ds_empty[ds_slot.index];
    advance_slots();
    constexpr int all = S::dq_columns / 2, half = all / 2;
    if constexpr (!last) {
      float* sums = share_of(work, blocks);
      QueryBlocks next = blocks;
      next.advance();
      take_q(work, next.current, q_slot);
      start_scores(s, q_slot.index);
      ptx::wgmma_wait_group<1>();  // dK, dQ
      release(done_q);
      ptx::mbarrier_arrive_at_if(done_ds, cluster_rank(tile) ^ 1, signals);
      const bool is_first = wait_for_turn();
      add_elems<0, half>(sums, dq, is_first);
      take_dout(work, next.current, dout_slot);
      start_dp(dp, dout_slot.index);
      add_elems<half, all>(sums, dq, is_first);
      end_turn();
      pairs.decide(kept, work, query_tile(next));
      ptx::wgmma_wait_group<0>();
    } else {
      ptx::wgmma_wait_group<0>();
      release(done_q);
      ptx::mbarrier_arrive_at_if(done_ds, cluster_rank(tile) ^ 1, signals);
      add_share(dq, work, blocks);
    }
  }
  // This CTA's dS to the other one, by one thread.
  FMHA_DEVICE void send_ds() const {
    if (threadIdx.x == mma::kWarpgroup) {
      const int32_t other = cluster_rank(tile) ^ 1;
      Barrier& full = smem.other_ds_full[ds_slot.index];
      ptx::mbarrier_arrive_expect_tx_at(ptx::address_at(full, other), S::DsTile::tile_bytes);
      ptx::cp_async_bulk_at(smem.other_ds[ds_slot.index].address(), other, smem.ds[ds_slot.index][0].address(),
                            S::DsTile::tile_bytes, full);
    }
    __syncwarp();
  }
  // dK and dV leave through the memory of dS: the other CTA has what this one sent.
  FMHA_DEVICE void wait_until_sent() const {
    Slot<tile.stages_ds> slot = ds_slot;
    for (int i = 0; i < tile.stages_ds; ++i, slot.advance())
      ptx::mbarrier_wait_parity(smem.other_ds_empty[slot.index], slot.phase ^ 1);
  }

  template <bool last, Edges edges>
  FMHA_DEVICE void turn_ahead(const Sm90BwdSchedule& schedule, const Work& work, const QueryBlocks& blocks, Scores& s,
                              Scores& dp, Kept& kept) {
    if constexpr (tile.cluster > 1) {
      turn_cluster<last, edges>(schedule, work, blocks, s, dp, kept);
    } else {
      turn_split<last, edges>(schedule, work, blocks, s, dp, kept);
    }
  }
  FMHA_DEVICE void walk_split_ahead(const Sm90BwdSchedule& schedule, const Work& work, QueryBlocks blocks) {
    Scores s, dp;
    take_q(work, blocks.current, q_slot);
    start_scores(s, q_slot.index);
    take_v_and_start_dp(dp, work, blocks);
    Kept kept;
    pairs.decide(kept, work, query_tile(blocks));
    ptx::wgmma_wait_group<0>();
    int32_t left = blocks.count();
    for_each_block(work, blocks, [&] { return left > 1; }, [&]<Edges edges>() {
      turn_ahead<false, edges>(schedule, work, blocks, s, dp, kept);
      --left;
    });
    turn_ahead<true, Edges::Some>(schedule, work, blocks, s, dp, kept);
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
    return pairs.exponents(s, smem.lse_log2[q_slot.index], work, query_tile(blocks), {}, none);
  }
  template <bool last, Edges edges>
  FMHA_DEVICE void turn(const Work& work, const QueryBlocks& blocks, Scores& x, Kept& kept) {
    Scores dp;
    take_dout(work, blocks.current, dout_slot);
    start_dp(dp, dout_slot.index);
    Slopes slopes;
    const QueryTile at = query_tile(blocks);
    if constexpr (modifies)
      x = pairs.exponents(x, smem.lse_log2[q_slot.index], work, at, pairs.biases(work, at), slopes);
    pairs.template exponentiate<edges>(x, work, at.first_query);
    mma::Accumulator<S::dq_columns> dq;
    start_gradients(dq, x, dp, at, slopes, kept);
    const int32_t done = q_slot.index;
    advance_slots();
    QueryBlocks next = blocks;
    next.advance();
    if constexpr (!last) pairs.template decide<0, 2>(kept, work, query_tile(next));
    ptx::wgmma_wait_group<1>();  // dQ
    store_share(dq, work, blocks);
    if constexpr (last) {
      ptx::wgmma_wait_group<0>();
    } else {
      Scores s;
      take_q(work, next.current, q_slot);
      start_scores(s, q_slot.index);
      pairs.template decide<1, 2>(kept, work, query_tile(next));
      ptx::wgmma_wait_group<0>();
      x = carried(s, work, next);
    }
    release(smem.q_empty[done]);
  }
  FMHA_DEVICE void walk_ahead(const Work& work, QueryBlocks blocks) {
    Scores s, x;
    take_q(work, blocks.current, q_slot);
    start_scores(s, q_slot.index);
    ptx::mbarrier_wait_parity(smem.v_full, tile_phase);
    Kept kept;
    pairs.decide(kept, work, query_tile(blocks));
    ptx::wgmma_wait_group<0>();
    x = carried(s, work, blocks);
    int32_t left = blocks.count();
    for_each_block(work, blocks, [&] { return left > 1; }, [&]<Edges edges>() {
      turn<false, edges>(work, blocks, x, kept);
      --left;
    });
    turn<true, Edges::Some>(work, blocks, x, kept);
  }

  // What lies behind the sequence in the other CTA's keys, as `run_tile` does with this one's.
  FMHA_DEVICE void zero_others_keys(const Work& work) const {
    const int32_t there = work.cluster_keys.end - first_key_of_other<tile>(work);
    if (there < tile.block_n && may_be_dirty<spec>(p)) {
      ptx::mbarrier_wait_parity(smem.v_full, tile_phase);
      zero_rows(smem.other_k, max(there, 0));
      finish_zeros();
    }
  }

  FMHA_DEVICE void run_tile(const Sm90BwdSchedule& schedule, const Work& work) {
    ptx::mbarrier_wait_parity(smem.k_full, tile_phase);
    const int32_t there = work.keys.end - work.keys.begin;
    if (there < tile.block_n && may_be_dirty<spec>(p)) {
      ptx::mbarrier_wait_parity(smem.v_full, tile_phase);
      zero_rows(smem.k, max(there, 0));
      zero_rows(smem.v, max(there, 0));
      finish_zeros();
    }
    if constexpr (tile.cluster > 1) zero_others_keys(work);
    const QueryBlocks blocks = query_blocks<spec, tile>(p, schedule, work);
    if constexpr (tile.score_parts > 1) {
      walk_parts(work, blocks);
    } else if constexpr (tile.split_dims && tile.early_scores) {
      walk_split_ahead(schedule, work, blocks);
    } else if constexpr (tile.split_dims) {
      walk_split(work, blocks);
    } else if constexpr (tile.early_scores) {
      walk_ahead(work, blocks);
    } else {
      walk(work, blocks);
    }
    arrive(smem.kv_empty);
    tile_phase ^= 1;
    if constexpr (tile.cluster > 1) wait_until_sent();
  }

  // dK and dV to memory, through that of dS where rows are stored 16 bytes at a time.
  FMHA_DEVICE void store_gradients(const Sm90BwdSchedule& schedule, const Work& work) const {
    constexpr int qk = spec.fwd.head_dim_qk, v = spec.fwd.head_dim_v;
    constexpr DType dtype = spec.dtype_grad;
    const int32_t row = pairs.own_key() + mma::fragment_row(), column = S::first_column(index);
    const float dv_factor = spec.fwd.dropout ? p.fwd.dropout_scale : 1.f;
    const float dk_factor = p.fwd.softmax_scale * dropout_factor_of_ds<spec>(p.fwd);
    if constexpr (tile.head_parts) {
      float* sums = head_sums_of<spec, tile>(p, schedule, work.span.i_batch, work.i_head_kv, work.i_part);
      Work of_sequence = work;
      of_sequence.span.k_row = 0;
      constexpr int64_t to_next_key = kHeadSumsRow<spec, tile>;
      // By whole eights, as they are read; behind the dimension they are zeros.
      store_elems<DType::F32, round_up(v, 8)>(dv, View{sums + S::dim, 0, to_next_key, 0, 1}, of_sequence, row, column, dv_factor);
      store_elems<DType::F32, round_up(qk, 8)>(dk, View{sums, 0, to_next_key, 0, 1}, of_sequence, row, column, dk_factor);
    } else if constexpr (tile.vector_store && dtype != DType::F32) {
      static_assert(num_consumer_warps(tile) * kStagingBytes <= sizeof(smem.ds), "rows find room where dS was");
      const uint32_t staging = ptx::shared_address(&smem.ds) + (threadIdx.x / 32 - 4) * kStagingBytes;
      sync_consumers();  // All have done their products with dS.
      store_rows<dtype, v>(dv, p.dv, work, row, column, dv_factor, staging);
      store_rows<dtype, qk>(dk, p.dk, work, row, column, dk_factor, staging);
      sync_consumers();
    } else {
      store_elems<dtype, v>(dv, p.dv, work, row, column, dv_factor);
      store_elems<dtype, qk>(dk, p.dk, work, row, column, dk_factor);
    }
  }

  FMHA_DEVICE void run(const Sm90BwdSchedule& schedule) {
    for_each_tile<tile>(schedule, smem, signals, [&](int32_t i) {
      const Work work = resolve_work<spec, tile>(p, schedule, i);
      if (work.cluster_keys.empty()) return;
      dk.clear();
      dv.clear();
      // Keys that no query sees have gradients of 0.
      if (!work.q_blocks.empty()) run_tile(schedule, work);
      store_gradients(schedule, work);
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
