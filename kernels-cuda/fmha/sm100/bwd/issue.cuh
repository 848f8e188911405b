// The issue role: one warp starts every product.
//
//   before:        S(0)  dP(0)
//   of block i:    dV += P^T(i) dO(i)   S(i+1)   dQ(i) = dS(i) K   dK += dS^T(i) Q(i)   dP(i+1)
//
// The exponentials of a block therefore run under the products of dQ and dK of the one before. dP waits until dQ,
// over whose columns it is written, has been read.
//
//   a wide head:       dV += P^T(i) dO(i)   S(i+1)   first of dQ^T(i) = K^T dS(i)   dK += dS^T(i) Q(i)
//                      the rest of dQ^T(i)   dP(i+1)
//   without dV:        the same
//   dV alone:          S(i+1)   dV += P^T(i) dO(i)
//
// Each part of dQ waits until the part before, over whose columns it is written, has been read. dV alone has two
// places for S, so that the exponentials of a block run under the products of its neighbours.
//
// The products of one thread are computed in the order in which it issues them. So S may be written where P was read
// by the product issued before, and no barrier has to announce that a place in tensor memory, or dS, has been read by
// products.
#pragma once
#include <fmha/ptx/elect.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/sm100/bwd/work.cuh>

namespace fmha::sm100::bwd {

template <BwdSpec spec, Sm100BwdTile tile, Part part>
struct Issuer {
  using Shared = Smem<spec, tile, part>;
  using Of = Shape<spec>;
  using Tmem = TmemPlan<spec, part>;
  using Instruction = mma::sm100::Instruction;
  static constexpr DType dtype = spec.fwd.dtype_qk;
  // Scores and dP read both operands along their rows, but a column-major V in shared memory is read across; dV and dK
  // read B across its rows; dQ reads both operands across, K's tile and dS for a wide head, otherwise dS and K's tile.
  static constexpr Instruction scores = {dtype, kBlock, Of::queries};
  static constexpr Instruction of_dp = {dtype, kBlock, Of::queries, false, false, !Tmem::has_v && kColumnMajor<spec>};
  static constexpr Instruction of_dv = {dtype, kBlock, Of::dim_v, false, true};
  static constexpr Instruction of_dk = {dtype, kBlock, Of::dim_qk, false, true};
  static constexpr Instruction of_dq = {dtype, kBlock, Of::is_wide ? Of::queries : Of::dim_qk, false, true, true};
  static constexpr int inner_qk = round_up(spec.fwd.head_dim_qk, 16), inner_v = round_up(spec.fwd.head_dim_v, 16);
  FMHA_DEVICE static constexpr int steps_of(int inner) { return inner / mma::sm100::depth_of(dtype); }
  // A part of K's tile with 128 columns.
  using KeyPart = SmemTile<uint16_t, kBlock, kBlock>;

  Shared& smem;
  const uint32_t tmem;
  const int32_t num_steps;
  const bool issues = ptx::elect_one();
  Slot<tile.stages_q> q, next_q;
  Slot<tile.stages_dout> dout, next_dout;

  FMHA_DEVICE void commit(Barrier& barrier) const {
    if (issues) ptx::tcgen05_commit(barrier);
  }
  // Waits at a barrier and issues the fence that is needed after other warps have read or written tensor memory. For
  // tiles that TMA has loaded the barrier alone is enough.
  FMHA_DEVICE void wait(Barrier& barrier, uint32_t parity) const {
    ptx::mbarrier_wait_parity(barrier, parity);
    ptx::tcgen05_fence_after_thread_sync();
  }

