// The loop of head dimensions up to 128 that starts scores early: the next block's S is started behind this block's dK,
// so that the tensor cores have work while dQ is stored and while P is computed. Otherwise the loop is that of
// in_order.cuh. No product is under way from one iteration to the next: ptxas would wait for each (C7514, C7515).
//
//   tensor cores    dP(i)  dV(i)              dQ(i)  dK(i)  S(i+1)
//   this consumer   P(i)   dS(i)  share dS(i)        store dQ(i)
#pragma once
#include <fmha/sm90/bwd/consume/whole_dims.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile>
struct EarlyScores {
  using C = Consumer<spec, tile>;
  using Scores = typename C::Scores;
  using Kept = typename C::Kept;
  static constexpr bool modifies = modifies_score(spec.fwd);

  C& c;

  FMHA_DEVICE void walk(const Work& work, QueryBlocks blocks) {
    Scores s, x;
    c.take_q(work, blocks.current, c.q_slot);
    c.start_scores(s, c.q_slot.index);
    ptx::mbarrier_wait_parity(c.smem.v_full, c.tile_phase);
    Kept kept;
    c.pairs.decide(kept, work, c.query_tile(blocks));
    ptx::wgmma_wait_group<0>();
    x = carried(s, work, blocks);
    int32_t left = blocks.count();
    c.for_each_block(work, blocks, [&] { return left > 1; }, [&]<Edges edges>() {
      step<false, edges>(work, blocks, x, kept);
      --left;
    });
    step<true, Edges::Some>(work, blocks, x, kept);
  }

 private:
  // Scores that one iteration hands to the next. Modified scores stay as the product left them until dP is under way,
  // so that their slopes take no registers between iterations.
  FMHA_DEVICE Scores carried(const Scores& s, const Work& work, const QueryBlocks& blocks) const {
    if constexpr (modifies) return s;
    typename C::Slopes none;
    return c.pairs.exponents(s, c.smem.lse_log2[c.q_slot.index], work, c.query_tile(blocks), {}, none);
  }

  template <bool last, Edges edges>
  FMHA_DEVICE void step(const Work& work, const QueryBlocks& blocks, Scores& x, Kept& kept) {
    Scores dp;
    c.take_dout(work, blocks.current, c.dout_slot);
    c.start_dp(dp, c.dout_slot.index);
    typename C::Slopes slopes;
    const QueryTile at = c.query_tile(blocks);
    if constexpr (modifies)
      x = c.pairs.exponents(x, c.smem.lse_log2[c.q_slot.index], work, at, c.pairs.biases(work, at), slopes);
    c.pairs.template exponentiate<edges>(x, work, at);
    typename C::Dq dq;
    start_gradients(c, dq, x, dp, at, slopes, kept);
    const int32_t done = c.q_slot.index;
    c.advance_slots();
    QueryBlocks next = blocks;
    next.advance();
    if constexpr (!last) c.pairs.template decide<0, 2>(kept, work, c.query_tile(next));
    ptx::wgmma_wait_group<1>();  // dQ
    c.dq_output.store(dq, work, blocks);
    if constexpr (last) {
      ptx::wgmma_wait_group<0>();
    } else {
      Scores s;
      c.take_q(work, next.current, c.q_slot);
      c.start_scores(s, c.q_slot.index);
      c.pairs.template decide<1, 2>(kept, work, c.query_tile(next));
      ptx::wgmma_wait_group<0>();
      x = carried(s, work, next);
    }
    c.release(c.smem.q_empty[done]);
  }
};

}  // namespace fmha::sm90::bwd
