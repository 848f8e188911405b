// The loop of head dimensions to 128: a query block after another, each from its scores to its dK.
//
//   tensor cores    S  dP      dV            dQ  dK
//   this consumer          P       dS               store dQ
//
// BwdWalk::LateDp starts dP only when P is made, which leaves more registers for modifiers.
#pragma once
#include <fmha/sm90/bwd/consume/whole_dims.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile, class Keys>
struct InOrder {
  using C = Consumer<spec, tile, Keys>;
  using Scores = typename C::Scores;
  using Kept = typename C::Kept;
  // Whether a query block may be hidden as a whole from one warpgroup's keys: where a query block is shorter than a key
  // block, or where lists name blocks for each warpgroup's half of the keys.
  static constexpr bool passes_hidden =
      Keys::has_tile_list || (spec.fwd.mask != MaskKind::Full && tile.block_m < tile.block_n);
  static_assert(!Keys::has_tile_list || (tile.block_n == 2 * mma::kRows && num_consumers(tile) == 2),
                "lists tell what a warpgroup's keys are seen by");

  C& c;
  int32_t dropout_head = -1;  // the head whose keys' part of dropout's generator is in `dropout_parts`

  template <class Blocks>
  FMHA_DEVICE void walk(const Work& work, Blocks blocks) {
    c.for_each_block(work, blocks, [&] { return blocks.more(); }, [&]<Edges edges>() { step<edges>(work, blocks); });
  }

 private:
  template <Edges edges, class Blocks>
  FMHA_DEVICE void step(const Work& work, const Blocks& blocks) {
    Scores s, dp;
    const QueryTile at = c.query_tile(blocks);
    if constexpr (edges == Edges::All && passes_hidden) {
      bool sees_none = c.pairs.sees_none(work, at.first_query);
      if constexpr (Keys::has_tile_list) sees_none |= blocks.seen_by(c.index) == HalfSeen::None;
      if (sees_none) return pass(work, blocks);
    }
    begin_head(work, at.i_head);
    const auto shown = c.pairs.template shown<edges>(work, at, blocks);
    c.take_q(work, blocks.current, c.q_slot);
    c.start_scores(s, c.q_slot.index);
    if constexpr (!starts_dp_late(tile)) c.take_v_and_start_dp(dp, work, blocks);
    const typename C::Biases biases = c.pairs.biases(work, at);
    Kept kept;
    if constexpr (keeps_dropout_parts<spec, tile>()) {
      kept.decide(c.p.fwd, dropout_parts(), batch_head(work, at.i_head), at.first_query);
    } else {
      c.pairs.decide(kept, work, at);
    }
    ptx::wgmma_wait_group<starts_dp_late(tile) ? 0 : 1>();
    typename C::Slopes slopes;
    Scores x = c.template probs<edges>(s, work, at, biases, slopes, shown);
    if constexpr (starts_dp_late(tile)) c.take_v_and_start_dp(dp, work, blocks);
    typename C::Dq dq;
    start_gradients(c, dq, x, dp, at, slopes, kept);
    c.finish_step(dq, work, blocks);
  }

  // Passes a block whose queries see none of this warpgroup's keys: stores zeros of dS, and computes its share of dQ
  // from the other warpgroups' dS.
  FMHA_DEVICE void pass(const Work& work, const QueryBlocks& blocks) {
    c.take_q(work, blocks.current, c.q_slot);
    c.take_dout(work, blocks.current, c.dout_slot);
    c.release(c.smem.dout_empty[c.dout_slot.index]);
    typename C::Operand ds = {};
    store_ds(c, ds);
    ptx::fence_proxy_async();
    c.sync_consumers();
    typename C::Dq dq;
    start_dq(c, dq);
    ptx::wgmma_wait_group<0>();
    c.dq_output.store(dq, work, blocks);
    c.release(c.smem.q_empty[c.q_slot.index]);
    c.advance_slots();
  }

  FMHA_DEVICE int32_t batch_head(const Work& work, int32_t i_head) const {
    return head_of_whole(c.p.fwd, work.span.i_batch, i_head);
  }
  FMHA_DEVICE auto& dropout_parts() const { return c.smem.dropout_parts[threadIdx.x / 32 - 4]; }
  // Computes the keys' part of the dropout generator's work once for all queries of a head.
  FMHA_DEVICE void begin_head(const Work& work, int32_t i_head) {
    if constexpr (keeps_dropout_parts<spec, tile>()) {
      if (i_head == dropout_head) return;
      dropout_head = i_head;
      Kept::begin_head(c.p.fwd, dropout_parts(), batch_head(work, i_head), c.pairs.first_key(work));
    }
  }
};

}  // namespace fmha::sm90::bwd
