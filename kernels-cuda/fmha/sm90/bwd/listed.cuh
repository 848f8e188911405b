// Query blocks of a tile in the order of its list, under masks as data.
#pragma once
#include <fmha/common/shown_blocks.cuh>
#include <fmha/sm90/bwd/order.cuh>

namespace fmha::sm90::bwd {

// The query blocks that lists name for a tile, one query head of the group after another: in the order of
// `ShownBlocks::listed` or, where `is_downward`, from the last block to the first.
template <class Keys>
struct ListedQueryBlocks : QueryBlocks {
  const Keys& keys;
  int32_t i_batch, key_block;
  int32_t row = 0, at = 0, num_cut = 0, num = 0;
  ListedBlock listed = {0};

  FMHA_DEVICE ListedQueryBlocks(const Keys& keys, int32_t i_batch, int32_t key_block, Range heads, bool is_downward)
      : QueryBlocks{{0, 0}, 0, heads.end, heads.begin, 0, is_downward}, keys(keys), i_batch(i_batch),
        key_block(key_block) {
    open();
  }
  // Number of tiles that add to the block before this one: tiles of earlier keys, or of later keys where queries
  // ascend.
  FMHA_DEVICE int32_t position() const {
    const int32_t rank = keys.rank(row, place());
    return is_downward ? rank : keys.num_listing(row, current) - 1 - rank;
  }
  // Whether the block has a pair that is hidden.
  FMHA_DEVICE bool is_cut() const { return !listed.is_whole(); }
  FMHA_DEVICE HalfSeen seen_by(int half) const { return listed.seen_by(half); }
  FMHA_DEVICE void advance() {
    if (++at < num) {
      read();
    } else {
      ++i_head;
      open();
    }
  }

 private:
  FMHA_DEVICE int32_t place() const { return is_downward ? num - 1 - at : at; }
  FMHA_DEVICE void read() {
    listed = keys.listed(row, num_cut, num, place());
    current = listed.block();
  }
  // Goes to the next head, beginning with this one, that has blocks in its list.
  FMHA_DEVICE void open() {
    at = 0;
#pragma unroll 1
    for (; i_head < end_head; ++i_head) {
      row = keys.row_of(i_batch, i_head, key_block);
      const int32_t* counts = keys.list.counts + 2 * int64_t(row);
      num_cut = counts[0];
      num = num_cut + counts[1];
      if (num > 0) break;
    }
    if (i_head < end_head) read();
  }
};
template <BwdSpec spec, Sm90BwdTile tile, bool has_function, bool has_order>
FMHA_DEVICE ListedQueryBlocks<ShownBlocks<has_function, has_order>> query_blocks(
    const BwdParams& p, const Sm90BwdSchedule& schedule, const Work& work,
    const ShownBlocks<has_function, has_order>& keys) {
  const int32_t first_head = first_query_head<spec, tile>(p, schedule, work);
  // The lists have no row for a key block beyond the sequence or outside the band.
  const int32_t heads = work.q_blocks.empty() ? 0 : num_query_heads<spec, tile>(p, schedule, work.span);
  bool is_downward = false;
  if constexpr (has_order) is_downward = goes_upward<spec, tile>(schedule, work);
  return {keys, work.span.i_batch, work.key_block, {first_head, first_head + heads}, is_downward};
}

}  // namespace fmha::sm90::bwd
