// Blocks of rows that a backward loop walks: those with a visible pair, blocks of sink columns first.
#pragma once
#include <fmha/mask.h>

namespace fmha {

struct Blocks {
  int32_t first, num, num_sinks;
  FMHA_DEVICE int32_t at(int32_t i) const { return i < num_sinks ? i : first + i - num_sinks; }
  FMHA_DEVICE int32_t count() const { return num_sinks + num; }
};
// Blocks of `columns` rows each that cover the ranges of rows.
FMHA_DEVICE Blocks blocks_of(Range seen, Range sinks, int32_t columns) {
  const int32_t first = seen.begin / columns, end = ceil_div(seen.end, columns);
  Blocks blocks = {first, seen.empty() ? 0 : end - first, ceil_div(sinks.end, columns)};
  // Blocks inside the band show their sink columns anyway, so the separate sink blocks end before the band.
  if (blocks.num > 0) blocks.num_sinks = min(blocks.num_sinks, first);
  return blocks;
}

}  // namespace fmha
