// A wave's lanes in the form that the code of masks as data needs, and the loop over a list of tiles.
#pragma once
#include <fmha/isa/lane.h>
#include <fmha/tile_list.h>

namespace fmha {

struct MaskLanes {
  static constexpr int32_t count = kWaveSize;
  static FMHA_DEVICE int32_t index() { return thread_idx() % kWaveSize; }
  static FMHA_DEVICE uint64_t ballot(bool x) { return v_cmp_ballot(x); }
  static FMHA_DEVICE int32_t from(int32_t x, int32_t lane) { return v_readlane_b32(x, v_readfirstlane_b32(lane)); }
  static FMHA_DEVICE int32_t uniform(int32_t x) { return v_readfirstlane_b32(x); }
};

// Loop over the blocks in a tile's list: partly masked ones first, then whole ones, each from the last to the
// first. Entries are read by scalar loads: a vector load would have to wait for all loads of K and V before it.
struct ListWalk {
  const int32_t FMHA_CONSTANT* blocks;
  int32_t max_blocks, num_cut, num_tiles;
  int32_t past_end;  // a block behind the last, which is read as zeros

  static FMHA_DEVICE ListWalk of(const TileList& list, int32_t i_batch, int32_t i_head, int32_t tile,
                                 int32_t past_end) {
    const int64_t row = int64_t(i_batch * list.heads_of_batch + i_head / list.heads_ratio) * list.num_tiles + tile;
    const auto counts = (const int32_t FMHA_CONSTANT*)(list.counts + 2 * row);
    ListWalk walk;
    walk.blocks = (const int32_t FMHA_CONSTANT*)(list.blocks + row * list.max_blocks);
    walk.max_blocks = list.max_blocks;
    walk.num_cut = counts[0];
    walk.num_tiles = walk.num_cut + counts[1];
    walk.past_end = past_end;
    return walk;
  }

  FMHA_DEVICE bool is_cut(int32_t n) const { return n < num_cut; }
  FMHA_DEVICE int32_t tile_at(int32_t n) const {
    const int32_t i = max(min(n, num_tiles - 1), 0), block = blocks[i < num_cut ? i : max_blocks - 1 - (i - num_cut)];
    return n < num_tiles ? block : past_end;
  }
};

}  // namespace fmha
