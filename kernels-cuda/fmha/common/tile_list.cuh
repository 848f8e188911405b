// The launch that makes lists of tiles: a CTA a list (tile_lister.h).
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

template <FwdSpec spec, int32_t block_m, int32_t block_n, bool of_keys, bool has_function>
FMHA_DEVICE void list_tiles(const FwdParams& p, const MaskDataParams& masks, const TileList& list) {
  using Lister = TileLister<TileListCta, has_function>;
  __shared__ typename Lister::Shared shared;
  const Lister lister{p, {DataMasks{masks}}, list};
  lister.template run<of_keys>(shared, spec.q_layout, spec.kv_layout, block_m, block_n);
}

}  // namespace fmha
