// Masks as data, and a mask as code, where a thread has one row of a tile: a query, whose columns are keys, or with
// `of_keys` a key, whose columns are queries. A word has 32 columns, a bit each.
#pragma once
#include <fmha/common/shown_blocks.cuh>
#include <fmha/sm100/common/shown_columns.cuh>

namespace fmha::sm100 {

template <bool has_function, bool has_order = false>
struct ShownRows : ShownBlocks<has_function, has_order> {
  using Blocks = ShownBlocks<has_function, has_order>;
  using Blocks::pairs;

  // Bits of the n keys from `first` on that intervals show to a query.
  template <int n>
  FMHA_DEVICE ShownColumns<n> keys_in_intervals(const SeqSpan& span, int32_t i_head, int32_t i, int32_t first) const {
    const MaskDataParams& m = pairs.masks.m;
    const int32_t head = i_head / m.intervals_ratio, row = span.q_row + i;
    ShownColumns<n> shown = ShownColumns<n>::all(false);
    int32_t before = 0;
#pragma unroll 1
    for (int32_t at = 0; at < m.endpoints; at += 2) {
      const int32_t begin = max(DataMasks::endpoint(m, span.storage_batch, head, row, at), before);
      before = max(DataMasks::endpoint(m, span.storage_batch, head, row, at + 1), begin);
      shown.add(begin - first, before - first);
    }
    return shown;
  }
  // Bits of the keys that a query sees. Keys beyond the sequence use the last word. `first` is a multiple of 32.
  template <int n>
  FMHA_DEVICE ShownColumns<n> keys_in_bits(const SeqSpan& span, int32_t i_head, int32_t i, int32_t first) const {
    const MaskDataParams& m = pairs.masks.m;
    const int32_t head = i_head / m.bits_ratio, row = span.q_row + i, last_word = (span.seqlen_k - 1) / 32;
    ShownColumns<n> shown;
#pragma unroll
    for (int w = 0; w < shown.num_words; ++w)
      shown.words[w] = uint32_t(DataMasks::word(m.bits, span.storage_batch, head, row, min(first / 32 + w, last_word)));
    return shown;
  }
  // Bits of the n queries from `first` on that see a key by intervals and bits. Both masks are stored by query, so all
  // lanes of a warp read the same words. Queries beyond the sequence are treated as the last one.
  template <int n>
  FMHA_DEVICE ShownColumns<n> queries_in_rows(const SeqSpan& span, int32_t i_head, int32_t key, int32_t first) const {
    const MaskDataParams& m = pairs.masks.m;
    ShownColumns<n> shown;
#pragma unroll
    for (int w = 0; w < shown.num_words; ++w) {
      uint32_t word = 0;
#pragma unroll 1
      for (int32_t e = 0; e < 32; ++e) {
        const int32_t i = min(first + 32 * w + e, span.seqlen_q - 1);
        bool sees = true;
        if (m.intervals.data) sees = pairs.masks.in_intervals(span, i_head, i, key);
        if (m.bits.data) sees &= pairs.masks.has_bit(span, i_head, i, key);
        word |= uint32_t(sees) << e;
      }
      shown.words[w] = word;
    }
    __syncwarp();
    return shown;
  }

