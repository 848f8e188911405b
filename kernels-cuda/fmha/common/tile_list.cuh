// The launch that writes lists of blocks for masks as data: each CTA writes one list (tile_lister.h).
#pragma once
#include <fmha/common/data_keys.cuh>
#include <fmha/tile_lister.h>

namespace fmha {

struct TileListCta : WarpLanes {
  static constexpr int32_t threads = 256;
  static constexpr bool has_a_block_of_none = true, has_atomics = true;
  static FMHA_DEVICE int32_t thread() { return threadIdx.x; }
  static FMHA_DEVICE int32_t group_index() { return blockIdx.x; }
  static FMHA_DEVICE void barrier() { __syncthreads(); }
  static FMHA_DEVICE void reconverge() { __syncwarp(); }
  static FMHA_DEVICE int32_t bits_in(uint32_t bits) { return __popc(bits); }
  static FMHA_DEVICE void set_bits(uint32_t& word, uint32_t bits) { atomicOr(&word, bits); }
};

}  // namespace fmha
