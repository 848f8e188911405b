// Masks as data for partly masked tiles in a wave: one bit for each key of a run that a lane's query sees,
// or for each query of a run that sees its key. All lanes of the wave read lists of blocks together.
#pragma once
#include <fmha/mask_data.h>

namespace fmha {

// The bits of a word left of bit x.
FMHA_DEVICE uint32_t bits_below(int32_t x) { return x >= 32 ? ~0u : (1u << max(x, 0)) - 1; }
FMHA_DEVICE uint32_t bits_between(int32_t begin, int32_t end) { return bits_below(end) & ~bits_below(begin); }

// Pairs that masks as data show (`seen`), and pairs of full blocks, which no mask hides (`full`).
template <int words>
struct ShownBits {
  Array<uint32_t, words> seen, full;
};

// Bits of masks as data. `Lanes` is as for `MaskClasses`; in addition `from(x, lane)` returns the number of another
// lane.
template <class Lanes>
struct ShownWords {
  DataMasks masks;

  // Bits of the `32 * words` keys from `first` on that query i sees. `rows`:
  // a range of the sequence's queries that contains those of all lanes.
  template <int words>
  FMHA_DEVICE ShownBits<words> of_query(const SeqSpan& span, int32_t i_head, int32_t i, Range rows,
                                        int32_t first) const {
    const MaskDataParams& m = masks.m;
    ShownBits<words> shown;
#pragma unroll
    for (int w = 0; w < words; ++w) shown.seen[w] = ~0u, shown.full[w] = 0;
    const int32_t row = span.q_row + i;
    if (m.intervals.data) {
      const int32_t head = i_head / m.intervals_ratio;
      int32_t before = 0;
#pragma unroll
      for (int w = 0; w < words; ++w) shown.seen[w] = 0;
#pragma unroll 1
      for (int32_t at = 0; at < m.endpoints; at += 2) {
        const int32_t begin = max(DataMasks::endpoint(m, span.storage_batch, head, row, at), before);
        before = max(DataMasks::endpoint(m, span.storage_batch, head, row, at + 1), begin);
#pragma unroll
        for (int w = 0; w < words; ++w) shown.seen[w] |= bits_between(begin - first - 32 * w, before - first - 32 * w);
      }
    }
    if (m.bits.data) {
      const int32_t last_word = (span.seqlen_k - 1) / 32;
#pragma unroll
      for (int w = 0; w < words; ++w) {
        // Keys beyond the sequence have the last word's bits.
        const int32_t at = min(first / 32 + w, last_word), head = i_head / m.bits_ratio;
        shown.seen[w] &= uint32_t(DataMasks::word(m.bits, span.storage_batch, head, row, at)) >> first % 32;
      }
    }
    if (m.block_q != 0) {
      Array<uint32_t, words> asked;
#pragma unroll
      for (int w = 0; w < words; ++w) asked[w] = 0;
      const Range keys = {first, min(first + 32 * words, span.seqlen_k)};
      for_each_listed(span, i_head, rows, keys, [&](int32_t q, int32_t k, bool is_full) {
        if (i / m.block_q != q) return;
        const int32_t begin = k * m.block_k - first;
#pragma unroll
        for (int w = 0; w < words; ++w) {
          const uint32_t bits = bits_between(begin - 32 * w, begin + m.block_k - 32 * w);
          asked[w] |= bits;
          if (is_full) shown.full[w] |= bits;
        }
      });
#pragma unroll
      for (int w = 0; w < words; ++w) shown.seen[w] = (shown.seen[w] & asked[w]) | shown.full[w];
    }
    return shown;
  }

  // Bits of the 32 queries from `first` on, in the sequence or beyond, that see key
  // j. `keys`: a range of the sequence's keys that contains those of all lanes.
  FMHA_DEVICE ShownBits<1> of_key(const SeqSpan& span, int32_t i_head, int32_t j, Range keys, int32_t first) const {
    const MaskDataParams& m = masks.m;
    ShownBits<1> shown = {{{~0u}}, {{0u}}};
    const Range rows = {first, min(first + 32, span.seqlen_q)};
    if (m.intervals.data || m.bits.data) {
      uint32_t seen = 0;
#pragma unroll 1
      for (int32_t i = rows.begin; i < rows.end; ++i) {
        int32_t sees = 1;
        if (m.intervals.data) sees &= int32_t(masks.in_intervals(span, i_head, i, j));
        if (m.bits.data) sees &= int32_t(masks.has_bit(span, i_head, i, j));
        seen |= uint32_t(sees) << (i - first);
      }
      shown.seen[0] = seen;
    }
    if (m.block_q != 0) {
      uint32_t asked = 0;
      for_each_listed(span, i_head, rows, keys, [&](int32_t q, int32_t k, bool is_full) {
        if (j / m.block_k != k) return;
        const int32_t begin = q * m.block_q - first;
        const uint32_t bits = bits_between(begin, begin + m.block_q);
        asked |= bits;
        if (is_full) shown.full[0] |= bits;
      });
      shown.seen[0] = (shown.seen[0] & asked) | shown.full[0];
    }
    return shown;
  }

 private:
  // Calls `take(q, k, is_full)` for each listed block that overlaps the rows and
  // the keys. Each lane tests one entry; all lanes process each match together.
  template <class Take>
  FMHA_DEVICE void for_each_listed(const SeqSpan& span, int32_t i_head, Range rows, Range keys, Take take) const {
    const MaskDataParams& m = masks.m;
    const int32_t head = i_head / m.lists_ratio, end = (rows.end - 1) / m.block_q;
    const int32_t first_block = m.first_block_k;
    const Range blocks = {keys.begin / m.block_k + first_block, (keys.end - 1) / m.block_k + 1 + first_block};
#pragma unroll 1
    for (int32_t q = rows.begin / m.block_q; q <= end; ++q) {
      in_list(m.kv_num_blocks, m.kv_indices, m.max_blocks, span.i_batch, head, q, blocks,
              [&](int32_t k) { take(q, k - first_block, false); });
      in_list(m.full_kv_num_blocks, m.full_kv_indices, m.full_max_blocks, span.i_batch, head, q, blocks,
              [&](int32_t k) { take(q, k - first_block, true); });
    }
  }
  template <class Take>
  FMHA_DEVICE static void in_list(const MaskTensor& counts, const MaskTensor& indices, int32_t most, int32_t batch,
                                  int32_t head, int32_t q, Range blocks, Take take) {
    if (!counts.data) return;
    const int32_t count = Lanes::uniform(clamp(DataMasks::word(counts, batch, head, q, 0), 0, most));
#pragma unroll 1
    for (int32_t at = 0; at < count; at += Lanes::count) {
      const int32_t mine = at + Lanes::index() < count
                               ? DataMasks::word(indices, batch, head, q, at + Lanes::index())
                               : -1;
#pragma unroll 1
      for (uint64_t found = Lanes::ballot(mine >= blocks.begin && mine < blocks.end); found != 0; found &= found - 1) {
        take(Lanes::from(mine, __builtin_ctzll(found)));
      }
    }
  }
};

}  // namespace fmha
