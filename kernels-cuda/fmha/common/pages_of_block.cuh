// Blocks of keys that lie in pages, by TMA: a lane of a warp has a box of `page_keys` keys, which one page holds. Each
// lane reads its own entry of the block table and starts its own box, so that a block of many pages waits for the table
// once.
//
//   lane   0        1        2        3          a box is whole lines of 8 rows, as the swizzle has them
//   block  |--page 5|--page 5|--page 2|  zeros |  keys from seqlen_k on are in no page that the table names
#pragma once
#include <fmha/ptx/tma.cuh>
#include <fmha/seq.h>

namespace fmha {

template <int block_n, int page_keys>
struct PagesOfBlock {
  static constexpr int boxes = block_n / page_keys;
  static_assert(page_keys % 8 == 0 && block_n % page_keys == 0 && boxes <= 32,
                "a lane's box is whole lines of the swizzle");

  KvRow first = {0, 0};  // where this lane's box begins

  // Called by all lanes of the warp. The table is read only for keys of the sequence: beyond them it may have no entry.
  FMHA_DEVICE static PagesOfBlock find(const FwdParams& p, int32_t i_batch, int32_t first_key, int32_t seqlen_k) {
    const int32_t j = first_key + int32_t(threadIdx.x % 32) * page_keys;
    // A coordinate before the first page's rows, where TMA fills zeros: for lanes whose keys do not exist.
    PagesOfBlock pages = {{0, -page_keys}};
    if (j >= 0 && j < seqlen_k) pages.first = kv_row(p, KvKind::Paged, {i_batch, i_batch, 0, 0, 0, seqlen_k}, j);
    return pages;
  }

  // Starts this lane's TMA copy of `page_keys` keys. The block's barrier already expects the bytes of all lanes.
  template <class Tile, class Full>
  FMHA_DEVICE void load(const Tile& to, const ptx::TensorMap& map, const Full& full, int32_t i_head_kv) const {
    const int32_t lane = threadIdx.x % 32;
    if (lane >= boxes) return;
#pragma unroll
    for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
      full.load(to.address() + chunk * Tile::chunk_bytes + lane * page_keys * Tile::span_bytes, map,
                chunk * Tile::span, first.row, i_head_kv, first.batch, ptx::CacheHint::EvictLast);
    }
  }
};

}  // namespace fmha
