// Steps of the loops in which a consumer has 64 keys of the block and the whole dimension of dK and dV.
#pragma once
#include <fmha/sm90/bwd/consume/consumer.cuh>

namespace fmha::sm90::bwd {

// Stores this consumer's rows of dS^T, of part `part` of the block's queries, for all consumers, which may read them
// behind `sync_consumers`.
template <int part = 0, class C>
FMHA_DEVICE void store_ds(const C& c, const typename C::Operand& ds) {
  // Single slot: waits until the other consumers have read dS of the block before.
  if constexpr (C::tile.stages_ds == 1 && part == 0) c.sync_consumers();
  mma::store_transposed(c.smem.ds[c.ds_slot.index][0], ds, c.index * mma::kRows, c.pairs.own_query(part));
}

template <class C>
FMHA_DEVICE void start_dq(const C& c, typename C::Dq& dq) {
  const auto& ds = c.smem.ds[c.ds_slot.index][0];
  if constexpr (C::S::transposes_dq) {
    mma::start_product_atbt<C::dtype>(dq, c.smem.k, c.index * mma::kRows, ds);
  } else {
    mma::start_product_ab<C::dtype>(dq, ds, c.index * mma::kRows, c.smem.k);
  }
}

template <class C>
FMHA_DEVICE void start_dv(C& c, const typename C::Operand& probs) {
  mma::start_product_ab<C::dtype>(c.dv, probs, c.smem.dout[c.dout_slot.index]);
}

// P and dS as operands of the products, dS stored, and dV started behind its stores, which are under way while the
// instructions of dV are issued. dV is in flight, nothing else.
template <class C>
FMHA_DEVICE void differentiate_and_start_dv(C& c, typename C::Scores& s, typename C::Scores& dp,
                                            typename C::Operand& ds, const QueryTile& at,
                                            const typename C::Slopes& slopes, const typename C::Kept& kept) {
  typename C::Operand probs = c.operand_of_dv(s, kept);
  ptx::wgmma_wait_group<0>();  // dP
  c.pairs.differentiate(dp, s, c.smem.delta[c.dout_slot.index], at, kept);
  c.pairs.multiply_slopes(dp, slopes);
  ds.template from<C::dtype>(dp, 0);
  store_ds(c, ds);
  start_dv(c, probs);
}

// The three products with P and dS as operands; at the end dV is done, and dQ and dK are in flight.
template <class C>
FMHA_DEVICE void start_gradients(C& c, typename C::Dq& dq, typename C::Scores& x, typename C::Scores& dp,
                                 const QueryTile& at, const typename C::Slopes& slopes, const typename C::Kept& kept) {
  typename C::Operand ds;
  differentiate_and_start_dv(c, x, dp, ds, at, slopes, kept);
  ptx::fence_proxy_async();
  c.sync_consumers();
  start_dq(c, dq);
  ptx::wgmma_wait_group<1>();  // dV
  c.release(c.smem.dout_empty[c.dout_slot.index]);
  mma::start_product_ab<C::dtype>(c.dk, ds, c.smem.q[c.q_slot.index]);
}

}  // namespace fmha::sm90::bwd
