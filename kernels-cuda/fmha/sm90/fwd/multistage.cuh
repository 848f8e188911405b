// Without a load role: every warpgroup consumes, and the first thread also refills the slots that all have
// released, `stages` blocks ahead. The kernel to measure warp specialisation against.
#pragma once
#include <fmha/sm90/fwd/consume.cuh>
#include <fmha/sm90/fwd/load.cuh>

namespace fmha::sm90 {

template <FwdSpec spec, Sm90Tile tile>
struct Multistage {
  Consumer<spec, tile> consumer;
  Loader<spec, tile> loader;
  Smem<spec, tile>& smem;

  const bool loads = threadIdx.x == 0;

  FMHA_DEVICE const Work& work() const { return smem.work[0]; }

  FMHA_DEVICE void fill() {
    if (loads) {
      const typename Loader<spec, tile>::Keys keys(work());
      loader.load_q(work(), 0);
      for (int32_t i = 0; i < min(tile.stages, work().num_blocks); ++i) {
        loader.load_k(keys, i);
        loader.load_v(keys, i);
      }
    }
    __syncwarp();
  }

  // Zeros V rows that are not the sequence's, before the first product reads them.
  FMHA_DEVICE void zero_values() {
    if constexpr (takes_prepared_v(tile)) return;
    const int32_t first_dirty = work().first_dirty;
    if (first_dirty >= tile.block_n) return;
    const int32_t stage = consumer.v_slot.index;
    ptx::mbarrier_wait_parity(smem.v_full[stage], consumer.v_slot.phase);
    if constexpr (Smem<spec, tile>::v_columns) {
      zero_columns(smem.v[stage], first_dirty, threadIdx.x, num_threads(tile));
    } else {
      zero_rows(smem.v[stage], first_dirty, threadIdx.x, num_threads(tile));
    }
    ptx::fence_proxy_async();
    __syncthreads();
  }

  // The slots of block `i`'s K and of the V of the block before are free once all warps have released them.
  FMHA_DEVICE void refill(int32_t i) {
    if (loads) {
      const typename Loader<spec, tile>::Keys keys(work());
      if (i > 0 && i - 1 + tile.stages < work().num_blocks) loader.load_v(keys, i - 1 + tile.stages);
      if (i + tile.stages < work().num_blocks) loader.load_k(keys, i + tile.stages);
    }
    __syncwarp();
  }

  FMHA_DEVICE void run_tile() {
    fill();
    zero_values();
    consumer.first_block();
    refill(0);
    const int32_t num_blocks = work().num_blocks;
#pragma unroll 1
    for (int32_t i = 1; i < num_blocks; ++i) {
      const int32_t block = block_at(work(), i);
      consumer.step(block, spec.mask != MaskKind::Full && consumer.is_edge(block), i + 1 == num_blocks);
      refill(i);
    }
    consumer.finish_q();
    consumer.rescale();
    consumer.start_output();
    consumer.finish_output();
    auto&& sums = mma::in_f32(consumer.o);
    epilogue<spec, tile>(consumer.p, work(), consumer.rows.row, consumer.softmax.rows, consumer.scale_log2,
                         consumer.modifiers().offset_log2(), sums);
  }

  FMHA_DEVICE void run(const FwdParams& p, const TileSchedule& schedule) {
    Scheduler<spec, tile, Smem<spec, tile>> scheduler{smem};
    while (true) {
      __syncthreads();
      if (loads) smem.work[0] = scheduler.next(p, schedule);
      __syncthreads();
      if (ptx::uniform(work().num_blocks) == 0) return;
      run_tile();
    }
  }
};

template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void multistage(const FwdParams& p, const Maps& maps, const TileSchedule& schedule, const PreparedValues& values,
                            Smem<spec, tile>& smem) {
  Multistage<spec, tile> role{consumer_of<spec, tile>(p, smem), {p, maps, values, smem}, smem};
  role.run(p, schedule);
}

}  // namespace fmha::sm90
