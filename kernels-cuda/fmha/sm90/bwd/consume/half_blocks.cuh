// The loop of head dimension 192 with a V of at most 128: beside dK and dV, registers have room for the scores of only
// half of a block's queries at a time. The first half's dV is in flight while the second half's P and dS are computed;
// dK, of both halves, while dQ is stored.
//
//   tensor cores    S(0)  dP(0)  S(1)         dV(0)  dP(1)               dV(1)  dQ    dK
//   this consumer            P(0)       dS(0)              P(1)   dS(1)               store dQ
#pragma once
#include <fmha/sm90/bwd/consume/whole_dims.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile>
struct HalfBlocks {
  using C = Consumer<spec, tile>;
  using S = typename C::S;
  using Scores = typename C::Scores;
  using Operand = typename C::Operand;
  using Slopes = typename C::Slopes;
  using Kept = typename C::Kept;

  C& c;

  FMHA_DEVICE void walk(const Work& work, QueryBlocks blocks) {
#pragma unroll 1
    for (; blocks.more(); blocks.advance()) step(work, blocks);
  }

 private:
  FMHA_DEVICE void step(const Work& work, const QueryBlocks& blocks) {
    Scores s, dp;
    c.take_q(work, blocks.current, c.q_slot);
    c.start_scores(s, c.q_slot.index, 0);
    QueryTile at = c.query_tile(blocks, 0);
    Kept kept;
    // Dropout is decided before dP is started: the generator needs the registers that dP takes. D 192 with V of 128
    // spilled and read 852 bytes in the other order, and 572 in this one; B2 H8 S4096 full 1438 us to 1198, causal 840
    // to 660 (an H100).
    c.pairs.decide(kept, work, at);
    c.take_v_and_start_dp(dp, work, blocks);
    typename C::Biases biases = c.pairs.biases(work, at);
    ptx::wgmma_wait_group<1>();  // S(0)
    Slopes slopes;
    Scores x = c.template probs<Edges::Some>(s, work, at, biases, slopes);
    c.start_scores(s, c.q_slot.index, 1);
    Operand of_dv = c.operand_of_dv(x, kept);
    ptx::wgmma_wait_group<1>();  // dP(0)
    store_ds<0>(c, half_of_ds(dp, x, at, slopes, kept));
    start_half_of_dv<0>(of_dv);
    at = c.query_tile(blocks, 1);
    c.pairs.decide(kept, work, at);
    c.start_dp(dp, c.dout_slot.index, 1);
    biases = c.pairs.biases(work, at);
    ptx::wgmma_wait_group<2>();  // S(1)
    x = c.template probs<Edges::Some>(s, work, at, biases, slopes);
    ptx::wgmma_wait_group<0>();  // dV(0), dP(1)
    of_dv = c.operand_of_dv(x, kept);
    store_ds<1>(c, half_of_ds(dp, x, at, slopes, kept));
    start_half_of_dv<1>(of_dv);
    ptx::fence_proxy_async();
    c.sync_consumers();
    ptx::wgmma_wait_group<0>();  // dV(1): dQ takes its operand's registers
    c.release(c.smem.dout_empty[c.dout_slot.index]);
    const auto& ds = c.smem.ds[c.ds_slot.index][0];
    mma::Accumulator<S::Chunks::whole> dq;
    mma::Accumulator<S::Chunks::half> dq_of_half;
    mma::start_product_ab<C::dtype>(dq, ds, 0, c.smem.k, S::Chunks::first_of_whole(c.index));
    mma::start_product_ab<C::dtype>(dq_of_half, ds, 0, c.smem.k, S::Chunks::first_of_half(c.index));
    mma::start_product_atb<C::dtype>(c.dk, ds, c.index * mma::kRows, c.smem.q[c.q_slot.index], 0);
    ptx::wgmma_wait_group<1>();  // dQ
    c.dq_output.hand_over(dq, dq_of_half);
    ptx::wgmma_wait_group<0>();  // dK
    c.release(c.smem.q_empty[c.q_slot.index]);
    c.advance_slots();
  }

  FMHA_DEVICE Operand half_of_ds(Scores& dp, const Scores& probs, const QueryTile& at, const Slopes& slopes,
                                 const Kept& kept) const {
    c.pairs.differentiate(dp, probs, c.smem.delta[c.dout_slot.index], at, kept);
    c.pairs.multiply_slopes(dp, slopes);
    Operand ds;
    ds.template from<C::dtype>(dp, 0);
    return ds;
  }
  template <int half>
  FMHA_DEVICE void start_half_of_dv(const Operand& probs) {
    mma::start_register_product_ab<C::dtype>(c.dv, probs, c.smem.dout[c.dout_slot.index], c.pairs.own_query(half));
  }
};

}  // namespace fmha::sm90::bwd
