// The consume role: a warpgroup's 64 keys of the block against query block after query block.
//
//   S^T  = K Q^T            scores, a key to a row: then P^T and dS^T lie in registers as A operands do
//   dP^T = V dO^T
//   P^T  = exp2(S^T - LSE),  dS^T = P^T (dP^T - delta)
//   dV  += P^T dO,  dK += dS^T Q
//   dQ   = dS K             of all keys of the block: dS goes through shared memory
#pragma once
#include <fmha/common/zero_rows.cuh>
#include <fmha/mma/sm90/transposed_product.cuh>
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90/bwd/epilogue.cuh>
#include <fmha/sm90/bwd/work.cuh>

namespace fmha::sm90::bwd {

template <BwdSpec spec, Sm90BwdTile tile>
struct Consumer {
  using S = Shape<spec, tile>;
  using Scores = mma::Accumulator<tile.block_m>;
  static constexpr DType dtype = S::dtype;
  static constexpr bool has_hi = spec.fwd.mask != MaskKind::Full, has_lo = spec.fwd.mask == MaskKind::Band;

  const BwdParams& p;
  Smem<spec, tile>& smem;
  const int32_t index;  // of the warpgroup among the consumers
  const float scale_log2;
  const bool signals = threadIdx.x % 32 == 0;  // one arrival a warp

  Slot<tile.stages_q> q_slot;
  Slot<tile.stages_dout> dout_slot;
  Slot<tile.stages_ds> ds_slot;
  uint32_t dq_phase = 0, tile_phase = 0;
  mma::Accumulator<S::dim> dk;
  mma::Accumulator<S::dim> dv;

  FMHA_DEVICE void arrive(Barrier& barrier) const { ptx::mbarrier_arrive_if(barrier, signals); }
  FMHA_DEVICE void sync_consumers() const { ptx::bar_sync<num_consumer_threads(tile)>(kConsumersBarrier); }

  // Zeros in the rows of a tile from `first` on, by all consumers.
  template <class Tile>
  FMHA_DEVICE void zero_rows(const Tile& t, int32_t first) const {
    fmha::zero_rows(t, first, int32_t(threadIdx.x) - mma::kWarpgroup, num_consumer_threads(tile));
  }
  FMHA_DEVICE void finish_zeros() const {
    ptx::fence_proxy_async();
    sync_consumers();
  }

