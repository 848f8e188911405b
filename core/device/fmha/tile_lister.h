// Writes lists of the key blocks that tiles of queries see under masks as data, or of the query blocks that see tiles
// of keys: one small launch with a group of threads for each tile and mask head. Its warps (or waves) classify blocks;
// blocks are stored from the last to the first, partly masked ones from the row's begin upwards, whole ones from its
// end downwards. With `marks_halves`, words of partly masked query blocks also say for each half of the tile's keys
// which queries see it (listed_block.h).
#pragma once
#include <fmha/bwd.h>
#include <fmha/listed_block.h>
#include <fmha/mask_classes.h>
#include <fmha/score.h>
#include <fmha/tile_list.h>

namespace fmha {

// `Group`: a vendor's group of threads (`threads`, `thread()`, `group_index()`, `barrier()`), whose warps have the
// lanes that `MaskClasses` needs; `bits_in` counts a ballot's bits, `reconverge()` joins a warp's lanes; where it
// `has_atomics`, `set_bits` sets bits of a word in shared memory. `has_a_block_of_none`: a tile of queries that sees no
// key has one block, outside the tensor. `has_function`: a mask as code joins the masks as data. `has_bits`: a launch
// before has written what it shows into the bits of the masks.
template <class Group, bool has_function, bool has_bits = false>
struct TileLister {
  using Classes = MaskClasses<Group>;
  static constexpr int warps = Group::threads / Group::count, words = Group::threads / 32;

  // Marks a block whose class the bounds do not decide.
  static constexpr uint8_t kUnknown = 255;

  // Results that the threads of a group exchange.
  struct Shared {
    uint8_t classes[Group::threads];
    int32_t counts[2][warps];
    uint32_t marked[words];
    int32_t entries[Group::has_atomics ? 1 : Group::threads];
  };

  const FwdParams& p;
  const Classes keys;
  const TileList& list;

  static FMHA_DEVICE Range block_of(int32_t block, int32_t size, int32_t length) {
    return {block * size, min((block + 1) * size, length)};
  }

  // Class of a block of keys for a block of rows, from the band, the masks and the sequence's end.
  FMHA_DEVICE BlockClass class_of(const SeqSpan& span, const MaskBand& band, int32_t i_head, Range rows, int32_t block,
                                  int32_t block_n) const {
    const Range own = block_of(block, block_n, span.seqlen_k);
    if (own.empty()) return BlockClass::Skipped;
    const BlockClass by_band = block_class(band, rows, own);
    if (by_band == BlockClass::Skipped) return BlockClass::Skipped;
    const bool may_be_whole = own.end - own.begin == block_n && by_band == BlockClass::Inside;
    BlockClass by_masks;
    if constexpr (has_function) by_masks = class_with_function(span, band, i_head, rows, own);
    else by_masks = keys.class_of(span, i_head, rows, own);
    if (by_masks == BlockClass::Inside && !may_be_whole) return BlockClass::Edge;
    return by_masks;
  }

  // Results for the halves of a tile's keys, as the bits of a `ListedBlock` shifted to the lowest place.
  FMHA_DEVICE int32_t seen_by_halves(const SeqSpan& span, const MaskBand& band, int32_t i_head, Range rows,
                                     int32_t tile, int32_t block_n) const {
    int32_t seen = 0;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const BlockClass is = class_of(span, band, i_head, rows, 2 * tile + half, block_n / 2);
      const HalfSeen of_half = is == BlockClass::Skipped  ? HalfSeen::None
                               : is == BlockClass::Inside ? HalfSeen::Whole
                                                          : HalfSeen::Asked;
      seen |= int32_t(of_half) << 2 * half;
    }
    return seen;
  }

