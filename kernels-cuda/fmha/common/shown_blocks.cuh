// Masks as data, and a mask as code, for persistent tiled kernels. A list, made by tile_list.cuh, names the key blocks
// that a tile of queries sees, or the query blocks that see a tile of keys: partly masked blocks first, fully visible
// blocks behind them. Only in partly masked blocks are single pairs tested, some bits of a row at a time.
#pragma once
#include <fmha/common/data_keys.cuh>
#include <fmha/common/seen_keys.cuh>
#include <fmha/listed_block.h>
#include <fmha/mma/fragment.cuh>
#include <fmha/score.h>
#include <fmha/shown_pairs.h>
#include <fmha/shown_words.h>
#include <fmha/tile_list.h>

namespace fmha {

template <bool is_wide>
struct BitsOf {
  using type = uint32_t;
};
template <>
struct BitsOf<true> {
  using type = uint64_t;
};

// Bits of a thread's elements of one row of a fragment of n columns: bit 2 c + d is column 8 c + d from the
// thread's first, d 0 or 1.
template <int n>
struct RowBits {
  static_assert(n <= 256, "64 bits have 256 columns");
  // Masks leave few registers, so 32 bits are used where they cover all columns.
  using Bits = typename BitsOf<(n > 128)>::type;
  static constexpr int count_bits = 8 * sizeof(Bits);
  static constexpr int bit_of(int column) { return column / 8 * 2 + column % 8; }
  // The bits of the elements left of `column`, which counts from the thread's first column.
  static FMHA_DEVICE Bits below(int32_t column) {
    const int32_t x = clamp(column, 0, n), count = x / 8 * 2 + min(x % 8, 2);
    return count < count_bits ? (Bits(1) << count) - 1 : ~Bits(0);
  }
  static FMHA_DEVICE Bits between(int32_t begin, int32_t end) { return below(end) & ~below(begin); }
};

template <int n>
using BitsIn = typename RowBits<n>::Bits;

// Which queries of a block of n see each of a thread's two keys, one bit each.
template <int n>
struct QueriesOf {
  BitsIn<n> seen[2];
  static FMHA_DEVICE QueriesOf all() { return {{~BitsIn<n>(0), ~BitsIn<n>(0)}}; }
  // Sets the elements of hidden pairs to zero.
  FMHA_DEVICE void zero_hidden(mma::Accumulator<n>& x) const {
#pragma unroll
    for (int e = 0; e < x.num_elems; ++e) {
      if (!(seen[x.row(e)] >> RowBits<n>::bit_of(x.column(e)) & 1)) x[e] = 0.f;
    }
  }
};

// `has_order`: lists of blocks of queries come with steps and ranks (`rank_tiles`).
template <bool has_function, bool has_order = false>
struct ShownBlocks {
  static constexpr bool is_ordered = has_order;
  static constexpr bool all = false, has_classes = false, has_tile_list = true;
  template <int n>
  using Queries = QueriesOf<n>;
  ShownPairs<has_function> pairs;
  const TileList& list;

  // Number of a tile's row in the lists of blocks.
  FMHA_DEVICE int32_t row_of(int32_t i_batch, int32_t i_head, int32_t tile) const {
    return (i_batch * list.heads_of_batch + i_head / list.heads_ratio) * list.num_tiles + tile;
  }
  // The i-th block of a row, whose first `num_cut` are partly masked. Whole ones lie at the row's end, reversed.
  FMHA_DEVICE int32_t entry(int32_t row, int32_t num_cut, int32_t i) const {
    return list.blocks[int64_t(row) * list.max_blocks + place(num_cut, i)];
  }
  FMHA_DEVICE int32_t place(int32_t num_cut, int32_t i) const {
    return i < num_cut ? i : list.max_blocks - 1 - (i - num_cut);
  }
  // The i-th block of queries of a row of `num`, where `num_cut` are partly masked. With an order queries ascend from
  // the row's first to its last; else partly masked blocks descend, and whole ones behind them.
  FMHA_DEVICE ListedBlock listed(int32_t row, int32_t num_cut, int32_t num, int32_t i) const {
    if constexpr (is_ordered) return {steps_of(row)[2 * i]};
    const bool is_cut = i < num_cut;
    return {entry(row, num_cut, i) | (is_cut ? 0 : ListedBlock::kWhole)};
  }
  // How many earlier tiles list that block, and how many tiles of its head list it.
  FMHA_DEVICE int32_t rank(int32_t row, int32_t i) const { return steps_of(row)[2 * i + 1]; }
  FMHA_DEVICE int32_t num_listing(int32_t row, int32_t block) const {
    return steps_of(row - row % list.num_tiles + list.num_tiles - 1)[2 * int64_t(list.max_blocks) + block];
  }
  // Steps of a row of the list, two words each. A row of counters follows each head's rows.
  FMHA_DEVICE const int32_t* steps_of(int32_t row) const {
    return list.ranks + 2 * (int64_t(row + row / list.num_tiles) * list.max_blocks);
  }
  template <class Work>
  FMHA_DEVICE int32_t block_at(const Work& work, int32_t i) const { return entry(work.part, work.num_band_blocks, i); }

