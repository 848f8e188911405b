// Masks as data as kernels of tiles ask them: pair by pair in tiles that are cut, and once a warp for a tile.
#pragma once
#include <fmha/mask_data.h>
#include <fmha/num.h>
#include <fmha/ptx/collective.cuh>

namespace fmha {

struct DataKeys {
  static constexpr bool all = false, has_classes = true;
  // Blocks of queries or keys that a tile may lie in and still have a class.
  static constexpr int32_t kMostBlocks = 4;
  DataMasks masks;

  // A row or key beyond the sequence gets the answer of the last one; other tests hide it.
  FMHA_DEVICE bool sees(const SeqSpan& span, int32_t i_head, int32_t i, int32_t j) const {
    return masks.sees(span, i_head, min(i, span.seqlen_q - 1), min(j, span.seqlen_k - 1));
  }

  // Class of the pairs of a tile, as far as it is known.
  struct Known {
    bool none, every;
  };

  // Whether a row of a list has the block: each lane looks at some entries.
  static FMHA_DEVICE bool lists(const MaskTensor& counts, const MaskTensor& indices, int32_t most, int32_t batch,
                                int32_t head, int32_t row, int32_t block) {
    if (!counts.data) return false;
    const int32_t count = clamp(DataMasks::word(counts, batch, head, row, 0), 0, most);
    for (int32_t first = 0; first < count; first += 32) {
      const int32_t at = first + int32_t(threadIdx.x % 32);
      if (ptx::vote_ballot(at < count && DataMasks::word(indices, batch, head, row, at) == block) != 0) return true;
    }
    return false;
  }

  // Whether the blocks of a tile are all listed, or none; and whether some, or all, are full.
  FMHA_DEVICE void listed(const SeqSpan& span, int32_t i_head, Range rows, Range keys, Known& by_lists, bool& some_full,
                          bool& all_full) const {
    const MaskDataParams& m = masks.m;
    const Range blocks_q = {rows.begin / m.block_q, (rows.end - 1) / m.block_q + 1};
    const Range blocks_k = {keys.begin / m.block_k, (keys.end - 1) / m.block_k + 1};
    by_lists = {false, false};
    some_full = true;
    all_full = false;
    if (blocks_q.end - blocks_q.begin > kMostBlocks || blocks_k.end - blocks_k.begin > kMostBlocks) return;
    by_lists = {true, true};
    some_full = false;
    all_full = true;
    const int32_t head = i_head / m.lists_ratio;
    for (int32_t q = blocks_q.begin; q < blocks_q.end; ++q) {
      for (int32_t k = blocks_k.begin; k < blocks_k.end; ++k) {
        const bool full = lists(m.full_kv_num_blocks, m.full_kv_indices, m.full_max_blocks, span.i_batch, head, q, k);
        const bool there = full || lists(m.kv_num_blocks, m.kv_indices, m.max_blocks, span.i_batch, head, q, k);
        some_full |= full;
        all_full &= full;
        by_lists.none &= !there;
        by_lists.every &= there;
      }
    }
  }

  // Class of one row of the keys by the intervals.
  FMHA_DEVICE Known in_intervals(const SeqSpan& span, int32_t i_head, int32_t i, Range keys) const {
    const MaskDataParams& m = masks.m;
    const int32_t head = i_head / m.intervals_ratio, row = span.q_row + i;
    int32_t before = 0;
    Known known = {true, false};
    for (int32_t at = 0; at < m.endpoints; at += 2) {
      const int32_t begin = max(DataMasks::word(m.intervals, span.storage_batch, head, row, at), before);
      before = max(DataMasks::word(m.intervals, span.storage_batch, head, row, at + 1), begin);
      known.none &= max(begin, keys.begin) >= min(before, keys.end);
      known.every |= begin <= keys.begin && keys.end <= before;
    }
    return known;
  }

  // Class of one row of the keys by the bits.
  FMHA_DEVICE Known in_bits(const SeqSpan& span, int32_t i_head, int32_t i, Range keys) const {
    const MaskDataParams& m = masks.m;
    Known known = {true, true};
    for (int32_t w = keys.begin / 32; w <= (keys.end - 1) / 32; ++w) {
      const int32_t first = max(keys.begin - 32 * w, 0), end = min(keys.end - 32 * w, 32);
      const uint32_t asked = (0xffffffffu >> (32 - end + first)) << first;
      const uint32_t seen =
          asked & uint32_t(DataMasks::word(m.bits, span.storage_batch, i_head / m.bits_ratio, span.q_row + i, w));
      known.none &= seen == 0;
      known.every &= seen == asked;
    }
    return known;
  }

  // How the tile of a head's rows and keys, neither empty and both of the sequence, stands to the masks. The whole
  // warp asks; each lane looks at some rows.
  FMHA_DEVICE BlockClass class_of(const SeqSpan& span, int32_t i_head, Range rows, Range keys) const {
    const MaskDataParams& m = masks.m;
    Known by_lists = {false, true};
    bool some_full = false, all_full = false;
    if (m.block_q != 0) listed(span, i_head, rows, keys, by_lists, some_full, all_full);
    return class_by(span, i_head, rows, keys, by_lists, some_full);
  }
  // How the tile stands to them, where lists have been asked.
  FMHA_DEVICE BlockClass class_by(const SeqSpan& span, int32_t i_head, Range rows, Range keys, const Known& by_lists,
                                  bool some_full) const {
    const MaskDataParams& m = masks.m;
    if (by_lists.none) return BlockClass::Skipped;
    bool none = true, every = true;
    for (int32_t i = rows.begin + int32_t(threadIdx.x % 32); i < rows.end; i += 32) {
      Known by_intervals = {false, true}, by_bits = {false, true};
      if (m.intervals.data) by_intervals = in_intervals(span, i_head, i, keys);
      if (m.bits.data) by_bits = in_bits(span, i_head, i, keys);
      none &= by_intervals.none || by_bits.none;
      every &= by_intervals.every && by_bits.every;
    }
    none = ptx::vote_ballot(!none) == 0;
    every = ptx::vote_ballot(!every) == 0;
    // A full block shows what intervals and bits hide.
    if (none && !some_full) return BlockClass::Skipped;
    return every && by_lists.every ? BlockClass::Inside : BlockClass::Edge;
  }
};

}  // namespace fmha
