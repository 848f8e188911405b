// Divides the rows of a tile of 64 among four warps that copy 16 bytes at a time: which lane computes a row's address,
// and which lanes copy the row.
#pragma once
#include <fmha/ptx/warp.cuh>
#include <fmha/seq.h>

namespace fmha {

// A warp has four of every sixteen rows. Lane l finds the address of the (l % 16)-th of them (null: zeros), and
// receives those of four rows, sixteen apart, which have the same swizzle. It copies 16 bytes of a chunk of each row;
// eight lanes copy the whole chunk.
struct RowsOfLane {
  using Row = const uint16_t*;
  static constexpr int count = 4, apart = 16;
  Row of_lane[count];

  // The row of the tile whose address this lane computes.
  FMHA_DEVICE static int32_t found_by(int32_t warp, int32_t lane) {
    return 4 * warp + lane % 4 + lane / 4 % count * apart;
  }
  // Gives each lane the addresses of the four rows that it copies, from the lanes that computed them (lane `first` and
  // those behind it).
  FMHA_DEVICE static RowsOfLane told(Row found, int32_t lane, int32_t first = 0) {
    RowsOfLane rows;
#pragma unroll
    for (int k = 0; k < count; ++k)
      rows.of_lane[k] =
          reinterpret_cast<Row>(ptx::shfl_idx(reinterpret_cast<uint64_t>(found), first + lane / 8 + 4 * k));
    return rows;
  }
};

// Address of a row of Q in a tile; null for a row that does not exist.
template <class Work>
FMHA_DEVICE const uint16_t* query_row_of(const FwdParams& p, const Work& work, int32_t row_in_tile) {
  const int32_t row = work.first_row + row_in_tile, i = Work::query_of(p, row);
  if (i >= work.end_query) return nullptr;
  return static_cast<const uint16_t*>(p.q.data) + query_offset(p, work.span, i, work.head_of(p, row, i));
}

}  // namespace fmha
