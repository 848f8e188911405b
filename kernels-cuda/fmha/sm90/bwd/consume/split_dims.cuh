// Steps of the loops that split dimensions, and the plainest of these loops. Both consumers have the same 64 keys; each
// makes S and P of 32 of the block's queries and shares P and dS through shared memory, and has a part of the dimension
// of dQ, dK and dV.
//
//   tensor cores    S  dP                    dV  dQ  dK
//   this consumer         P  share P  share dS          store dQ
#pragma once
#include <fmha/sm90/bwd/consume/consumer.cuh>

namespace fmha::sm90::bwd {

// Stores P of this consumer's queries; all consumers may read it after `sync_consumers`.
template <class C>
FMHA_DEVICE void share_probs(const C& c, const typename C::Scores& x, const typename C::Kept& kept) {
  // Single slot: waits until all consumers have read P and dS of the block before.
  if constexpr (C::tile.stages_ds == 1) c.sync_consumers();
  // Waits until the products of dV have read the only slot of P. dS has two slots, so a slot's index is the block's
  // parity.
  if constexpr (has_one_probs(C::tile)) ptx::mbarrier_wait_parity(c.smem.probs_empty, c.ds_slot.index ^ 1);
  mma::store_transposed(c.smem.probs(c.ds_slot.index), c.operand_of_dv(x, kept), 0, c.pairs.own_query());
}

// Stores dS of this consumer's queries, transposed, in its slot.
template <class C>
FMHA_DEVICE void store_own_ds(const C& c, typename C::Scores& dp, const typename C::Scores& x, const QueryTile& at,
                              const typename C::Slopes& slopes, const typename C::Kept& kept) {
  c.pairs.differentiate(dp, x, c.smem.delta[c.dout_slot.index], at, kept);
  c.pairs.multiply_slopes(dp, slopes);
  typename C::Operand own;
  own.template from<C::dtype>(dp, 0);
  // Waits until the copy to the other CTA has read this slot.
  if constexpr (in_clusters(C::tile))
    ptx::mbarrier_wait_parity(c.smem.other_ds_empty[c.ds_slot.index], c.ds_slot.phase ^ 1);
  mma::store_transposed(c.smem.ds[c.ds_slot.index][0], own, 0, c.pairs.own_query());
}

// Stores dS of this consumer's queries, and waits until P and dS of all consumers are stored.
template <class C>
FMHA_DEVICE void share_ds(const C& c, typename C::Scores& dp, const typename C::Scores& x, const QueryTile& at,
                          const typename C::Slopes& slopes, const typename C::Kept& kept) {
  store_own_ds(c, dp, x, at, slopes, kept);
  ptx::fence_proxy_async();
  c.sync_consumers();
}

// Computes this consumer's columns of dQ, dV and dK.
template <class C>
FMHA_DEVICE void start_own_dq(const C& c, typename C::Dq& dq) {
  const auto& ds = c.smem.ds[c.ds_slot.index][0];
  mma::start_product_ab<C::dtype>(dq, ds, 0, c.smem.k, C::S::first_column(c.index));
}
template <class C>
FMHA_DEVICE void start_own_dv(C& c) {
  const auto& probs = c.smem.probs(c.ds_slot.index);
  mma::start_product_atb<C::dtype>(c.dv, probs, 0, c.smem.dout[c.dout_slot.index], C::S::first_column(c.index));
}
template <class C>
FMHA_DEVICE void start_own_dk(C& c) {
  const auto& ds = c.smem.ds[c.ds_slot.index][0];
  mma::start_product_atb<C::dtype>(c.dk, ds, 0, c.smem.q[c.q_slot.index], C::S::first_column(c.index));
}

template <BwdSpec spec, Sm90BwdTile tile>
struct SplitDims {
  using C = Consumer<spec, tile>;
  using Scores = typename C::Scores;

  C& c;

  FMHA_DEVICE void walk(const Work& work, QueryBlocks blocks) {
    c.for_each_block(work, blocks, [&] { return blocks.more(); }, [&]<Edges edges>() { step<edges>(work, blocks); });
  }

 private:
  template <Edges edges>
  FMHA_DEVICE void step(const Work& work, const QueryBlocks& blocks) {
    Scores s, dp;
    c.take_q(work, blocks.current, c.q_slot);
    c.start_scores(s, c.q_slot.index);
    c.take_v_and_start_dp(dp, work, blocks);
    const QueryTile at = c.query_tile(blocks);
    typename C::Kept kept;
    c.pairs.decide(kept, work, at);
    ptx::wgmma_wait_group<1>();
    typename C::Slopes slopes;
    Scores x = c.template probs<edges>(s, work, at, c.pairs.biases(work, at), slopes);
    share_probs(c, x, kept);
    ptx::wgmma_wait_group<0>();
    share_ds(c, dp, x, at, slopes, kept);
    start_own_dv(c);
    typename C::Dq dq;
    start_own_dq(c, dq);
    ptx::wgmma_wait_group<1>();  // dV
    c.release(c.smem.dout_empty[c.dout_slot.index]);
    start_own_dk(c);
    c.finish_step(dq, work, blocks);
  }
};

}  // namespace fmha::sm90::bwd