  // Restricts `shown` to listed blocks, and returns in `full` the keys of full blocks.
  // Called by the whole warp; its rows, all in the sequence, ascend with its lanes.
  template <int n, bool of_keys>
  FMHA_DEVICE void in_lists(const SeqSpan& span, int32_t i_head, int32_t row, int32_t first, ShownColumns<n>& shown,
                            ShownColumns<n>& full) const {
    const MaskDataParams& m = pairs.masks.m;
    const int32_t head = i_head / m.lists_ratio;
    const int32_t of_rows = of_keys ? m.block_k : m.block_q, of_columns = of_keys ? m.block_q : m.block_k;
    const int32_t last_column = (of_keys ? span.seqlen_q : span.seqlen_k) - 1, own = row / of_rows;
    const int32_t end_r = ptx::shfl_idx(own, 31);
    const int32_t end_c = ptx::shfl_idx(min(first + n - 1, last_column) / of_columns, 0);
    ShownColumns<n> listed = ShownColumns<n>::all(false);
#pragma unroll 1
    for (int32_t r = ptx::shfl_idx(own, 0); r <= end_r; ++r) {
#pragma unroll 1
      for (int32_t c = ptx::shfl_idx(first / of_columns, 0); c <= end_c; ++c) {
        const int32_t q = of_keys ? c : r, k = (of_keys ? r : c) + m.first_block_k;
        const bool is_full =
            DataKeys::lists(m.full_kv_num_blocks, m.full_kv_indices, m.full_max_blocks, span.i_batch, head, q, k);
        const bool there =
            is_full || DataKeys::lists(m.kv_num_blocks, m.kv_indices, m.max_blocks, span.i_batch, head, q, k);
        if (!there) continue;
        const int32_t begin = own == r ? c * of_columns - first : n, end = begin + of_columns;
        listed.add(begin, end);
        if (is_full) full.add(begin, end);
      }
    }
    shown.leave(listed);
  }

  // Restricts `shown` to pairs that the mask as code shows. The loop
  // is not unrolled: it would take the registers of the scores.
  template <int n, bool of_keys>
  FMHA_DEVICE void by_function(const SeqSpan& span, int32_t i_head, int32_t row, int32_t first,
                               ShownColumns<n>& shown) const {
    const Functions functions = Functions::of(pairs.p, span, i_head);
#pragma unroll
    for (int w = 0; w < shown.num_words; ++w) {
      uint32_t hidden = 0;
#pragma unroll 1
      for (int32_t e = 0; e < 32; e += 4) {
        const int32_t column = first + 32 * w + e;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const Pair pair = of_keys ? Pair{column, row, k, 0} : Pair{row, column, 0, k};
          hidden |= uint32_t(!functions.shows(pair)) << (e + k);
        }
      }
      shown.words[w] &= ~hidden;
    }
    __syncwarp();
  }

  // Bits of the n columns from `first` on that are visible to a thread's row. The whole warp calls it. Rows beyond the
  // sequence are treated as the last row.
  template <int n, bool of_keys>
  FMHA_DEVICE ShownColumns<n> columns(const SeqSpan& span, int32_t i_head, int32_t row, int32_t first) const {
    const MaskDataParams& m = pairs.masks.m;
    row = min(row, (of_keys ? span.seqlen_k : span.seqlen_q) - 1);
    ShownColumns<n> shown = ShownColumns<n>::all(true), full = ShownColumns<n>::all(false);
    if constexpr (of_keys) {
      if (m.intervals.data || m.bits.data) shown = queries_in_rows<n>(span, i_head, row, first);
    } else {
      if (m.intervals.data) shown = keys_in_intervals<n>(span, i_head, row, first);
      if (m.bits.data) shown.leave(keys_in_bits<n>(span, i_head, row, first));
    }
    if (m.block_q != 0) in_lists<n, of_keys>(span, i_head, row, first, shown, full);
    if constexpr (has_function) by_function<n, of_keys>(span, i_head, row, first, shown);
#pragma unroll
    for (int w = 0; w < shown.num_words; ++w) shown.words[w] |= full.words[w];
    return shown;
  }

  // Writes -inf where the masks hide a key of a block from the thread's query `i`.
  template <int n>
  FMHA_DEVICE void hide(float (&s)[n], const SeqSpan& span, int32_t i_head, int32_t i, int32_t block_key) const {
    const ShownColumns<n> shown = columns<n, false>(span, i_head, i, block_key);
#pragma unroll
    for (int e = 0; e < n; ++e) {
      if (!shown.has(e)) s[e] = -infinity();
    }
  }
};

}  // namespace fmha::sm100