  // Class of a tile, found by one thread from bounds of the mask as code, if no mask as data decides too.
  FMHA_DEVICE uint8_t class_by_bounds(const SeqSpan& span, const MaskBand& band, int32_t i_head, Range rows,
                                      int32_t block, int32_t block_n) const {
    const MaskDataParams& m = keys.masks.m;
    const Range own = block_of(block, block_n, span.seqlen_k);
    if (m.block_q != 0 || m.intervals.data || (!has_bits && m.bits.data)) return kUnknown;
    const BlockClass by_band = block_class(band, rows, own);
    if (by_band == BlockClass::Skipped) return uint8_t(by_band);
    const expr::Bound seen = Functions::of(p, span, i_head).shows_of(rows, own);
    if (seen.hi <= 0) return uint8_t(BlockClass::Skipped);
    if (seen.lo < 1) return kUnknown;
    return uint8_t(own.end - own.begin == block_n ? by_band : BlockClass::Edge);
  }

  // Class of a tile under masks as data and the mask as code. Pairs are evaluated
  // one by one, a key per lane, until some are visible and some hidden.
  FMHA_DEVICE BlockClass class_with_function(const SeqSpan& span, const MaskBand& band, int32_t i_head, Range rows,
                                             Range own) const {
    const MaskDataParams& m = keys.masks.m;
    typename Classes::Known by_lists = {false, true};
    bool some_full = false, all_full = false;
    if (m.block_q != 0) keys.listed(span, i_head, rows, own, by_lists, some_full, all_full);
    const BlockClass by_data = keys.class_by(span, i_head, rows, own, by_lists, some_full);
    if (by_data == BlockClass::Skipped || (by_data == BlockClass::Inside && all_full)) return by_data;
    // If no pair is full and the data show all pairs, the function alone decides.
    const bool asks_data = by_data != BlockClass::Inside || some_full;
    const Functions functions = Functions::of(p, span, i_head);
    // For most tiles bounds of the function decide, without its pairs.
    const expr::Bound seen = functions.shows_of(rows, own);
    if (seen.hi <= 0 && !some_full) return BlockClass::Skipped;
    if (seen.lo >= 1 && !asks_data) return block_class(band, rows, own);
    if (!asks_data && block_class(band, rows, own) == BlockClass::Inside)
      return class_by_pairs(rows, own, [&](int32_t i, int32_t j) { return functions.shows({i, j}); });
    return class_by_pairs(rows, own, [&](int32_t i, int32_t j) {
      const DataMasks::Shown shown = asks_data ? keys.masks.shown(span, i_head, i, j) : DataMasks::Shown::Asked;
      if (!visible(band, i, j) || shown == DataMasks::Shown::No) return false;
      return shown == DataMasks::Shown::Full || functions.shows({i, j});
    });
  }
  // Class of a tile whose pairs are evaluated one by one. The lanes vote after some rows.
  template <class Sees>
  FMHA_DEVICE BlockClass class_by_pairs(Range rows, Range own, Sees sees) const {
    constexpr int32_t rows_at_once = 4;
    bool none = true, every = true;
#pragma unroll 1
    for (int32_t first = rows.begin; first < rows.end && (none || every); first += rows_at_once) {
      int32_t seen = 0, hidden = 0;
#pragma unroll 1
      for (int32_t j = own.begin + Group::index(); j < own.end; j += Group::count) {
#pragma unroll
        for (int32_t r = 0; r < rows_at_once; ++r) {
          // Rows behind the last one repeat it.
          const bool shown = sees(min(first + r, rows.end - 1), j);
          seen += shown ? 1 : 0;
          hidden += shown ? 0 : 1;
        }
      }
      Group::reconverge();
      none &= Group::ballot(seen > 0) == 0;
      every &= Group::ballot(hidden > 0) == 0;
    }
    return none ? BlockClass::Skipped : every ? BlockClass::Inside : BlockClass::Edge;
  }

