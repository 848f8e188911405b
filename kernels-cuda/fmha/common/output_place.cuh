// Finds where the rows of a tile's O and LSE lie, in the call's outputs or in those of a part of the keys, and
// recomputes rows.
#pragma once
#include <fmha/common/output_row.cuh>
#include <fmha/common/recompute_row.cuh>
#include <fmha/common/seen_keys.cuh>
#include <fmha/common/work.cuh>

namespace fmha {

// Batch index and first row of a tile's O and LSE. The parts of split keys are stored as batches of their own, one
// after another, also where sequences are packed.
struct OutputPlace {
  int32_t batch, row;
};
// Data type in which K and V lie in memory.
template <FwdSpec spec, auto tile>
FMHA_DEVICE constexpr DType stored_type() {
  if constexpr (requires { tile.stored; }) return tile.stored;
  else return spec.dtype_qk;
}

// Whether a tile of split keys leaves a row that must be recomputed to the launch that merges the parts. That launch
// recomputes it over all keys; a kernel that walks all keys of its rows recomputes the row itself.
template <auto tile, class Keys>
FMHA_DEVICE consteval bool leaves_rows_to_fold() {
  return split_keys<tile>() > 0 && fixed_parts<tile>() && !are_of_token<Keys>();
}

template <auto tile>
FMHA_DEVICE OutputPlace output_place(const FwdParams& p, const Work& work) {
  if constexpr (split_keys<tile>() == 0) return {work.storage_batch, work.q_row};
  // A part of an equal share stores only the rows of its tile's heads, and the first of these heads is at index 0.
  else if constexpr (in_shares<tile>()) return {work.part, -work.i_head * p.seqlen_q};
  else return {work.part * p.batch + work.i_batch, 0};
}

// A row of a tile: its query and head, whether it exists in the sequence, and the places of its O and LSE.
struct TileRow {
  int32_t i;
  bool stored;
  OutputRow to;
};
template <auto tile, class Keys>
FMHA_DEVICE TileRow tile_row(const FwdParams& p, const Work& work, int32_t packed_row, const Keys& keys) {
  const int32_t i = query_of<tile>(p, packed_row);
  const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
  bool stored = i < work.seqlen_q;
  if constexpr (whole_groups<tile>()) stored &= packed_row - work.first_row < rows_of_tile<tile>(p);
  const OutputPlace place = output_place<tile>(p, work);
  return {i, stored, {place.batch, place.row + query_of_sequence(keys, i), i_head}};
}

// Finds rows of this warp, one a lane, that contain a NaN or an infinity although their log-sum-exp is finite: a hidden
// value of V has come through, or the sum has overflowed f32. The whole warp recomputes each.
template <FwdSpec spec, auto tile, class Keys = EveryKey, class Elems = PlainElems>
FMHA_DEVICE void recompute_rows(const FwdParams& p, const Work& work, int32_t row, bool suspect, const Keys& seen = {},
                                const Elems& elems = {}) {
  const SeqSpan span = {work.i_batch, work.storage_batch, work.q_row, work.seqlen_q, work.k_row, work.seqlen_k};
  const uint32_t lanes = ptx::vote_ballot(suspect);
#pragma unroll 1
  for (int32_t lane = 0; lane < 32; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    const int32_t packed_row = ptx::shfl_idx(row, lane);
    const TileRow of_tile = tile_row<tile>(p, work, packed_row, seen);
    const OutputRow& to = of_tile.to;
    if constexpr (requires { seen.of_query(of_tile.i); }) {
      // A row of several tokens' union: over its own token's list.
      const auto keys = seen.of_query(of_tile.i);
      const SeqSpan places = {span.i_batch,  span.storage_batch, span.q_row,
                              span.seqlen_q, span.k_row,         keys.list.count()};
      RecomputedRow<spec, stored_type<spec, tile>(), decltype(seen.of_query(0)), Elems> again{
          p, places, to.i_head, of_tile.i, to.batch, to.row, {0, places.seqlen_k}, keys, elems};
      again.run();
    } else {
      RecomputedRow<spec, stored_type<spec, tile>(), Keys, Elems> again{
          p, span, to.i_head, of_tile.i, to.batch, to.row, keys_of_work<tile>(p, work), seen, elems};
      again.run();
    }
  }
}

}  // namespace fmha
