// The early loop of split dimensions: as split_dims.cuh, with the next block's S started behind this block's
// three products, and its dP where half of dQ has left the registers. L2 takes longer to add dQ than the tensor cores
// need for any one product, and a warp waits for it.
//
//   tensor cores    dQ(i)  dV(i)  dK(i)  S(i+1)          dP(i+1)
//   this consumer                        half of dQ      the rest   P(i+1), dS(i+1)
#pragma once
#include <fmha/sm90/bwd/consume/split_dims.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile>
struct SplitEarly {
  using C = Consumer<spec, tile>;
  using Scores = typename C::Scores;
  using Kept = typename C::Kept;

  C& c;

  FMHA_DEVICE void walk(const Work& work, QueryBlocks blocks) {
    walk_with_next_scores(
        c, work, blocks, [&]<bool last, Edges edges>(const QueryBlocks& at, Scores& s, Scores& dp, Kept& kept) {
          step<last, edges>(work, at, s, dp, kept);
        });
  }

 private:
  template <bool last, Edges edges>
  FMHA_DEVICE void step(const Work& work, const QueryBlocks& blocks, Scores& s, Scores& dp, Kept& kept) {
    typename C::Slopes slopes;
    const QueryTile at = c.query_tile(blocks);
    Scores x = c.template probs<edges>(s, work, at, c.pairs.biases(work, at), slopes);
    share_probs(c, x, kept);
    share_ds(c, dp, x, at, slopes, kept);
    typename C::Dq dq;
    start_own_dq(c, dq);
    start_own_dv(c);
    start_own_dk(c);
    const int32_t done_q = c.q_slot.index, done_dout = c.dout_slot.index;
    c.advance_slots();
    constexpr int all = C::S::dq_columns / 2, half = all / 2;
    if constexpr (!last) {
      float* sums = c.dq_output.share_of(work, blocks);
      QueryBlocks next = blocks;
      next.advance();
      c.take_q(work, next.current, c.q_slot);
      c.start_scores(s, c.q_slot.index);
      ptx::wgmma_wait_group<3>();  // dQ
      const bool is_first = c.dq_output.acquire();
      c.dq_output.template add_elems<0, half>(sums, dq, is_first);
      c.take_dout(work, next.current, c.dout_slot);
      c.start_dp(dp, c.dout_slot.index);
      c.dq_output.template add_elems<half, all>(sums, dq, is_first);
      c.dq_output.release();
      c.pairs.decide(kept, work, c.query_tile(next));
      ptx::wgmma_wait_group<2>();  // dV, dK
      c.release(c.smem.dout_empty[done_dout]);
      c.release(c.smem.q_empty[done_q]);
      ptx::wgmma_wait_group<0>();
    } else {
      ptx::wgmma_wait_group<2>();  // dQ
      c.dq_output.add(dq, work, blocks);
      ptx::wgmma_wait_group<0>();
      c.release(c.smem.dout_empty[done_dout]);
      c.release(c.smem.q_empty[done_q]);
    }
  }
};

}  // namespace fmha::sm90::bwd
