// The issue role: one warp starts every product.
//
//   before:        S(0)  dP(0)
//   of block i:    dV += P^T(i) dO(i)   S(i+1)   dQ(i) = dS(i) K   dK += dS^T(i) Q(i)   dP(i+1)
//
// The exponentials of a block therefore run under the products of dQ and dK of the one before. dP waits until dQ,
// over whose columns it is written, has been read.
//
// The products of one thread are computed in the order in which it issues them. So S may be written where P was read
// by the product issued before, and no barrier has to announce that a place in tensor memory, or dS, has been read by
// products.
#pragma once
#include <fmha/ptx/elect.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/sm100/bwd/work.cuh>

namespace fmha::sm100::bwd {

template <BwdSpec spec, Sm100BwdTile tile>
struct Issuer {
  using Shared = Smem<spec, tile>;
  using Tmem = TmemPlan<spec>;
  using Instruction = mma::sm100::Instruction;
  static constexpr DType dtype = spec.fwd.dtype_qk;
  // Scores and dP read both operands along their rows, but a column-major V is read across; dV and dK read B across
  // its rows; dQ reads both operands across.
  static constexpr Instruction scores = {dtype, kBlock, kBlock};
  static constexpr Instruction of_dp = {dtype, kBlock, kBlock, false, false, Shared::v_columns};
  static constexpr Instruction of_dv = {dtype, kBlock, Tmem::dim_v, false, true};
  static constexpr Instruction of_dk = {dtype, kBlock, Tmem::dim_qk, false, true};
  static constexpr Instruction of_dq = {dtype, kBlock, Tmem::dim_qk, false, true, true};
  static constexpr int inner_qk = round_up(spec.fwd.head_dim_qk, 16), inner_v = round_up(spec.fwd.head_dim_v, 16);

  Shared& smem;
  const uint32_t tmem;
  const int32_t num_steps;
  const bool issues = ptx::elect_one();
  Slot<tile.stages_q> q, next_q;
  Slot<tile.stages_dout> dout, next_dout;
  uint32_t phase = 0;  // of what a step has one of

  FMHA_DEVICE void commit(Barrier& barrier) const {
    if (issues) ptx::tcgen05_commit(barrier);
  }
  // Fence after other warps have read or written tensor memory. Tiles that TMA has brought need the barrier alone.
  FMHA_DEVICE void wait(Barrier& barrier, uint32_t parity) const {
    ptx::mbarrier_wait_parity(barrier, parity);
    ptx::tcgen05_fence_after_thread_sync();
  }

  // S^T of the next block.
  FMHA_DEVICE void start_scores() {
    ptx::mbarrier_wait_parity(smem.q_full[next_q.index], next_q.phase);
    if (issues) mma::sm100::start_product<scores, inner_qk>(tmem + Tmem::s, smem.k, smem.q[next_q.index], false);
    commit(smem.s_full);
    next_q.advance();
  }
  // dP^T of the next block.
  FMHA_DEVICE void start_dp() {
    ptx::mbarrier_wait_parity(smem.dout_full[next_dout.index], next_dout.phase);
    if (issues) mma::sm100::start_product<of_dp, inner_v>(tmem + Tmem::dp, smem.v, smem.dout[next_dout.index], false);
    commit(smem.dp_full);
    next_dout.advance();
  }
  FMHA_DEVICE void start_dv(bool accumulate) {
    constexpr int steps = kHalf / mma::sm100::depth_of(dtype), columns = mma::sm100::columns_of(dtype, kHalf);
    wait(smem.p_full, phase);
    if (issues) {
      const auto& values = smem.dout[dout.index];
      mma::sm100::start_product_tmem<of_dv, 0, steps>(tmem + Tmem::dv, tmem + Tmem::p(0), values, accumulate);
      mma::sm100::start_product_tmem<of_dv, steps, 2 * steps>(tmem + Tmem::dv, tmem + Tmem::p(1) - columns, values, true);
    }
    commit(smem.dout_empty[dout.index]);
    dout.advance();
  }
  FMHA_DEVICE void start_dq_and_dk(bool accumulate) {
    wait(smem.ds_full, phase);
    if (issues) mma::sm100::start_product<of_dq, kBlock>(tmem + Tmem::dq, smem.ds, smem.k, false);
    commit(smem.dq_full);
    if (issues) mma::sm100::start_product<of_dk, kBlock>(tmem + Tmem::dk, smem.ds, smem.q[q.index], accumulate);
    commit(smem.q_empty[q.index]);
    q.advance();
  }

  FMHA_DEVICE void run() {
    if (num_steps == 0) return;
    ptx::mbarrier_wait_parity(smem.k_full, 0);
    start_scores();
    ptx::mbarrier_wait_parity(smem.v_full, 0);
    start_dp();
#pragma unroll 1
    for (int32_t i = 0; i < num_steps; ++i, phase ^= 1) {
      const bool more = i + 1 < num_steps;
      start_dv(i > 0);
      if (more) start_scores();
      start_dq_and_dk(i > 0);
      if (more) {
        wait(smem.dq_read, phase);
        start_dp();
      }
    }
    commit(smem.grads_full);
  }
};

}  // namespace fmha::sm100::bwd
