// The lists of the blocks of keys that tiles of queries see under masks as data, or of the blocks of queries that
// see tiles of keys: one small launch, a CTA a tile and head of the masks. Its warps class blocks in turn; blocks
// are stored from the last to the first, those that are cut from the row's begin up, whole ones from its end down.
#pragma once
#include <fmha/bwd.h>
#include <fmha/common/data_keys.cuh>
#include <fmha/score.h>
#include <fmha/tile_list.h>

namespace fmha {

constexpr int kTileListThreads = 256;

// `has_function`: a mask as code joins the masks as data.
template <bool has_function>
struct TileLister {
  static constexpr int warps = kTileListThreads / 32;

  const FwdParams& p;
  const DataKeys keys;
  const TileList& list;

  static FMHA_DEVICE Range block_of(int32_t block, int32_t size, int32_t length) {
    return {block * size, min((block + 1) * size, length)};
  }

  // How a block of keys stands to the band, the masks and the sequence's end, for a block of rows.
  FMHA_DEVICE BlockClass class_of(const SeqSpan& span, const MaskBand& band, int32_t i_head, Range rows, int32_t block,
                                  int32_t block_n) const {
    const Range own = block_of(block, block_n, span.seqlen_k);
    const BlockClass by_band = block_class(band, rows, own);
    if (by_band == BlockClass::Skipped) return BlockClass::Skipped;
    const bool may_be_whole = own.end - own.begin == block_n && by_band == BlockClass::Inside;
    BlockClass by_masks;
    if constexpr (has_function) by_masks = class_with_function(span, band, i_head, rows, own);
    else by_masks = keys.class_of(span, i_head, rows, own);
    if (by_masks == BlockClass::Inside && !may_be_whole) return BlockClass::Edge;
    return by_masks;
  }

  // How a tile stands to the masks as data and the one as code. Pairs are asked one by one, a lane a key, until
  // some are seen and some hidden.
  FMHA_DEVICE BlockClass class_with_function(const SeqSpan& span, const MaskBand& band, int32_t i_head, Range rows,
                                             Range own) const {
    const MaskDataParams& m = keys.masks.m;
    DataKeys::Known by_lists = {false, true};
    bool some_full = false, all_full = false;
    if (m.block_q != 0) keys.listed(span, i_head, rows, own, by_lists, some_full, all_full);
    const BlockClass by_data = keys.class_by(span, i_head, rows, own, by_lists, some_full);
    if (by_data == BlockClass::Skipped || (by_data == BlockClass::Inside && all_full)) return by_data;
    // Where no pair is full and each is shown by the data, the function alone says.
    const bool asks_data = by_data != BlockClass::Inside || some_full;
    const Functions functions = Functions::of(p, span, i_head);
    if (!asks_data && block_class(band, rows, own) == BlockClass::Inside)
      return class_by_pairs(rows, own, [&](int32_t i, int32_t j) { return functions.shows({i, j}); });
    return class_by_pairs(rows, own, [&](int32_t i, int32_t j) {
      const DataMasks::Shown shown = asks_data ? keys.masks.shown(span, i_head, i, j) : DataMasks::Shown::Asked;
      if (!visible(band, i, j) || shown == DataMasks::Shown::No) return false;
      return shown == DataMasks::Shown::Full || functions.shows({i, j});
    });
  }
  // The class of a tile whose pairs are asked one by one. The warp votes behind some rows.
  template <class Sees>
  FMHA_DEVICE BlockClass class_by_pairs(Range rows, Range own, Sees sees) const {
    constexpr int32_t rows_at_once = 4;
    bool none = true, every = true;
#pragma unroll 1
    for (int32_t first = rows.begin; first < rows.end && (none || every); first += rows_at_once) {
      bool seen = false, hidden = false;
#pragma unroll 1
      for (int32_t j = own.begin + int32_t(threadIdx.x % 32); j < own.end; j += 32) {
#pragma unroll
        for (int32_t r = 0; r < rows_at_once; ++r) {
          // Behind the last row that one again.
          const bool shown = sees(min(first + r, rows.end - 1), j);
          seen |= shown;
          hidden |= !shown;
        }
      }
      __syncwarp();
      none &= ptx::vote_ballot(seen) == 0;
      every &= ptx::vote_ballot(hidden) == 0;
    }
    return none ? BlockClass::Skipped : every ? BlockClass::Inside : BlockClass::Edge;
  }