  // P of what the mask hides becomes 0.
  FMHA_DEVICE void mask(Scores& probs, const Work& work, int32_t first_query) const {
    const int32_t query = first_query + mma::fragment_column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t j = work.keys.begin + index * mma::kRows + mma::fragment_row() + 8 * r;
      // The first and the last column that see key j.
      int32_t first = has_hi ? j - work.band.hi - query : 0;
      const int32_t last = has_lo && !(spec.fwd.sink_columns && j < work.band.sink_columns) ? j - work.band.lo - query
                                                                                            : tile.block_m;
      if (j >= work.keys.end) first = tile.block_m;
#pragma unroll
      for (int e = 2 * r; e < probs.num_elems; e += 4) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int column = Scores::column(e + k);
          if (column < first || (has_lo && column > last)) probs[e + k] = 0.f;
        }
      }
    }
  }

  FMHA_DEVICE bool is_edge(const Work& work, int32_t first_query) const {
    if (work.keys.end - work.keys.begin < tile.block_n) return true;
    if constexpr (!has_hi) return false;
    const Range queries = {first_query, min(first_query + tile.block_m, work.span.seqlen_q)};
    return block_class(work.band, queries, work.keys) != BlockClass::Inside;
  }

  // S becomes P.
  FMHA_DEVICE void exponentiate(Scores& s) const {
    const uint32_t lse = ptx::shared_address(smem.lse_log2[q_slot.index]) + mma::fragment_column() * sizeof(float);
#pragma unroll
    for (int e = 0; e < s.num_elems; e += 4) {
      float lse_log2[2];
      ptx::ld_shared_v2_f32(lse_log2, lse + Scores::column(e) * sizeof(float));
#pragma unroll
      for (int k = 0; k < 4; ++k) s[e + k] = ptx::ex2_approx_ftz(fmaf(s[e + k], scale_log2, -lse_log2[k & 1]));
    }
  }
  // dP becomes dS.
  FMHA_DEVICE void differentiate(Scores& dp, const Scores& probs) const {
    const uint32_t deltas = ptx::shared_address(smem.delta[dout_slot.index]) + mma::fragment_column() * sizeof(float);
#pragma unroll
    for (int e = 0; e < dp.num_elems; e += 4) {
      float delta[2];
      ptx::ld_shared_v2_f32(delta, deltas + Scores::column(e) * sizeof(float));
#pragma unroll
      for (int k = 0; k < 4; ++k) dp[e + k] = probs[e + k] * (dp[e + k] - delta[k & 1]);
    }
  }

  FMHA_DEVICE void store_share(const mma::Accumulator<S::dq_columns>& dq) {
    ptx::mbarrier_wait_parity(smem.dq_empty[index], dq_phase ^ 1);
    const uint32_t to = ptx::shared_address(smem.dq[index]) + threadIdx.x % mma::kWarpgroup * 16;
#pragma unroll
    for (int e = 0; e < dq.num_elems; e += 4)
      ptx::st_shared_v4_f32(to + e / 4 * mma::kWarpgroup * 16, dq[e], dq[e + 1], dq[e + 2], dq[e + 3]);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(smem.dq_full[index]);
    dq_phase ^= 1;
  }

  FMHA_DEVICE void step(const Work& work, int32_t block, bool first) {
    const int32_t first_query = block * tile.block_m, there = work.span.seqlen_q - first_query;
    const auto& q = smem.q[q_slot.index];
    const auto& dout = smem.dout[dout_slot.index];
    ptx::mbarrier_wait_parity(smem.q_full[q_slot.index], q_slot.phase);
    if (there < tile.block_m && may_be_dirty<spec>(p)) {
      ptx::mbarrier_wait_parity(smem.dout_full[dout_slot.index], dout_slot.phase);
      zero_rows(q, there);
      zero_rows(dout, there);
      finish_zeros();
    }
    Scores s, dp;
    mma::start_product_abt<dtype, 1>(s, smem.k, index * mma::kRows, q);
    if (first) ptx::mbarrier_wait_parity(smem.v_full, tile_phase);
    ptx::mbarrier_wait_parity(smem.dout_full[dout_slot.index], dout_slot.phase);
    mma::start_product_abt<dtype, 1>(dp, smem.v, index * mma::kRows, dout);

    ptx::wgmma_wait_group<1>();
    exponentiate(s);
    if (is_edge(work, first_query)) mask(s, work, first_query);
    ptx::wgmma_wait_group<0>();
    differentiate(dp, s);
    mma::RegisterTile<typename S::Elem, tile.block_m> probs, ds;
    probs.template from<dtype>(s, 0);
    ds.template from<dtype>(dp, 0);

    const auto& ds_tile = smem.ds[ds_slot.index];
    // The other consumers have done their dQ with what a single slot held.
    if constexpr (tile.stages_ds == 1) sync_consumers();
    mma::store_transposed(ds_tile, ds, index * mma::kRows);
    mma::start_product_ab<dtype>(dv, probs, dout);
    ptx::fence_proxy_async();
    sync_consumers();

    mma::Accumulator<S::dq_columns> dq;
    if constexpr (tile.transposed_dq) {
      mma::start_product_atbt<dtype>(dq, smem.k, index * mma::kRows, ds_tile);
    } else {
      mma::start_product_ab<dtype>(dq, ds_tile, index * mma::kRows, smem.k);
    }
    ptx::wgmma_wait_group<1>();  // dV
    arrive(smem.dout_empty[dout_slot.index]);
    mma::start_product_ab<dtype>(dk, ds, q);
    ptx::wgmma_wait_group<1>();  // dQ
    store_share(dq);
    ptx::wgmma_wait_group<0>();  // dK
    arrive(smem.q_empty[q_slot.index]);
    q_slot.advance();
    dout_slot.advance();
    ds_slot.advance();
  }

  FMHA_DEVICE void run_tile(const Work& work) {
    ptx::mbarrier_wait_parity(smem.k_full, tile_phase);
    const int32_t there = work.keys.end - work.keys.begin;
    if (there < tile.block_n && may_be_dirty<spec>(p)) {
      ptx::mbarrier_wait_parity(smem.v_full, tile_phase);
      zero_rows(smem.k, there);
      zero_rows(smem.v, there);
      finish_zeros();
    }
    bool first = true;
    for (int32_t g = 0; g < p.fwd.gqa_ratio; ++g) {
#pragma unroll 1
      for (int32_t block = work.q_blocks.begin; block < work.q_blocks.end; ++block) {
        step(work, block, first);
        first = false;
      }
    }
    arrive(smem.kv_empty);
    tile_phase ^= 1;
  }

  FMHA_DEVICE void run(const Sm90BwdSchedule& schedule) {
    for (int32_t i = blockIdx.x; i < schedule.num_tiles; i += gridDim.x) {
      const Work work = resolve_work<spec, tile>(p, schedule, i);
      if (work.keys.empty()) continue;
      dk.clear();
      dv.clear();
      // Keys that no query sees have gradients of 0.
      if (!work.q_blocks.empty()) run_tile(work);
      const int32_t row = index * mma::kRows + mma::fragment_row();
      store_rows<spec.dtype_grad, spec.fwd.head_dim_qk, tile.vector_store>(dk, p.dk, work, row, p.fwd.softmax_scale);
      store_rows<spec.dtype_grad, spec.fwd.head_dim_v, tile.vector_store>(dv, p.dv, work, row, 1.f);
    }
  }
};

template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE void consume(const BwdParams& p, const Sm90BwdSchedule& schedule, Smem<spec, tile>& smem) {
  const int32_t index = ptx::uniform(threadIdx.x / mma::kWarpgroup) - 1;
  Consumer<spec, tile> consumer{p, smem, index, p.fwd.softmax_scale * kLog2E};
  consumer.run(schedule);
}

}  // namespace fmha::sm90::bwd
