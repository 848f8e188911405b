// Which tiles a workgroup computes. The tiles of a head are adjacent, its last queries first: of a causal mask they
// see most keys, and the longest work goes first.
//
// Hardware deals workgroups to dies in turn. Neighbours in a head share K and V, so each die gets a run of adjacent
// tiles, and with them its own L2 the head's keys.
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

// A die's workgroups take its tiles in turn, in every second round from the last workgroup to the first: who had the
// longest tile of a round has the shortest of the next. No counter to draw from: it would have to be 0 before every
// launch, and in the plan's model (backend-rocm, kernels/order.rs) a drawn order ends no sooner wherever the plan
// takes this one.
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