  // Marks, with a bit each, those blocks of a chunk that lists may show to some of the rows;
  // the chunk goes down from `last`. All threads read a row of a list once for the chunk.
  FMHA_DEVICE void mark_listed(Shared& shared, const SeqSpan& span, int32_t i_head, Range rows, int32_t last,
                               int32_t block_n) const {
    const MaskDataParams& m = keys.masks.m;
    const int32_t block_q = max(m.block_q, 1), first_q = rows.begin / block_q, end_q = (rows.end - 1) / block_q + 1;
    const bool by_lists = m.block_q != 0 && end_q - first_q <= Classes::kMostBlocks;
    if (Group::thread() < words) shared.marked[Group::thread()] = by_lists ? 0u : ~0u;
    Group::barrier();
    if (by_lists) {
      const int32_t head = i_head / m.lists_ratio;
      int32_t is_listed = 0;  // the thread's own block
#pragma unroll 1
      for (int32_t q = first_q; q < end_q; ++q) {
        mark_list(shared, is_listed, m.kv_num_blocks, m.kv_indices, m.max_blocks, span.i_batch, head, q, last, block_n);
        mark_list(shared, is_listed, m.full_kv_num_blocks, m.full_kv_indices, m.full_max_blocks, span.i_batch, head, q,
                  last, block_n);
      }
      if constexpr (!Group::has_atomics) {
        const uint64_t listed = Group::ballot(is_listed != 0);
        const int32_t lane = Group::index(), word = Group::thread() / 32;
        if (lane % 32 == 0) shared.marked[word] = uint32_t(listed >> lane);
      }
    }
    Group::barrier();
  }
  FMHA_DEVICE void mark_list(Shared& shared, int32_t& is_listed, const MaskTensor& counts, const MaskTensor& indices,
                             int32_t most, int32_t batch, int32_t head, int32_t q, int32_t last,
                             int32_t block_n) const {
    if (!counts.data) return;
    const int64_t block_k = keys.masks.m.block_k;
    const int32_t count = clamp(DataMasks::word(counts, batch, head, q, 0), 0, most);
    if constexpr (Group::has_atomics) {
#pragma unroll 1
      for (int32_t at = Group::thread(); at < count; at += Group::threads) {
        const int32_t listed = max(DataMasks::word(indices, batch, head, q, at), -1) - keys.masks.m.first_block_k;
        if (listed < 0) continue;
        const int64_t begin = listed * block_k / block_n, end = (listed * block_k + block_k - 1) / block_n;
        const int32_t lowest = int32_t(max<int64_t>(begin, last - (Group::threads - 1)));
#pragma unroll 1
        for (int32_t block = int32_t(min<int64_t>(end, last)); block >= lowest; --block) {
          const int32_t place = last - block;
          Group::set_bits(shared.marked[place / 32], 1u << place % 32);
        }
      }
    } else {
      // Each thread compares its own block with all entries, which are exchanged through shared memory.
      const int64_t begin = int64_t(last - Group::thread()) * block_n, end = begin + block_n;
#pragma unroll 1
      for (int32_t first = 0; first < count; first += Group::threads) {
        const int32_t at = first + Group::thread(), num = min(count - first, Group::threads);
        Group::barrier();
        const int32_t entry = at < count ? max(DataMasks::word(indices, batch, head, q, at), -1) : -1;
        shared.entries[Group::thread()] = entry - keys.masks.m.first_block_k;
        Group::barrier();
#pragma unroll 1
        for (int32_t e = 0; e < num; ++e) {
          const int64_t listed = shared.entries[e] * block_k;
          is_listed |= int32_t(listed >= 0 && listed < end && listed + block_k > begin);
        }
      }
    }
  }

