// The turn role: two warps bring a row-major V of 8-bit elements from [keys, dim] to [dim, keys], in which wgmma reads it.
//
// Sixteen keys of 32 dimensions at a time. A transposing ldmatrix moves pairs of bytes: lane 4 p + t receives dimensions 2 p
// and 2 p + 1 of the keys 2 t and 2 t + 1 of an 8 x 16 matrix. Two prmt of the registers of keys 0..7 and 8..15 part the
// dimensions: dimension 2 p of keys {2 t, 2 t + 1, 8 + 2 t, 9 + 2 t}, and 2 p + 1 of the same. Stored as four bytes of a row
// the keys have the order that P has in its registers (mma/sm90/fp8_operand.cuh), so P needs no exchange. The even
// dimensions of sixteen become the first eight rows, the odd ones the others: stored in their own places, two apart, eight
// rows would lie in half of the banks. The epilogue knows (`dim_at`).
//
// V rows that are not the sequence's are zeroed first, as zero_values.cuh does for other types.
#pragma once
#include <fmha/common/zero_rows.cuh>
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/matrix.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/sm90/fwd/config.cuh>

namespace fmha::sm90 {

// The dimension that stands in column `column` of O, of a V that was turned.
FMHA_DEVICE constexpr int dim_at(int column) { return column / 16 * 16 + column % 8 * 2 + column / 8 % 2; }

// Named barrier: what the turn role's warps have zeroed is zero for both. Above those of the votes.
constexpr int kTurnZeroed = 12;

template <FwdSpec spec, Sm90Tile tile>
struct TurnRole {
  using Shared = Smem<spec, tile>;
  using Turned = typename Shared::VTile;
  Shared& smem;
  Slot<tile.stages> slot;  // of the ring of raw blocks and of that of turned ones, which have as many
  Slot<kWorkSlots> work_slot;

  template <class Raw>
  FMHA_DEVICE void turn(const Raw& raw, const Turned& turned) const {
    constexpr int keys = 16, dims = 32, key_steps = tile.block_n / keys, steps = key_steps * (Shared::dim_v / dims);
    const int32_t lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
#pragma unroll 2
    for (int32_t step = threadIdx.x / 32 % kTurnWarps; step < steps; step += kTurnWarps) {
      const int32_t dim = step / key_steps * dims, key = step % key_steps * keys;
      uint32_t v[4];  // keys 0..7 and 8..15 of the first sixteen dimensions, then of the others
      ptx::ldmatrix_x4_trans(v, raw.address() + fmha::mma::word_offset<Raw>(key + matrix % 2 * 8 + row, dim + matrix / 2 * 16));
      const uint32_t parted[4] = {ptx::prmt(v[0], v[1], 0x6420), ptx::prmt(v[0], v[1], 0x7531),
                                  ptx::prmt(v[2], v[3], 0x6420), ptx::prmt(v[2], v[3], 0x7531)};
      ptx::stmatrix_x4(turned.address() + fmha::mma::word_offset<Turned>(dim + matrix * 8 + row, key), parted);
    }
  }

  FMHA_DEVICE void block(int32_t first_dirty) {
    const int32_t stage = slot.index;
    auto& raw = smem.raw[stage];
    ptx::mbarrier_wait_parity(smem.v_raw[stage], slot.phase);
    if (first_dirty < tile.block_n) {
      zero_rows(raw, first_dirty, threadIdx.x % (32 * kTurnWarps), 32 * kTurnWarps);
      ptx::bar_sync<32 * kTurnWarps>(kTurnZeroed);
    }
    ptx::mbarrier_wait_parity(smem.v_empty[stage], slot.phase ^ 1);
    __syncwarp();
    turn(raw, smem.v[stage]);
    ptx::fence_proxy_async();
    __syncwarp();
    const bool signals = threadIdx.x % 32 == 0;
    ptx::mbarrier_arrive_if(smem.v_full[stage], signals);
    ptx::mbarrier_arrive_if(smem.v_raw_empty[stage], signals);
    slot.advance();
  }

  FMHA_DEVICE void run() {
    while (true) {
      ptx::mbarrier_wait_parity(smem.work_full[work_slot.index], work_slot.phase);
      const int32_t num_blocks = ptx::uniform(smem.work[work_slot.index].num_blocks);
      const int32_t first_dirty = ptx::uniform(smem.work[work_slot.index].first_dirty);
      __syncwarp();
      ptx::mbarrier_arrive_if(smem.work_empty[work_slot.index], threadIdx.x % 32 == 0);
      work_slot.advance();
      if (num_blocks == 0) return;
      block(first_dirty);
#pragma unroll 1
      for (int32_t i = 1; i < num_blocks; ++i) block(tile.block_n);
    }
  }
};

}  // namespace fmha::sm90
