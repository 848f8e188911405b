// The loop of split dimensions by the CTAs of a cluster, which have neighbouring key blocks, walk the same query
// blocks and send each other their dS while the tensor cores have dK and dQ of their own keys: each adds a half of
// dQ's dimension for both. dV is started before dS is made: dO, of which there is one block at a time, is then free
// for the next.
//
//   tensor cores           dV(i)    dK(i)  dQ(i)  dQ(i) of the other's dS  S(i+1)        dP(i+1)
//   this consumer   P(i)   dS(i)    send dS(i)                             half of dQ    the rest   P(i+1)
#pragma once
#include <fmha/ptx/bulk.cuh>
#include <fmha/sm90/bwd/consume/split_dims.cuh>

namespace fmha::sm90::bwd {

// Sends this CTA's dS of the current slot to the other CTA's shared memory. One thread calls it.
template <class C>
FMHA_DEVICE void send_ds(const C& c) {
  if (threadIdx.x == mma::kWarpgroup) {
    constexpr uint32_t bytes = C::S::DsTile::tile_bytes;
    const int32_t other = cluster_rank<C::tile>() ^ 1;
    Barrier& full = c.smem.other_ds_full[c.ds_slot.index];
    ptx::mbarrier_arrive_expect_tx_at(ptx::address_at(full, other), bytes);
    ptx::cp_async_bulk_at(c.smem.other_ds[c.ds_slot.index].address(), other, c.smem.ds[c.ds_slot.index][0].address(),
                          bytes, full);
  }
  __syncwarp();
}
// Tells the other CTA that this CTA has read the data which it sent to a slot.
template <class C>
FMHA_DEVICE void release_other_ds(const C& c, Barrier& empty) {
  ptx::mbarrier_arrive_at_if(empty, cluster_rank<C::tile>() ^ 1, c.signals);
}
// Waits until the other CTA has received all dS of this one, since dK and dV overwrite that memory next.
template <class C>
FMHA_DEVICE void wait_until_sent(const C& c) {
  auto slot = c.ds_slot;
  for (int i = 0; i < C::tile.stages_ds; ++i, slot.advance())
    ptx::mbarrier_wait_parity(c.smem.other_ds_empty[slot.index], slot.phase ^ 1);
}
// Computes this consumer's columns of dQ from this CTA's keys, and then from the other's.
template <class C>
FMHA_DEVICE void start_dq_of_own_keys(const C& c, typename C::Dq& dq, int32_t ds_slot) {
  const int32_t first_column = c.dq_output.share() * C::S::dq_columns;
  mma::start_product_ab<C::dtype>(dq, c.smem.ds[ds_slot][0], 0, c.smem.k, first_column);
}
template <class C, class DsSlot>
FMHA_DEVICE void take_ds_and_start_dq(const C& c, typename C::Dq& dq, const DsSlot& slot) {
  ptx::mbarrier_wait_parity(c.smem.other_ds_full[slot.index], slot.phase);
  const auto& other_ds = c.smem.other_ds[slot.index];
  mma::start_product_ab<C::dtype, true>(dq, other_ds, 0, c.smem.other_k, c.index * C::S::dq_columns);
}

template <BwdSpec spec, Sm90BwdTile tile>
struct InClusters {
  using C = Consumer<spec, tile>;
  using S = typename C::S;
  using Scores = typename C::Scores;
  using Kept = typename C::Kept;

  C& c;

  FMHA_DEVICE void walk(const Work& work, QueryBlocks blocks) {
    Scores s, dp;
    c.take_q(work, blocks.current, c.q_slot);
    c.start_scores(s, c.q_slot.index);
    c.take_v_and_start_dp(dp, work, blocks);
    Kept kept;
    c.pairs.decide(kept, work, c.query_tile(blocks));
    ptx::wgmma_wait_group<0>();
    int32_t left = blocks.count();
    c.for_each_block(work, blocks, [&] { return left > 1; }, [&]<Edges edges>() {
      step<false, edges>(work, blocks, s, dp, kept);
      --left;
    });
    step<true, Edges::Some>(work, blocks, s, dp, kept);
  }

 private:
  // Computes a block's products from its S in `s` and its dP in `dp`, and leaves the next block's S and dP there.
  template <bool last, Edges edges>
  FMHA_DEVICE void step(const Work& work, const QueryBlocks& blocks, Scores& s, Scores& dp, Kept& kept) {
    typename C::Slopes slopes;
    const QueryTile at = c.query_tile(blocks);
    Scores x = c.template probs<edges>(s, work, at, c.pairs.biases(work, at), slopes);
    share_probs(c, x, kept);
    ptx::fence_proxy_async();
    c.sync_consumers();
    start_own_dv(c);
    share_ds(c, dp, x, at, slopes, kept);
    send_ds(c);
    start_own_dk(c);
    typename C::Dq dq;
    start_dq_of_own_keys(c, dq, c.ds_slot.index);
    ptx::wgmma_wait_group<2>();  // dV
    c.release(c.smem.dout_empty[c.dout_slot.index]);
    take_ds_and_start_dq(c, dq, c.ds_slot);
    Barrier& done_q = c.smem.q_empty[c.q_slot.index];
    Barrier& done_ds = c.smem.other_ds_empty[c.ds_slot.index];
    c.advance_slots();
    constexpr int all = S::dq_columns / 2, half = all / 2;
    if constexpr (!last) {
      float* sums = c.dq_output.share_of(work, blocks);
      QueryBlocks next = blocks;
      next.advance();
      c.take_q(work, next.current, c.q_slot);
      c.start_scores(s, c.q_slot.index);
      ptx::wgmma_wait_group<1>();  // dK, dQ
      c.release(done_q);
      release_other_ds(c, done_ds);
      const bool is_first = c.dq_output.acquire();
      c.dq_output.template add_elems<0, half>(sums, dq, is_first);
      c.take_dout(work, next.current, c.dout_slot);
      c.start_dp(dp, c.dout_slot.index);
      c.dq_output.template add_elems<half, all>(sums, dq, is_first);
      c.dq_output.release();
      c.pairs.decide(kept, work, c.query_tile(next));
      ptx::wgmma_wait_group<0>();
    } else {
      ptx::wgmma_wait_group<0>();
      c.release(done_q);
      release_other_ds(c, done_ds);
      c.dq_output.add(dq, work, blocks);
    }
  }
};

}  // namespace fmha::sm90::bwd