  // Writes the lists of tiles. `of_keys`: tiles have keys, and their lists have blocks of queries.
  template <bool of_keys, bool marks_halves>
  FMHA_DEVICE void run(Shared& shared, QLayout q_layout, KvKind kv_layout, int32_t block_m, int32_t block_n) const {
    auto& [classes, counts, marked, entries] = shared;
    const int32_t row = Group::group_index(), tile = row % list.num_tiles, batch_and_head = row / list.num_tiles;
    const int32_t i_batch = list.heads_of_batch > 0 ? batch_and_head / list.heads_of_batch : 0;
    const int32_t i_head = (batch_and_head - i_batch * list.heads_of_batch) * list.heads_ratio;
    const SeqSpan of_call = resolve_seq(p, q_layout, kv_layout, i_batch);
    const SeqSpan span = {i_batch,
                          Group::uniform(of_call.storage_batch),
                          Group::uniform(of_call.q_row),
                          Group::uniform(of_call.seqlen_q),
                          Group::uniform(of_call.k_row),
                          Group::uniform(of_call.seqlen_k)};
    const Range own = of_keys ? block_of(tile, block_n, span.seqlen_k) : block_of(tile, block_m, span.seqlen_q);
    if (own.empty()) return;
    const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);
    int32_t lowest, end;
    if constexpr (of_keys) {
      const Range seeing = query_range(band, own, span.seqlen_q);
      lowest = seeing.begin / block_m;
      end = seeing.empty() ? 0 : ceil_div(seeing.end, block_m);
    } else {
      const Range seen = k_range(band, own, span.seqlen_k), sinks = sink_range(band, own, span.seqlen_k);
      lowest = sinks.empty() ? seen.begin / block_n : 0;
      end = ceil_div(max(seen.empty() ? 0 : seen.end, sinks.end), block_n);
    }
    const int32_t thread = Group::thread(), warp = Group::uniform(thread / Group::count), lane = thread % Group::count;
    int32_t* blocks = list.blocks + int64_t(row) * list.max_blocks;
    int32_t num_cut = 0, num_whole = 0;
    for (int32_t last = end - 1; last >= lowest; last -= Group::threads) {
      if constexpr (!of_keys) mark_listed(shared, span, i_head, own, last, block_n);
      if constexpr (has_function || has_bits) {
        // Bounds decide most classes, one block per thread. The warps evaluate the others.
        const int32_t block = last - thread;
        uint8_t known = uint8_t(BlockClass::Skipped);
        if (block >= lowest) {
          known = of_keys ? class_by_bounds(span, band, i_head, block_of(block, block_m, span.seqlen_q), tile, block_n)
                          : class_by_bounds(span, band, i_head, own, block, block_n);
        }
        classes[thread] = known;
        Group::barrier();
      }
      for (int32_t at = warp; at < Group::threads; at += warps) {
        const int32_t block = last - at;
        if constexpr (has_function || has_bits) {
          if (Group::uniform(classes[at]) != kUnknown) continue;
        }
        BlockClass is = BlockClass::Skipped;
        const bool may_show = of_keys || (marked[at / 32] >> at % 32 & 1);
        if (block >= lowest && may_show) {
          is = of_keys ? class_of(span, band, i_head, block_of(block, block_m, span.seqlen_q), tile, block_n)
                       : class_of(span, band, i_head, own, block, block_n);
        }
        int32_t seen = 0;
        if constexpr (marks_halves) {
          if (is == BlockClass::Edge) {
            seen = seen_by_halves(span, band, i_head, block_of(block, block_m, span.seqlen_q), tile, block_n);
            constexpr int32_t none = int32_t(HalfSeen::None);
            // The halves are classified more exactly than the tile: a block whose queries see neither half is not
            // listed.
            if (seen == (none | none << 2)) is = BlockClass::Skipped;
          }
        }
        if (lane == 0) classes[at] = uint8_t(int32_t(is) | seen << 2);
      }
      Group::barrier();
      const BlockClass own = BlockClass(classes[thread] & 3);
      const int32_t word = (last - thread) | classes[thread] >> 2 << ListedBlock::kBits;
      const bool cut = own == BlockClass::Edge, whole = own == BlockClass::Inside;
      const auto cuts = Group::ballot(cut), wholes = Group::ballot(whole);
      if (lane == 0) {
        counts[0][warp] = Group::bits_in(cuts);
        counts[1][warp] = Group::bits_in(wholes);
      }
      Group::barrier();
      int32_t cut_at = num_cut, whole_at = num_whole;
      for (int32_t w = 0; w < warps; ++w) {
        if (w < warp) {
          cut_at += counts[0][w];
          whole_at += counts[1][w];
        }
        num_cut += counts[0][w];
        num_whole += counts[1][w];
      }
      const auto lower = (decltype(cuts)(1) << lane) - 1;
      if (cut) blocks[cut_at + Group::bits_in(cuts & lower)] = marks_halves ? word : last - thread;
      if (whole) blocks[list.max_blocks - 1 - whole_at - Group::bits_in(wholes & lower)] = last - thread;
      Group::barrier();
    }
    if (thread != 0) return;
    // A tile that sees no key gets one block outside the tensor, which is read as zeros and hidden.
    if (Group::has_a_block_of_none && !of_keys && num_cut + num_whole == 0) {
      blocks[0] = -1;
      num_cut = 1;
    }
    list.counts[2 * int64_t(row)] = num_cut;
    list.counts[2 * int64_t(row) + 1] = num_whole;
  }
};