  // Starts the product S^T of block `i`, the next one.
  FMHA_DEVICE void start_scores(int32_t i) {
    const int32_t slot = i % Tmem::s_slots;
    ptx::mbarrier_wait_parity(smem.q_full[next_q.index], next_q.phase);
    const uint32_t to = tmem + Tmem::s(slot);
    const auto& queries = smem.q[next_q.index];
    if (issues) {
      if constexpr (Tmem::has_k) {
        mma::sm100::start_product_tmem<scores, 0, steps_of(inner_qk)>(to, tmem + Tmem::k, queries, false);
      } else {
        mma::sm100::start_product<scores, inner_qk>(to, smem.k, queries, false);
      }
    }
    commit(smem.s_full[slot]);
    if constexpr (!has_dk(part)) commit(smem.q_empty[next_q.index]);
    next_q.advance();
  }
  // Starts the product dP^T of the next block.
  FMHA_DEVICE void start_dp() {
    ptx::mbarrier_wait_parity(smem.dout_full[next_dout.index], next_dout.phase);
    const auto& values = smem.dout[next_dout.index];
    if (issues) {
      if constexpr (Tmem::has_v) {
        mma::sm100::start_product_tmem<of_dp, 0, steps_of(inner_v)>(tmem + Tmem::dp, tmem + Tmem::v, values, false);
      } else {
        mma::sm100::start_product<of_dp, inner_v>(tmem + Tmem::dp, smem.v, values, false);
      }
    }
    commit(smem.dp_full);
    if constexpr (!has_dv(part)) commit(smem.dout_empty[next_dout.index]);
    next_dout.advance();
  }
  FMHA_DEVICE void start_dv(int32_t i) {
    constexpr int steps = steps_of(Of::half), columns = mma::sm100::columns_of(dtype, Of::half);
    if constexpr (!has_dk(part)) ptx::mbarrier_wait_parity(smem.dout_full[dout.index], dout.phase);
    if (issues) {
      const auto& values = smem.dout[dout.index];
      const uint32_t to = tmem + Tmem::dv;
      const int32_t slot = i % Tmem::s_slots;
      mma::sm100::start_product_tmem<of_dv, 0, steps>(to, tmem + Tmem::p(slot, 0), values, i > 0);
      mma::sm100::start_product_tmem<of_dv, steps, 2 * steps>(to, tmem + Tmem::p(slot, 1) - columns, values, true);
    }
    commit(smem.dout_empty[dout.index]);
    dout.advance();
  }
  FMHA_DEVICE void start_dq(int dq_part) {
    if (issues) {
      if constexpr (Of::is_wide) {
        const auto& keys = reinterpret_cast<const KeyPart&>(smem.k.elems[Of::first_of(dq_part) / KeyTile<spec>::span]);
        mma::sm100::start_product<of_dq, kBlock>(tmem + Tmem::dq, keys, smem.ds, false);
      } else {
        mma::sm100::start_product<of_dq, kBlock>(tmem + Tmem::dq, smem.ds, smem.k, false);
      }
    }
    commit(smem.dq_full);
  }
  FMHA_DEVICE void wait_for_dq_read(int32_t i, int dq_part) { wait(smem.dq_read, Of::dq_parity(i, dq_part)); }
  FMHA_DEVICE void start_dq_and_dk(int32_t i) {
    wait(smem.ds_full, i & 1);
    start_dq(0);
    if (issues) mma::sm100::start_product<of_dk, Of::queries>(tmem + Tmem::dk, smem.ds, smem.q[q.index], i > 0);
    commit(smem.q_empty[q.index]);
    q.advance();
#pragma unroll
    for (int dq_part = 1; dq_part < Of::dq_parts; ++dq_part) {
      wait_for_dq_read(i, dq_part - 1);
      start_dq(dq_part);
    }
  }

  FMHA_DEVICE void run() {
    if (num_steps == 0) return;
    if constexpr (Tmem::has_k) wait(smem.operand_full, 0);
    if constexpr (!Tmem::has_k) ptx::mbarrier_wait_parity(smem.k_full, 0);
    start_scores(0);
    if constexpr (has_dk(part)) {
      if constexpr (Tmem::has_v) wait(smem.operand_full, 0);
      if constexpr (!Tmem::has_v) ptx::mbarrier_wait_parity(smem.v_full, 0);
      start_dp();
    }
#pragma unroll 1
    for (int32_t i = 0; i < num_steps; ++i) {
      const bool more = i + 1 < num_steps;
      if constexpr (!has_dk(part)) {
        if (more) start_scores(i + 1);
      }
      wait(smem.p_full[i % Tmem::s_slots], i / Tmem::s_slots & 1);
      if constexpr (has_dv(part)) start_dv(i);
      if constexpr (has_dk(part)) {
        if (more) start_scores(i + 1);
        start_dq_and_dk(i);
        if (more) {
          wait_for_dq_read(i, Of::dq_parts - 1);
          start_dp();
        }
      }
    }
    commit(smem.grads_full);
  }
};

}  // namespace fmha::sm100::bwd