  // Replaces the key blocks of the tile's band by those of its list: `num_band_blocks` of them are partly masked, and
  // `part` is the list's row.
  template <FwdSpec spec, auto tile, class Work>
  FMHA_DEVICE void take(const FwdParams& p, Work& work) const {
    static_assert(tile.cluster == 1 && !tile.pack_gqa, "lists are of one head's tiles");
    work.part = row_of(work.i_batch, work.i_head, work.first_row / tile.block_m);
    const int32_t* counts = list.counts + 2 * int64_t(work.part);
    work.num_band_blocks = counts[0];
    work.num_blocks = counts[0] + counts[1];
    work.last_block = block_at(work, 0);
    work.last_sink_block = -1;
    work.first_dirty = first_dirty_of<spec, tile>(p, work, work.last_block);
  }

  // Bits of a row's elements that the mask's intervals show; `first_key` is the thread's first key.
  template <int n>
  FMHA_DEVICE BitsIn<n> in_intervals(const SeqSpan& span, int32_t i_head, int32_t i, int32_t first_key) const {
    const MaskDataParams& m = pairs.masks.m;
    const int32_t head = i_head / m.intervals_ratio, row = span.q_row + i;
    int32_t before = 0;
    BitsIn<n> seen = 0;
#pragma unroll 1
    for (int32_t at = 0; at < m.endpoints; at += 2) {
      const int32_t begin = max(DataMasks::endpoint(m, span.storage_batch, head, row, at), before);
      before = max(DataMasks::endpoint(m, span.storage_batch, head, row, at + 1), begin);
      seen |= RowBits<n>::between(begin - first_key, before - first_key);
    }
    return seen;
  }

  // Loads words of bits for the thread's two rows, `row` and `row + 8`, before `hide` needs them.
  template <int n>
  FMHA_DEVICE void fetch(FetchedBits<n>& to, const SeqSpan& span, int32_t i_head, int32_t row,
                         int32_t block_key) const {
    const MaskDataParams& m = pairs.masks.m;
    if (!m.bits.data) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t i = span.q_row + min(row + 8 * r, span.seqlen_q - 1);
#pragma unroll
      for (int w = 0; w < n / 32; ++w) to.words[r][w] = word_of_bits(span, i_head, i, block_key / 32 + w);
    }
  }
  // Number of a word in a row of bits. A word beyond the sequence has the last word's number.
  FMHA_DEVICE uint32_t word_of_bits(const SeqSpan& span, int32_t i_head, int32_t row, int32_t word) const {
    const MaskDataParams& m = pairs.masks.m;
    const int32_t at = min(word, (span.seqlen_k - 1) / 32);
    return uint32_t(DataMasks::word(m.bits, span.storage_batch, i_head / m.bits_ratio, row, at));
  }
  // Bits of a row's elements, from a row that consists of whole words.
  template <int n>
  static FMHA_DEVICE BitsIn<n> of_words(const uint32_t (&words)[n / 32]) {
    BitsIn<n> seen = 0;
#pragma unroll
    for (int w = 0; w < n / 32; ++w) {
      const uint32_t own = words[w] >> mma::fragment_column();
#pragma unroll
      for (int c = 0; c < 4; ++c) seen |= BitsIn<n>(own >> 8 * c & 3u) << (2 * (4 * w + c));
    }
    return seen;
  }

