// A consumer's share of a query block's dQ from registers to the sums in global memory: the consumer passes it to the
// store warp through shared memory (store.cuh), or with DqPath::Registers adds it itself.
#pragma once
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90/bwd/order.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile>
struct DqOutput {
  using S = Shape<spec, tile>;
  using Dq = mma::Accumulator<S::dq_columns>;

  const BwdParams& p;
  Smem<spec, tile>& smem;
  const int32_t index;  // of the warpgroup among the consumers
  const bool signals = threadIdx.x % 32 == 0;
  uint32_t phase = 0;  // of `dq_empty`

  FMHA_DEVICE void store(const Dq& dq, const Work& work, const QueryBlocks& blocks) {
    if constexpr (adds_from_registers(tile)) {
      add(dq, work, blocks);
    } else {
      hand_over(dq);
    }
  }

  // Passes accumulators to the store warp through shared memory, one after the other.
  template <class... Accumulators>
  FMHA_DEVICE void hand_over(const Accumulators&... dq) {
    ptx::mbarrier_wait_parity(smem.dq_empty[index], phase ^ 1);
    uint32_t to = ptx::shared_address(smem.dq + index * S::dq_share) + threadIdx.x % mma::kWarpgroup * 16;
    const auto store = [&](const auto& part) {
#pragma unroll
      for (int e = 0; e < part.num_elems; e += 4) {
        if (is_of_others(e)) continue;
        ptx::st_shared_v4_f32(to, part[e], part[e + 1], part[e + 2], part[e + 3]);
        to += mma::kWarpgroup * 16;
      }
    };
    (store(dq), ...);
    ptx::fence_proxy_async();
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.dq_full[index], signals);
    phase ^= 1;
  }

  // Adds accumulators to the sums in memory: a whole share or, between `acquire` and `release`, elements `first` to
  // `last` of it.
  FMHA_DEVICE void add(const Dq& dq, const Work& work, const QueryBlocks& blocks) {
    float* sums = share_of(work, blocks);
    add_elems<0, S::dq_columns / 2>(sums, dq, acquire());
    release();
  }
  template <int first, int last>
  FMHA_DEVICE void add_elems(float* to, const Dq& dq, bool is_first) const {
    if (is_first) {
#pragma unroll
      for (int e = first; e < last; e += 4) {
        if (is_of_head(e)) ptx::st_global_v4_f32(to + e * mma::kWarpgroup, dq[e], dq[e + 1], dq[e + 2], dq[e + 3]);
      }
    } else {
#pragma unroll
      for (int e = first; e < last; e += 4) {
        if (is_of_head(e)) ptx::red_global_add_v4_f32(to + e * mma::kWarpgroup, dq[e], dq[e + 1], dq[e + 2], dq[e + 3]);
      }
    }
  }
  // Whether the warp's elements `e` to `e + 3` belong to dims that the head has. Padding is neither added nor read,
  // since the rate of additions in the L2 bounds these loops.
  FMHA_DEVICE bool is_of_head(int e) const {
    if constexpr (spec.fwd.head_dim_qk == S::dim && !S::gradient_each) return true;
    if (is_of_others(e)) return false;
    const int32_t warp_row = ptx::uniform(threadIdx.x % mma::kWarpgroup / 32) * 16;
    const int32_t first_dim = S::transposes_dq ? index * mma::kRows + warp_row
                                               : (S::dq_by_columns ? share() * S::dq_columns : 0) + Dq::column(e);
    return first_dim < spec.fwd.head_dim_qk;
  }
  // Whether element `e` belongs to the other CTA's half of the chunk that both CTAs multiply.
  FMHA_DEVICE bool is_of_others(int e) const {
    constexpr int half = S::dq_columns / 2;
    return S::gradient_each && index == 1 && Dq::column(e) / half != cluster_rank<tile>();
  }
  FMHA_DEVICE int32_t share() const { return S::share_of(index); }
  FMHA_DEVICE float* share_of(const Work& work, const QueryBlocks& blocks) const {
    const int32_t within = share() * S::dq_share + threadIdx.x % mma::kWarpgroup * 4;
    const int64_t part = part_of_sums<spec, tile>(p, work.key_block);
    return p.dq_sums + part + first_row_of<tile>(p, work, blocks) * S::dq_dim + within;
  }

  // Waits, where additions have an order, until the polling thread (semaphore.cuh) has seen the sums of all CTAs
  // before this one. Returns whether there are none, so that this CTA stores. The thread polls global memory for the
  // consumers, which wait in shared memory: the counter's answer and the fence behind the additions took some 900 of
  // a step's 4750 clocks at D 256, both together.
  FMHA_DEVICE bool acquire() const {
    if constexpr (keeps_dq_apart(tile)) return true;
    if constexpr (!is_ordered<spec>()) return false;
    ptx::mbarrier_wait_parity(smem.dq_empty[0], phase);
    return smem.dq_is_first;
  }
  FMHA_DEVICE void release() {
    if constexpr (kDqStart<spec, tile> == DqStart::Ordered) {
      __syncwarp();
      ptx::mbarrier_arrive_if(smem.dq_full[index], signals);
      phase ^= 1;
    }
  }
};

}  // namespace fmha::sm90::bwd
