// Attention backward on Blackwell: dK and dV of a block of keys, and what it adds to dQ; a role a warp, or a warpgroup.
//
//   load      TMA brings K and V once, Q and dO of each block of queries   load.cuh
//   issue     starts the five products of each block in tensor memory      issue.cuh
//   compute   S to P, dP to dS; at the end stores dK and dV                compute.cuh, epilogue.cuh
//   reduce    adds dQ to sums in memory                                    reduce.cuh
//
// Scores are transposed, a key to a lane. So P in tensor memory is operand A of dV as it is, and one dS in shared
// memory is operand A of dK read along its rows and of dQ read across them.
//
// A wide head's dQ is transposed, and dS its operand B. Where dK and dV of a wide head fill tensor memory, two CTAs
// have a block of keys, which share nothing: one computes S, dP, dK and dQ, the other S and dV.
#pragma once
#include <fmha/sm100/bwd/compute.cuh>
#include <fmha/sm100/bwd/epilogue.cuh>
#include <fmha/sm100/bwd/finish.cuh>
#include <fmha/sm100/bwd/issue.cuh>
#include <fmha/sm100/bwd/load.cuh>
#include <fmha/sm100/bwd/reduce.cuh>

namespace fmha::sm100::bwd {

template <BwdSpec spec, Sm100BwdTile tile, Part part>
FMHA_DEVICE void init_barriers(Smem<spec, tile, part>& smem) {
  using Tmem = TmemPlan<spec, part>;
  if constexpr (!Tmem::has_k) ptx::mbarrier_init(smem.k_full, 1);
  if constexpr (has_dk(part) && !Tmem::has_v) ptx::mbarrier_init(smem.v_full, 1);
  if constexpr (Tmem::has_k || Tmem::has_v) ptx::mbarrier_init(smem.operand_full, kComputeWarps);
  for (int i = 0; i < tile.stages_q; ++i) {
    ptx::mbarrier_init(smem.q_full[i], 1);
    ptx::mbarrier_init(smem.q_empty[i], 1 + kComputeWarps);
  }
  for (int i = 0; i < tile.stages_dout; ++i) {
    ptx::mbarrier_init(smem.dout_full[i], 1);
    ptx::mbarrier_init(smem.dout_empty[i], 1);
  }
  ptx::mbarrier_init(smem.raw, 1);
  for (int i = 0; i < smem.s_slots; ++i) {
    ptx::mbarrier_init(smem.s_full[i], 1);
    ptx::mbarrier_init(smem.p_full[i], kComputeWarps);
  }
  if constexpr (has_dk(part)) {
    ptx::mbarrier_init(smem.dp_full, 1);
    ptx::mbarrier_init(smem.ds_full, kComputeWarps);
    ptx::mbarrier_init(smem.dq_full, 1);
    ptx::mbarrier_init(smem.dq_read, kReduceWarps);
  }
  ptx::mbarrier_init(smem.grads_full, 1);
  ptx::mbarrier_init(smem.done, kComputeWarps + kReduceWarps);
  ptx::fence_mbarrier_init();
}

template <BwdSpec spec, Sm100BwdTile tile, Part part, class SeenKeys>
FMHA_DEVICE void main_of(const BwdParams& p, const Maps& maps, uint32_t i_cta, const SeenKeys& seen) {
  extern __shared__ __align__(1024) unsigned char raw[];
  using Shared = Smem<spec, tile, part>;
  Shared& smem = *reinterpret_cast<Shared*>(raw);
  const Work work = work_of<spec>(p, i_cta, seen);
  if (work.keys.empty()) return;
  const int32_t warp = ptx::uniform(threadIdx.x / 32);
  const Role role = role_of(warp);
  using OfRole = Regs<Shape<spec>::is_wide>;
  if (threadIdx.x == 0) init_barriers(smem);
  if (role == Role::Issue) {
    ptx::tcgen05_alloc<1>(ptx::shared_address(&smem.tmem), kColumns);
    ptx::tcgen05_relinquish_alloc_permit<1>();
  }
  ptx::tcgen05_fence_before_thread_sync();  // behind the allocation
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();  // behind the allocation

  const uint32_t tmem = smem.tmem, lanes = tmem + (uint32_t(warp % 4 * 32) << 16);
  if (role == Role::Compute) {
    ptx::setmaxnreg_inc<OfRole::compute>();
    const int32_t half = (warp - kReduceWarps) / 4;
    {
      ComputeRole<spec, tile, part, SeenKeys> compute{p, smem, work, seen, lanes, half};
      compute.run();
    }
    store_keys<spec, tile>(p, smem, lanes, work, half, pair_masks(seen));
  } else if (role == Role::Reduce) {
    ptx::setmaxnreg_dec<OfRole::reduce>();
    add_dq<spec, tile>(p, smem, lanes, work, seen);
  } else {
    ptx::setmaxnreg_dec<OfRole::other>();
    if (role == Role::Issue) {
      Issuer<spec, tile, part> issuer{smem, tmem, work.num_steps};
      issuer.run();
      ptx::mbarrier_wait_parity(smem.done, 0);
      ptx::tcgen05_fence_after_thread_sync();  // before the return
      ptx::tcgen05_dealloc<1>(tmem, kColumns);
    } else if (role == Role::Load) {
      Loader<spec, tile, part, SeenKeys> loader{p, maps, smem, work, seen};
      loader.run();
    }
  }
}

// The backward kernel. `seen` says which keys queries see (masked.cuh passes masks). The CTAs of dV are numbered behind
// those of dK and dQ, which take longer and so start first.
template <BwdSpec spec, Sm100BwdTile tile, class SeenKeys = EveryKey>
FMHA_DEVICE void main(const BwdParams& p, const Maps& maps, const SeenKeys& seen = {}) {
  static_assert(spec.fwd.dtype_qk == spec.fwd.dtype_v && size_bytes(spec.fwd.dtype_qk) == 2, "sm100: one 16-bit type");
  if constexpr (Shape<spec>::in_two) {
    const uint32_t ctas = gridDim.x / 2, own = blockIdx.x;
    if (own < ctas) {
      main_of<spec, tile, Part::DkDq>(p, maps, own, seen);
    } else {
      main_of<spec, tile, Part::Dv>(p, maps, own - ctas, seen);
    }
  } else {
    main_of<spec, tile, Part::All>(p, maps, blockIdx.x, seen);
  }
}

}  // namespace fmha::sm100::bwd
