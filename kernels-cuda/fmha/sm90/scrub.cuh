// The scrub role: keeps what a query does not see out of its output.
//
// P is 0 where a key is hidden, but 0 times an infinity or a NaN of V is NaN. In a block that some row
// of the tile sees and some other does not, two warps that the load role has to spare replace such
// values by 0 before the block is announced. They note it in the tile's Work; the epilogue then adds
// what they took, from memory, to the rows that do see it. Other blocks' values reach every row, as
// they are to, so nothing is looked at there.
#pragma once
#include <fmha/num.h>
#include <fmha/ptx/barrier.cuh>
#include <fmha/sm90/scheduler.cuh>

namespace fmha::sm90 {

constexpr int kScrubThreads = 64;
// Named barrier: all scrubbing threads are through with a block.
constexpr int kScrubbed = 8;

// Two 16-bit numbers of which the sign is ignored: adding one exponent step to the largest exponent
// carries into the sign bit.
template <DType dtype>
struct NonFinite {
  static constexpr uint32_t step = dtype == DType::Bf16 ? 0x00800080u : 0x04000400u;
  static constexpr uint32_t signs = 0x80008000u;

  // A sign bit is set where a number is infinite or NaN.
  FMHA_DEVICE static uint32_t marks(uint32_t pair) { return (pair & ~signs) + step; }
  // Such numbers become 0.
  FMHA_DEVICE static uint32_t without(uint32_t pair) {
    const uint32_t marked = marks(pair) & signs;
    return pair & ~(marked | (marked - (marked >> 15)));
  }
};

template <FwdSpec spec, Sm90Tile tile>
struct Scrubber {
  using Shared = Smem<spec, tile>;
  using Tile = typename Shared::VTile;
  using Bad = NonFinite<spec.dtype_v>;
  Shared& smem;
  Slot<tile.stages> v_slot;
  Slot<kWorkSlots> work_slot;
  uint32_t raw_phases = 0;  // a bit a stage: v_raw completes only where a block is scrubbed

  FMHA_DEVICE static uint32_t thread() { return threadIdx.x % kScrubThreads; }

  // Returns whether this thread replaced anything.
  FMHA_DEVICE bool clean(uint32_t address) const {
    constexpr uint32_t step = kScrubThreads * 16;
    const uint32_t begin = address + thread() * 16, end = address + Tile::tile_bytes;
    uint32_t marks = 0;
#pragma unroll 4
    for (uint32_t at = begin; at < end; at += step) {
      const uint4 v = ptx::ld_shared_v4_b32(at);
      marks |= Bad::marks(v.x) | Bad::marks(v.y) | Bad::marks(v.z) | Bad::marks(v.w);
    }
    if (!(marks & Bad::signs)) return false;
#pragma unroll 1
    for (uint32_t at = begin; at < end; at += step) {
      const uint4 v = ptx::ld_shared_v4_b32(at);
      ptx::st_shared_v4_b32(at, {Bad::without(v.x), Bad::without(v.y), Bad::without(v.z), Bad::without(v.w)});
    }
    ptx::fence_proxy_async();
    return true;
  }

  FMHA_DEVICE void scrub(Work& work) {
    const int32_t stage = v_slot.index;
    ptx::mbarrier_wait_parity(smem.v_raw[stage], raw_phases >> stage & 1);
    raw_phases ^= 1u << stage;
    if (clean(smem.v[stage].address())) atomicOr(&work.spoiled, 1);
    ptx::bar_sync<kScrubThreads>(kScrubbed);
    ptx::mbarrier_arrive_if(smem.v_full[stage], thread() == 0);
  }

  FMHA_DEVICE void run() {
    while (true) {
      ptx::mbarrier_wait_parity(smem.work_full[work_slot.index], work_slot.phase);
      Work& work = smem.work[work_slot.index];
      const int32_t num_blocks = work.num_blocks;
      if (num_blocks == 0) return;
#pragma unroll 1
      for (int32_t i = 0; i < num_blocks; ++i) {
        if (is_partial(work.whole_begin, work.whole_end, block_at(work, i))) scrub(work);
        v_slot.advance();
      }
      __syncwarp();
      ptx::mbarrier_arrive_if(smem.work_empty[work_slot.index], threadIdx.x % 32 == 0);
      work_slot.advance();
    }
  }
};

// Adds what was scrubbed of a tile's V to those of a thread's two rows, the first of them `row`, that
// see it. Infinities and NaN stay what they are whatever they are multiplied by, so P is not needed.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void restore(const FwdParams& p, const Work& work, int32_t row,
                         mma::Accumulator<padded_dim(spec.head_dim_v)>& o) {
  const MaskBand band = {work.lo, work.hi, work.sink_columns};
#pragma unroll 1
  for (int32_t n = 0; n < work.num_blocks; ++n) {
    const int32_t block = block_at(work, n);
    if (!is_partial(work.whole_begin, work.whole_end, block)) continue;
    const int32_t end = min((block + 1) * tile.block_n, work.seqlen_k);
#pragma unroll 1
    for (int32_t j = block * tile.block_n; j < end; ++j) {
      const int64_t v_row = row_offset(p.v, work.storage_batch, work.k_row + j, work.i_head_kv);
#pragma unroll
      for (int e = 0; e < o.num_elems; ++e) {
        const int32_t column = o.column(e) + mma::fragment_column();
        if (column >= spec.head_dim_v) continue;
        const float v = load_elem<spec.dtype_v>(p.v.data, v_row + column);
        const bool finite = abs_of(v) < infinity();
        if (!finite && visible(band, query_of<tile>(p, row + 8 * o.row(e)), j)) o[e] += v;
      }
    }
  }
}

}  // namespace fmha::sm90
