// The loop of padded dimension 192 by the CTAs of a cluster (cluster.cuh), where 96 columns of dK and dV would neither
// begin nor end with a chunk of 64: one consumer has dK, the other dV, of all columns. That is 96 registers in place of
// 128, so that the next block's P and dS are made while this one's products are under way, and dQ leaves a step later:
// between steps nothing is under way, but all that the next one's products take is there.
//
//   tensor cores    dK or dV(i)  S(i+1)  dP(i+1)  dQ(i)  dQ(i) of the other's dS
//   this consumer   dQ(i-1) to memory             P(i+1), dS(i+1)                  share them, send dS(i+1)
#pragma once
#include <fmha/sm90/bwd/consume/cluster.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile>
struct GradientEach {
  using C = Consumer<spec, tile>;
  using S = typename C::S;
  using Scores = typename C::Scores;
  using Kept = typename C::Kept;

  C& c;

  FMHA_DEVICE void walk(const Work& work, QueryBlocks blocks) {
    Scores s, dp;
    Kept kept;
    c.take_q(work, blocks.current, c.q_slot);
    c.start_scores(s, c.q_slot.index);
    c.take_v_and_start_dp(dp, work, blocks);
    const QueryTile at = c.query_tile(blocks);
    c.pairs.decide(kept, work, at);
    const auto biases = c.pairs.biases(work, at);
    store_pairs<0>(s, dp, work, at, biases, kept);
    c.sync_consumers();
    send_ds(c);
    typename C::Dq dq;
    float* sums = nullptr;
#pragma unroll 1
    for (int32_t left = blocks.count(); left > 1; --left) step<false>(work, blocks, dq, sums);
    step<true>(work, blocks, dq, sums);
    add_dq(dq, sums);
  }

 private:
  // One step: block i, whose P and dS are in shared memory. `dq` holds dQ of the block before, whose sums begin at
  // `sums`; null if there is no block before.
  template <bool last>
  FMHA_DEVICE void step(const Work& work, QueryBlocks& blocks, typename C::Dq& dq, float*& sums) {
    start_own_gradient();
    Barrier& done_q = c.smem.q_empty[c.q_slot.index];
    Barrier& done_dout = c.smem.dout_empty[c.dout_slot.index];
    const Slot<tile.stages_ds> ds_slot = c.ds_slot;
    float* const next_sums = c.dq_output.share_of(work, blocks);
    c.advance_slots();
    blocks.advance();
    Scores s, dp;
    if constexpr (!last) {
      c.take_q(work, blocks.current, c.q_slot);
      c.start_scores(s, c.q_slot.index);
      c.take_dout(work, blocks.current, c.dout_slot);
      c.start_dp(dp, c.dout_slot.index);
    }
    if (sums) add_dq(dq, sums);
    sums = next_sums;
    ptx::wgmma_wait_group<last ? 0 : 2>();  // dK or dV
    if constexpr (has_one_probs(tile)) ptx::mbarrier_arrive_if(c.smem.probs_empty, c.signals && S::has_dv(c.index));
    c.release(done_q);
    c.release(done_dout);
    start_dq_of_own_keys(c, dq, ds_slot.index);
    take_ds_and_start_dq(c, dq, ds_slot);
    if constexpr (!last) {
      const QueryTile at = c.query_tile(blocks);
      Kept kept;
      c.pairs.decide(kept, work, at);
      const auto biases = c.pairs.biases(work, at);
      store_pairs<2>(s, dp, work, at, biases, kept);  // dQ
    }
    ptx::wgmma_wait_group<0>();  // dQ
    release_other_ds(c, c.smem.other_ds_empty[ds_slot.index]);
    if constexpr (!last) {
      c.sync_consumers();
      send_ds(c);
    }
  }

  FMHA_DEVICE void start_own_gradient() const {
    const bool has_dv = S::has_dv(c.index);
    const auto& pairs = has_dv ? c.smem.probs(c.ds_slot.index) : c.smem.ds[c.ds_slot.index][0];
    const auto& rows = has_dv ? c.smem.dout[c.dout_slot.index] : c.smem.q[c.q_slot.index];
    mma::start_product_atb<C::dtype>(c.dk, pairs, 0, rows, 0);
  }

  // Computes P and dS of this consumer's queries and stores them to shared memory; after `sync_consumers` all consumers
  // may read them. S and dP are in flight at the call, with `behind` products behind them.
  template <int behind>
  FMHA_DEVICE void store_pairs(const Scores& s, Scores& dp, const Work& work, const QueryTile& at,
                               const typename C::Biases& biases, const Kept& kept) const {
    typename C::Slopes slopes;
    ptx::wgmma_wait_group<behind + 1>();  // S
    const Scores x = c.template probs<Edges::Some>(s, work, at, biases, slopes);
    share_probs(c, x, kept);
    ptx::wgmma_wait_group<behind>();  // dP
    store_own_ds(c, dp, x, at, slopes, kept);
    ptx::fence_proxy_async();
  }

  FMHA_DEVICE void add_dq(const typename C::Dq& dq, float* sums) {
    if constexpr (adds_from_registers(tile)) {
      c.dq_output.template add_elems<0, S::dq_columns / 2>(sums, dq, c.dq_output.acquire());
      c.dq_output.release();
    } else {
      c.dq_output.hand_over(dq);
    }
  }
};

}  // namespace fmha::sm90::bwd
