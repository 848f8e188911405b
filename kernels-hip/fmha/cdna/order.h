// Which tiles a workgroup computes. The tiles of a head are adjacent, its last queries first: of a causal mask they
// see most keys, and the longest work goes first.
//
// Hardware distributes workgroups round-robin over the XCDs (dies), each of which has its own L2. Tiles of one head
// share K and V, so each XCD is given a contiguous range of tiles: its L2 then serves the keys of few heads.
#pragma once
#include <fmha/cdna/tile.h>
#include <fmha/isa/lane.h>

namespace fmha::cdna {

template <CdnaTile tile, TileOrder order = tile.order>
struct Tiles;

template <CdnaTile tile>
struct Tiles<tile, TileOrder::Single> {
  int32_t at;

  static FMHA_DEVICE Tiles of(int32_t num_tiles) {
    if constexpr (tile.num_xcds == 1) return {workgroup_idx()};
    const int32_t each = num_tiles / tile.num_xcds, spare = num_tiles % tile.num_xcds;
    const int32_t die = workgroup_idx() % tile.num_xcds;
    return {die * each + min(die, spare) + workgroup_idx() / tile.num_xcds};
  }

  template <class Compute>
  FMHA_DEVICE void for_each(Compute compute) const {
    compute(at);
  }
};

// An XCD's workgroups walk its tiles in a static zigzag: every second round goes from the last workgroup to the
// first, so that the workgroup with the longest tile of a round gets the shortest of the next. There is no atomic
// tile counter: in the plan's model (src/order.rs of this crate) claiming tiles dynamically ends no sooner wherever
// the plan takes this order.
template <CdnaTile tile>
struct Tiles<tile, TileOrder::Static> {
  int32_t at, end;       // the first tile; behind the last of this die
  int32_t step, period;  // from a tile to the next, and to the one after

  static FMHA_DEVICE Tiles of(int32_t num_tiles) {
    const int32_t num = num_workgroups(), dies = tile.num_xcds == 1 ? 1 : min(tile.num_xcds, num);
    const int32_t die = workgroup_idx() % dies, place = workgroup_idx() / dies;
    const int32_t each = num_tiles / dies, spare = num_tiles % dies;
    const int32_t begin = die * each + min(die, spare), places = ceil_div(num - die, dies);
    return {begin + place, begin + each + (die < spare), 2 * (places - place) - 1, 2 * places};
  }

  template <class Compute>
  FMHA_DEVICE void for_each(Compute compute) const {
#pragma nounroll
    for (int32_t i = at, next = step; i < end; i += next, next = period - next) compute(i);
  }
};

}  // namespace fmha::cdna
