// Classes of tiles (skipped, whole or cut) under masks as
// data, which the lanes of a warp or wave determine together.
#pragma once
#include <fmha/mask_data.h>

namespace fmha {

// `Lanes` gives the number of lanes (`count`), this lane's number (`index`), one bit from each lane (`ballot`), and a
// number made equal in all lanes (`uniform`). Loops are uniform, or their variables are numbers: clang leaves a bool
// that a loop carries undefined in inactive lanes.
template <class Lanes>
struct MaskClasses {
  // Most blocks of block lists that a tile may overlap and still be classified.
  static constexpr int32_t kMostBlocks = 4;
  DataMasks masks;

  // A row or key beyond the sequence gets the result of the last one; other tests hide it.
  FMHA_DEVICE bool sees(const SeqSpan& span, int32_t i_head, int32_t i, int32_t j) const {
    return masks.sees(span, i_head, min(i, span.seqlen_q - 1), min(j, span.seqlen_k - 1));
  }

  // Knowledge so far about the class of a tile's pairs so far.
  struct Known {
    bool none, every;
  };

  // Whether a row of a list has the block: each lane looks at some entries.
  static FMHA_DEVICE bool lists(const MaskTensor& counts, const MaskTensor& indices, int32_t most, int32_t batch,
                                int32_t head, int32_t row, int32_t block) {
    if (!counts.data) return false;
    const int32_t count = Lanes::uniform(clamp(DataMasks::word(counts, batch, head, row, 0), 0, most));
    auto found = Lanes::ballot(false);
    for (int32_t first = 0; first < count && found == 0; first += Lanes::count) {
      const int32_t at = first + Lanes::index();
      const int32_t listed = at < count ? DataMasks::word(indices, batch, head, row, at) : -1;
      found = Lanes::ballot(listed == block);
    }
    return found != 0;
  }

  // Whether all or none of the blocks of a tile are listed, and whether some or all are full.
  FMHA_DEVICE void listed(const SeqSpan& span, int32_t i_head, Range rows, Range keys, Known& by_lists, bool& some_full,
                          bool& all_full) const {
    const MaskDataParams& m = masks.m;
    const Range blocks_q = {rows.begin / m.block_q, (rows.end - 1) / m.block_q + 1};
    const Range blocks_k = {keys.begin / m.block_k, (keys.end - 1) / m.block_k + 1};
    by_lists = {false, false};
    some_full = true;
    all_full = false;
    if (blocks_q.end - blocks_q.begin > kMostBlocks || blocks_k.end - blocks_k.begin > kMostBlocks) return;
    const int32_t head = i_head / m.lists_ratio;
    int32_t num_there = 0, num_full = 0;
    for (int32_t q = blocks_q.begin; q < blocks_q.end; ++q) {
      for (int32_t k = blocks_k.begin; k < blocks_k.end; ++k) {
        const int32_t block = k + m.first_block_k;
        const bool full =
            lists(m.full_kv_num_blocks, m.full_kv_indices, m.full_max_blocks, span.i_batch, head, q, block);
        const bool there = full || lists(m.kv_num_blocks, m.kv_indices, m.max_blocks, span.i_batch, head, q, block);
        num_full += full ? 1 : 0;
        num_there += there ? 1 : 0;
      }
    }
    const int32_t num = (blocks_q.end - blocks_q.begin) * (blocks_k.end - blocks_k.begin);
    by_lists = {num_there == 0, num_there == num};
    some_full = num_full > 0;
    all_full = num_full == num;
  }

  // Class of one row's keys by the intervals.
  FMHA_DEVICE Known in_intervals(const SeqSpan& span, int32_t i_head, int32_t i, Range keys) const {
    const MaskDataParams& m = masks.m;
    const int32_t head = i_head / m.intervals_ratio, row = span.q_row + i;
    int32_t before = 0, most = 0;  // keys of one interval
    for (int32_t at = 0; at < m.endpoints; at += 2) {
      const int32_t begin = max(DataMasks::endpoint(m, span.storage_batch, head, row, at), before);
      before = max(DataMasks::endpoint(m, span.storage_batch, head, row, at + 1), begin);
      most = max(most, min(before, keys.end) - max(begin, keys.begin));
    }
    return {most == 0, most == keys.end - keys.begin};
  }

  // Class of one row's keys by the bits.
  FMHA_DEVICE Known in_bits(const SeqSpan& span, int32_t i_head, int32_t i, Range keys) const {
    const MaskDataParams& m = masks.m;
    uint32_t shown = 0, hidden = 0;
    for (int32_t w = keys.begin / 32; w <= (keys.end - 1) / 32; ++w) {
      const int32_t first = max(keys.begin - 32 * w, 0), end = min(keys.end - 32 * w, 32);
      const uint32_t asked = (0xffffffffu >> (32 - end + first)) << first;
      const uint32_t seen =
          asked & uint32_t(DataMasks::word(m.bits, span.storage_batch, i_head / m.bits_ratio, span.q_row + i, w));
      shown |= seen;
      hidden |= asked & ~seen;
    }
    return {shown == 0, hidden == 0};
  }

  // Class of the tile of a head's rows and keys under the masks; both are
  // non-empty and inside the sequence. All lanes call it; each tests some rows.
  FMHA_DEVICE BlockClass class_of(const SeqSpan& span, int32_t i_head, Range rows, Range keys) const {
    const MaskDataParams& m = masks.m;
    Known by_lists = {false, true};
    bool some_full = false, all_full = false;
    if (m.block_q != 0) listed(span, i_head, rows, keys, by_lists, some_full, all_full);
    return class_by(span, i_head, rows, keys, by_lists, some_full);
  }
  // Class of the tile under the masks, given the result of the lists.
  FMHA_DEVICE BlockClass class_by(const SeqSpan& span, int32_t i_head, Range rows, Range keys, const Known& by_lists,
                                  bool some_full) const {
    const MaskDataParams& m = masks.m;
    if (by_lists.none) return BlockClass::Skipped;
    int32_t seeing = 0, cut = 0;  // rows
    for (int32_t i = rows.begin + Lanes::index(); i < rows.end; i += Lanes::count) {
      Known by_intervals = {false, true}, by_bits = {false, true};
      if (m.intervals.data) by_intervals = in_intervals(span, i_head, i, keys);
      if (m.bits.data) by_bits = in_bits(span, i_head, i, keys);
      seeing += by_intervals.none || by_bits.none ? 0 : 1;
      cut += by_intervals.every && by_bits.every ? 0 : 1;
    }
    const bool none = Lanes::ballot(seeing > 0) == 0, every = Lanes::ballot(cut > 0) == 0;
    // Full blocks also show pairs that intervals and bits hide.
    if (none && !some_full) return BlockClass::Skipped;
    return every && by_lists.every ? BlockClass::Inside : BlockClass::Edge;
  }
};

}  // namespace fmha