  // Elements of a row whose mask bits are 1. Columns beyond the sequence use the last word.
  template <int n>
  FMHA_DEVICE BitsIn<n> in_bits(const SeqSpan& span, int32_t i_head, int32_t i, int32_t block_key) const {
    const MaskDataParams& m = pairs.masks.m;
    const int32_t head = i_head / m.bits_ratio, row = span.q_row + i, last_word = (span.seqlen_k - 1) / 32;
    BitsIn<n> seen = 0;
#pragma unroll
    for (int c = 0; c < n / 8; ++c) {
      const int32_t j = block_key + 8 * c, word = min(j / 32, last_word);
      const uint32_t bits = DataMasks::word(m.bits, span.storage_batch, head, row, word);
      seen |= BitsIn<n>(bits >> (j % 32 + mma::fragment_column()) & 3u) << (2 * c);
    }
    return seen;
  }

  // Applies block lists to `seen`, the bits of the thread's two rows: clears pairs of blocks that are not listed, and
  // returns pairs of full blocks. The whole warp calls it. `rows` are the thread's, `row` is the warp's first of
  // sixteen, `column` the fragment's first; with `of_keys` rows are keys and columns queries.
  template <int n, bool of_keys>
  FMHA_DEVICE void in_lists(const SeqSpan& span, int32_t i_head, const int32_t (&rows)[2], int32_t row, int32_t column,
                            BitsIn<n> (&seen)[2], BitsIn<n> (&full)[2]) const {
    const MaskDataParams& m = pairs.masks.m;
    const int32_t head = i_head / m.lists_ratio, origin = column + mma::fragment_column();
    const int32_t of_rows = of_keys ? m.block_k : m.block_q, of_columns = of_keys ? m.block_q : m.block_k;
    const int32_t last_row = (of_keys ? span.seqlen_k : span.seqlen_q) - 1;
    const int32_t last_column = (of_keys ? span.seqlen_q : span.seqlen_k) - 1;
    const int32_t end_r = ptx::shfl_idx(min(row + 15, last_row) / of_rows, 0);
    const int32_t end_c = ptx::shfl_idx(min(column + n - 1, last_column) / of_columns, 0);
    BitsIn<n> asked[2] = {0, 0};
#pragma unroll 1
    for (int32_t r = ptx::shfl_idx(min(row, last_row) / of_rows, 0); r <= end_r; ++r) {
#pragma unroll 1
      for (int32_t c = ptx::shfl_idx(column / of_columns, 0); c <= end_c; ++c) {
        const int32_t q = of_keys ? c : r, k = (of_keys ? r : c) + m.first_block_k;
        const bool is_full =
            DataKeys::lists(m.full_kv_num_blocks, m.full_kv_indices, m.full_max_blocks, span.i_batch, head, q, k);
        const bool there =
            is_full || DataKeys::lists(m.kv_num_blocks, m.kv_indices, m.max_blocks, span.i_batch, head, q, k);
        if (!there) continue;
        const int32_t begin = c * of_columns - origin;
        const BitsIn<n> columns = RowBits<n>::between(begin, begin + of_columns);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (rows[i] / of_rows != r) continue;
          asked[i] |= columns;
          if (is_full) full[i] |= columns;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) seen[i] &= asked[i];
  }

  // Writes -inf where the masks hide a key of a block from the thread's two rows, `row` and `row + 8` of the sequence.
  // The whole warp calls it. Rows beyond the sequence are treated as the last row. `fetched`: the words that `fetch`
  // has loaded.
  template <int n, int columns>
  FMHA_DEVICE void hide(mma::Accumulator<n>& s, const SeqSpan& span, int32_t i_head, int32_t row, int32_t block_key,
                        const FetchedBits<columns>& fetched) const {
    const MaskDataParams& m = pairs.masks.m;
    BitsIn<n> seen[2], full[2] = {0, 0};
    int32_t rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows[r] = min(row + 8 * r, span.seqlen_q - 1);
      seen[r] = ~BitsIn<n>(0);
      if (m.intervals.data) seen[r] = in_intervals<n>(span, i_head, rows[r], block_key + mma::fragment_column());
      if (m.bits.data) {
        if constexpr (n == columns && FetchedBits<n>::is_whole) seen[r] &= of_words<n>(fetched.words[r]);
        else seen[r] &= in_bits<n>(span, i_head, rows[r], block_key);
      }
    }
    if (m.block_q != 0) in_lists<n, false>(span, i_head, rows, row - threadIdx.x % 32 / 4, block_key, seen, full);
    const Functions functions = functions_of(span, i_head);
#pragma unroll
    for (int e = 0; e < s.num_elems; ++e) {
      const int r = s.row(e), bit = RowBits<n>::bit_of(s.column(e));
      bool sees = seen[r] >> bit & 1;
      // The function is evaluated for every pair: behind a branch, each pair would wait for its own loads.
      if constexpr (has_function)
        sees = sees & functions.shows({row, block_key + mma::fragment_column(), 8 * r, s.column(e)});
      if (!(sees || full[r] >> bit & 1)) s[e] = -infinity();
    }
  }