  // Marks, a bit each, those blocks of a chunk that lists may show some of the rows; the chunk goes down from `last`. A
  // row of a list is read once for the chunk, by all threads.
  FMHA_DEVICE void mark_listed(uint32_t (&marked)[warps], const SeqSpan& span, int32_t i_head, Range rows, int32_t last,
                               int32_t block_n) const {
    const MaskDataParams& m = keys.masks.m;
    const int32_t block_q = max(m.block_q, 1), first_q = rows.begin / block_q, end_q = (rows.end - 1) / block_q + 1;
    const bool by_lists = m.block_q != 0 && end_q - first_q <= DataKeys::kMostBlocks;
    if (threadIdx.x < warps) marked[threadIdx.x] = by_lists ? 0u : ~0u;
    __syncthreads();
    if (by_lists) {
      const int32_t head = i_head / m.lists_ratio;
#pragma unroll 1
      for (int32_t q = first_q; q < end_q; ++q) {
        mark_list(marked, m.kv_num_blocks, m.kv_indices, m.max_blocks, span.i_batch, head, q, last, block_n);
        mark_list(marked, m.full_kv_num_blocks, m.full_kv_indices, m.full_max_blocks, span.i_batch, head, q, last,
                  block_n);
      }
    }
    __syncthreads();
  }
  FMHA_DEVICE void mark_list(uint32_t (&marked)[warps], const MaskTensor& counts, const MaskTensor& indices,
                             int32_t most, int32_t batch, int32_t head, int32_t q, int32_t last, int32_t block_n) const {
    if (!counts.data) return;
    const int64_t block_k = keys.masks.m.block_k;
    const int32_t count = clamp(DataMasks::word(counts, batch, head, q, 0), 0, most);
#pragma unroll 1
    for (int32_t at = threadIdx.x; at < count; at += kTileListThreads) {
      const int32_t listed = DataMasks::word(indices, batch, head, q, at);
      if (listed < 0) continue;
      const int64_t begin = listed * block_k / block_n, end = (listed * block_k + block_k - 1) / block_n;
      const int32_t lowest = int32_t(max<int64_t>(begin, last - (kTileListThreads - 1)));
#pragma unroll 1
      for (int32_t block = int32_t(min<int64_t>(end, last)); block >= lowest; --block) {
        const int32_t place = last - block;
        atomicOr(&marked[place / 32], 1u << place % 32);
      }
    }
  }

  // `of_keys`: the tile is one of keys, and its list has blocks of queries.
  template <bool of_keys>
  FMHA_DEVICE void run(QLayout q_layout, KvKind kv_layout, int32_t block_m, int32_t block_n) const {
    __shared__ uint8_t classes[kTileListThreads];
    __shared__ int32_t counts[2][warps];
    __shared__ uint32_t marked[warps];
    const int32_t row = blockIdx.x, tile = row % list.num_tiles, batch_and_head = row / list.num_tiles;
    const int32_t i_batch = list.heads_of_batch > 0 ? batch_and_head / list.heads_of_batch : 0;
    const int32_t i_head = (batch_and_head - i_batch * list.heads_of_batch) * list.heads_ratio;
    const SeqSpan span = resolve_seq(p, q_layout, kv_layout, i_batch);
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
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t* blocks = list.blocks + int64_t(row) * list.max_blocks;
    int32_t num_cut = 0, num_whole = 0;
    for (int32_t last = end - 1; last >= lowest; last -= kTileListThreads) {
      if constexpr (!of_keys) mark_listed(marked, span, i_head, own, last, block_n);
      for (int32_t at = warp; at < kTileListThreads; at += warps) {
        const int32_t block = last - at;
        BlockClass is = BlockClass::Skipped;
        const bool may_show = of_keys || (marked[at / 32] >> at % 32 & 1);
        if (block >= lowest && may_show) {
          is = of_keys ? class_of(span, band, i_head, block_of(block, block_m, span.seqlen_q), tile, block_n)
                       : class_of(span, band, i_head, own, block, block_n);
        }
        if (lane == 0) classes[at] = uint8_t(is);
      }
      __syncthreads();
      const BlockClass own = BlockClass(classes[threadIdx.x]);
      const bool cut = own == BlockClass::Edge, whole = own == BlockClass::Inside;
      const uint32_t cuts = ptx::vote_ballot(cut), wholes = ptx::vote_ballot(whole);
      if (lane == 0) {
        counts[0][warp] = __popc(cuts);
        counts[1][warp] = __popc(wholes);
      }
      __syncthreads();
      int32_t cut_at = num_cut, whole_at = num_whole;
      for (int32_t w = 0; w < warps; ++w) {
        if (w < warp) {
          cut_at += counts[0][w];
          whole_at += counts[1][w];
        }
        num_cut += counts[0][w];
        num_whole += counts[1][w];
      }
      const uint32_t lower = (1u << lane) - 1;
      if (cut) blocks[cut_at + __popc(cuts & lower)] = last - int32_t(threadIdx.x);
      if (whole) blocks[list.max_blocks - 1 - whole_at - __popc(wholes & lower)] = last - int32_t(threadIdx.x);
      __syncthreads();
    }
    if (threadIdx.x != 0) return;
    // No key at all: one block outside the tensor, zeros that are hidden.
    if (!of_keys && num_cut + num_whole == 0) {
      blocks[0] = -1;
      num_cut = 1;
    }
    list.counts[2 * int64_t(row)] = num_cut;
    list.counts[2 * int64_t(row) + 1] = num_whole;
  }
};

template <FwdSpec spec, int32_t block_m, int32_t block_n, bool of_keys, bool has_function>
FMHA_DEVICE void list_tiles(const FwdParams& p, const MaskDataParams& masks, const TileList& list) {
  const TileLister<has_function> lister{p, DataKeys{DataMasks{masks}}, list};
  lister.template run<of_keys>(spec.q_layout, spec.kv_layout, block_m, block_n);
}

}  // namespace fmha