// Writes the steps of tiles of keys for calls in which additions to a query block have an order. A step is two words:
// the query block, in ascending order, and its rank, the number of earlier tiles that list it too. A group handles the
// lists of a sequence and head, whose last row counts for each block the tiles that list it.
template <class Group, FwdSpec spec, int32_t block_n>
FMHA_DEVICE void rank_tiles(const FwdParams& p, const TileList& list) {
  const int32_t group = Group::group_index(), num_blocks = list.max_blocks;
  const int32_t i_batch = list.heads_of_batch > 0 ? group / list.heads_of_batch : 0;
  const SeqSpan span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
  // Tiles beyond the sequence have no list.
  const int32_t num_tiles = min(ceil_div(span.seqlen_k, block_n), list.num_tiles), thread = Group::thread();
  int32_t* steps = list.ranks + 2 * (int64_t(group) * (list.num_tiles + 1) * num_blocks);
  int32_t* before = steps + 2 * (int64_t(list.num_tiles) * num_blocks);
  for (int32_t block = thread; block < num_blocks; block += Group::threads) before[block] = 0;
  // The warps merge each tile's cut and whole blocks. Both parts of a list descend.
#pragma unroll 1
  for (int32_t tile = thread / Group::count; tile < num_tiles; tile += Group::threads / Group::count) {
    const int64_t row = int64_t(group) * list.num_tiles + tile;
    const int32_t* blocks = list.blocks + row * num_blocks;
    const int32_t num_cut = list.counts[2 * row], num = num_cut + list.counts[2 * row + 1];
    const auto listed = [&](int32_t i) {
      return i < num_cut ? ListedBlock{blocks[i]}
                         : ListedBlock{blocks[num_blocks - 1 - (i - num_cut)] | ListedBlock::kWhole};
    };
    for (int32_t i = thread % Group::count; i < num_blocks; i += Group::count) {
      int32_t at = i, word = -1;
      if (i < num) {
        const ListedBlock own = listed(i);
        // Index of the first block of the list's other part that is lower.
        int32_t low = i < num_cut ? num_cut : 0, end = i < num_cut ? num : num_cut;
        const int32_t lower_of_own = (i < num_cut ? num_cut : num) - 1 - i, end_of_other = end;
        while (low < end) {
          const int32_t middle = (low + end) / 2;
          if (listed(middle).block() < own.block()) end = middle;
          else low = middle + 1;
        }
        at = lower_of_own + end_of_other - low;
        word = own.word;
      }
      steps[2 * (int64_t(tile) * num_blocks + at)] = word;
    }
  }
  Group::barrier();
  // A tile's words are read while the one before is counted.
  const auto word_of = [&](int32_t tile, int32_t i) {
    return tile < num_tiles && i < num_blocks ? steps[2 * (int64_t(tile) * num_blocks + i)] : -1;
  };
  int32_t next = word_of(0, thread);
#pragma unroll 1
  for (int32_t tile = 0; tile < num_tiles; ++tile) {
    int32_t word = next;
    next = word_of(tile + 1, thread);
#pragma unroll 1
    for (int32_t i = thread; word >= 0;) {
      // A list names each block at most once.
      steps[2 * (int64_t(tile) * num_blocks + i) + 1] = before[ListedBlock{word}.block()]++;
      i += Group::threads;
      word = word_of(tile, i);
    }
    Group::barrier();
  }
}

// The launch that writes the lists.
template <class Group, FwdSpec spec, int32_t block_m, int32_t block_n, bool of_keys, bool has_function,
          bool has_bits = false, bool marks_halves = false>
FMHA_DEVICE void list_tiles(const FwdParams& p, const MaskDataParams& masks, const TileList& list) {
  using Lister = TileLister<Group, has_function, has_bits>;
  __shared__ typename Lister::Shared shared;
  const Lister lister{p, {DataMasks{masks}}, list};
  lister.template run<of_keys, marks_halves>(shared, spec.q_layout, spec.kv_layout, block_m, block_n);
}

}  // namespace fmha