  // Which queries of a block, of which `query` is the first, see the thread's two keys, `key` and `key + 8` of the
  // sequence: a bit each of `n / 4` of the first key, then of the second. The whole warp asks. Rows beyond the
  // sequence have the last one's answer; what it says of keys beyond means nothing.
  template <int n>
  FMHA_DEVICE QueriesOf<n> queries_of(const SeqSpan& span, int32_t i_head, int32_t key, int32_t query) const {
    const MaskDataParams& m = pairs.masks.m;
    BitsIn<n> seen[2] = {~BitsIn<n>(0), ~BitsIn<n>(0)}, full[2] = {0, 0};
    if (m.intervals.data || m.bits.data) {
      static_assert(n % 32 == 0, "a lane asks for a query of 32");
      const int32_t lane = threadIdx.x % 32;
      seen[0] = seen[1] = 0;
#pragma unroll
      for (int q = 0; q < n; q += 32) {
        const uint32_t own = warp_keys_of(span, i_head, min(query + q + lane, span.seqlen_q - 1), key - lane / 4);
#pragma unroll
        for (int c = q / 4; c < q / 4 + 8; ++c) {
          const uint32_t shown = ptx::shfl_idx(own, c / 2 * 8 % 32 + c % 2 + mma::fragment_column()) >> lane / 4;
          seen[0] |= BitsIn<n>(shown & 1u) << c;
          seen[1] |= BitsIn<n>(shown >> 8 & 1u) << c;
        }
      }
    }
    const int32_t keys[2] = {min(key, span.seqlen_k - 1), min(key + 8, span.seqlen_k - 1)};
    if (m.block_q != 0) in_lists<n, true>(span, i_head, keys, key - threadIdx.x % 32 / 4, query, seen, full);
    if constexpr (has_function) {
      const Functions functions = Functions::of(pairs.p, span, i_head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        BitsIn<n> shows = 0;
#pragma unroll
        for (int c = 0; c < n / 4; ++c) {
          const int column = c / 2 * 8 + c % 2;
          shows |= BitsIn<n>(functions.shows({query + mma::fragment_column(), key, column, 8 * r})) << c;
        }
        seen[r] &= shows;
      }
    }
    return {{seen[0] | full[0], seen[1] | full[1]}};
  }
  FMHA_DEVICE Functions functions_of(const SeqSpan& span, int32_t i_head) const {
    return has_function ? Functions::of(pairs.p, span, i_head) : Functions{};
  }
  // Bits of the 16 keys from `first` on, a multiple of 16, that intervals and bits show to a row.
  FMHA_DEVICE uint32_t warp_keys_of(const SeqSpan& span, int32_t i_head, int32_t i, int32_t first) const {
    const MaskDataParams& m = pairs.masks.m;
    const int32_t row = span.q_row + i;
    uint32_t shown = ~0u;
    if (m.intervals.data) {
      const int32_t head = i_head / m.intervals_ratio;
      int32_t before = 0;
      shown = 0;
#pragma unroll 1
      for (int32_t at = 0; at < m.endpoints; at += 2) {
        const int32_t begin = max(DataMasks::endpoint(m, span.storage_batch, head, row, at), before);
        before = max(DataMasks::endpoint(m, span.storage_batch, head, row, at + 1), begin);
        shown |= bits_between(begin - first, before - first);
      }
    }
    if (m.bits.data) {
      const int32_t word = min(first / 32, (span.seqlen_k - 1) / 32);
      shown &= uint32_t(DataMasks::word(m.bits, span.storage_batch, i_head / m.bits_ratio, row, word)) >> first % 32;
    }
    return shown;
  }
};

}  // namespace fmha
