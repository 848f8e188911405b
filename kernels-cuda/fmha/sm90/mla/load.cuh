// The load role, a warpgroup: Q, and the blocks of K and V, in parts as their places are released.
//
// Whole blocks come by TMA, in boxes that lie in one page each. A block that ends with keys that no row sees is
// copied, and these are zeros: memory there may hold NaN, of V too.
//
// Otherwise threads copy every row from where it lies, as where pages are not whole boxes, and barriers count the
// copies. The block table is read a block ahead. Over lists of keys, the list is read two blocks ahead, and what is
// absent is zeros.
//
// Caches in FP8 are copied as they are to where they will lie in 16 bits, and widened there.
#pragma once
#include <fmha/common/copy_tile.cuh>
#include <fmha/common/rows_of_lanes.cuh>
#include <fmha/common/widen.cuh>
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/collective.cuh>
#include <fmha/ptx/tma.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90/mla/work.cuh>

namespace fmha::mla {

// Tells the consumers the number of their next tile over lists, -1 after the last one.
template <class Shared>
FMHA_DEVICE void tell_tile(Shared& smem, int32_t index, int32_t num_blocks, Turns turns) {
  if (threadIdx.x == 0) {
    smem.list.tile = index;
    smem.list.num_blocks = num_blocks;
    smem.list.turns = turns.bits;
  }
  ptx::bar_arrive<kNumThreads>(kTileTold);
}

// The work of the load role; over a list it leaves out blocks without keys.
template <class Keys>
struct LoaderWork {
  using Type = const Work&;
};
template <class List, int bytes>
struct LoaderWork<KeysOfToken<List, bytes>> {
  using Type = Work;
};

// Address of a row's FP8 elements, and of its scales if rows have scales.
template <bool scaled>
struct NarrowRowOf {
  using Type = const uint8_t*;
};
template <>
struct NarrowRowOf<true> {
  using Type = BytesOfRow;
};

template <FwdSpec spec, Sm90MlaTile tile, class Keys = EveryKey>
struct Loader {
  const FwdParams& p;
  const Maps& maps;
  typename LoaderWork<Keys>::Type work;
  Smem<spec, tile>& smem;
  ptx::CacheHint hint;
  Keys keys = {};
  Copier<16, CopyWarps<0, 15>> copier;
  using P = Plan<spec, tile>;
  using Chunk = typename P::Chunk;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  static constexpr bool widens = is_fp8(tile.stored);

  using Rows = RowsOfLane;
  using Row = Rows::Row;
  using NarrowRow = typename NarrowRowOf<(tile.row_bytes > 0)>::Type;

  // Whether V's two halves have no padding chunks: their chunks are exactly V's.
  static constexpr bool kWholeV = spec.head_dim_v % (2 * kSpan) == 0;

  const int32_t found_row = Rows::found_by(warp, lane);
  FMHA_DEVICE Rows told(Row found) const { return Rows::told(found, lane); }
  // Loads the block table's entry for key `j` and does not wait for it; it is waited for when an address is computed.
  FMHA_DEVICE int32_t entry_of(int32_t j) const {
    if (spec.kv_layout != KvKind::Paged || j < 0 || j >= work.end) return 0;
    return p.block_table[work.span.i_batch * p.block_table_batch + j / p.page_size];
  }
  // Address of key `j`, computed from its block-table entry; null stands for zeros.
  template <class Pointer>
  FMHA_DEVICE Pointer row_of(const View& view, int32_t j, int32_t entry) const {
    if (j >= work.end) return nullptr;
    const KvRow at = spec.kv_layout == KvKind::Paged ? KvRow{clamp(entry, 0, p.num_pages - 1), j % p.page_size}
                                                     : kv_row(p, spec.kv_layout, work.span, j);
    return static_cast<Pointer>(view.data) + row_offset(view, at, work.i_head_kv);
  }

  // Copies chunks of all rows, from chunk `first` on, of rows of `dim` elements. `whole`: the rows have all these
  // chunks.
  template <int dim, int count, bool whole = dim % kSpan == 0>
  FMHA_DEVICE void copy_chunks(const Chunk* to, int32_t first, const Rows& rows, const void* any) const {
    const uint32_t of_lane = to->address() + fmha::mma::word_offset<Chunk>(4 * warp + lane / 8, lane % 8 * 8);
    const int32_t first_column = first * kSpan + lane % 8 * 8;
    Row from[Rows::count];
#pragma unroll
    for (int k = 0; k < Rows::count; ++k)
      from[k] = rows.of_lane[k] ? rows.of_lane[k] + first_column : static_cast<Row>(any);
    // Copies row by row, so that neighbouring lines of memory are requested one after another.
#pragma unroll
    for (int k = 0; k < Rows::count; ++k) {
#pragma unroll
      for (int chunk = 0; chunk < count; ++chunk) {
        const int32_t column = chunk * kSpan;
        const int32_t there = rows.of_lane[k] == nullptr ? 0 : whole ? 8 : clamp(dim - first_column - column, 0, 8);
        // A copy of zero elements reads nothing and writes zeros.
        ptx::cp_async<16>(of_lane + chunk * Chunk::tile_bytes + k * Rows::apart * Chunk::span_bytes,
                          whole || there > 0 ? from[k] + column : static_cast<Row>(any), 2 * there);
      }
    }
  }
  // Loads a part's chunks by TMA, one box each; the lanes of one warp divide them. Each of a cluster's two CTAs loads
  // every second chunk for both.
  template <int count>
  FMHA_DEVICE void bring_chunks(const ptx::TensorMap& map, Barrier& full, const Chunk* to, int32_t first, int32_t first_key) const {
    static_assert(count <= 32, "a lane brings one");
    if (lane >= count) return;
    const KvRow key = kv_row(p, spec.kv_layout, work.span, first_key);
    const int32_t batch = spec.kv_layout == KvKind::Packed ? 0 : key.batch;
    const uint32_t address = to[lane].address();
    const int32_t column = (first + lane) * kSpan;
    if constexpr (tile.cluster > 1) {
      if ((first + lane) % tile.cluster == rank_in<tile>())
        ptx::cp_async_bulk_tensor_4d_multicast(address, map, full, column, key.row, work.i_head_kv, batch,
                                               (1 << tile.cluster) - 1, hint);
    } else {
      ptx::cp_async_bulk_tensor_4d(address, map, full, column, key.row, work.i_head_kv, batch, hint);
    }
  }

  // FP8 caches are copied as they are. The bytes of a part's chunks lie in the upper half of the chunks' memory, and
  // are widened from its first chunk upwards: what a chunk overwrites are its own bytes, or those of chunks before
  // it. The tail's lie in its own upper half. A thread widens what it has copied, and a warp's bytes lie in the
  // sixteen rows of the chunks that are its own here, so that no warp waits for another one.
  static constexpr int kRowsOfWarp = kRows / 4;
  struct Part {
    uint32_t address;  // of its first chunk
    int32_t first;     // chunk of the block
    uint32_t tail;     // address of the tail, if that comes with it, or 0
    int32_t barrier;
    uint32_t phase;
    bool of_v;  // of V, which lies apart
  };
  static constexpr int kPartsOfBlock = P::v_in_k ? 2 : 3;
  // The n-th part over all blocks, in the order in which parts are widened.
  FMHA_DEVICE Part part_of(int32_t n) const {
    const int32_t block = n / kPartsOfBlock, at = n % kPartsOfBlock, slot = P::slot_of(block);
    const uint32_t phase = phase_of<spec, tile>(work, block);
    if constexpr (P::v_in_k) {
      const uint32_t tail = P::comes_with_tail(slot, at) ? smem.k[slot][2 * P::chunks_half].address() : 0;
      return {smem.k[slot][at * P::chunks_half].address(), at * P::chunks_half, tail, P::part_of(slot, at), phase, false};
    } else {
      if (at == 0) return {smem.k[0][0].address(), 0, 0, 0, phase, false};
      const int32_t first = (at - 1) * P::chunks_half;
      return {smem.v[first].address(), first, 0, P::part_of(0, at - 1), phase, true};
    }
  }
  // A lane's part of a chunk: sixteen elements of each of two rows, eight rows apart. The words of eight lanes, which
  // hold two neighbouring rows, lie in different banks both as bytes (odd rows have their halves exchanged) and as 16
  // bits.
  struct Narrow {
    uint32_t bytes[2][4];
  };
  static constexpr int kLaneRowsApart = 8 * Chunk::span_bytes;
  const int32_t lane_row = warp * kRowsOfWarp + lane / 4;
  const uint32_t bytes_of_lane = fmha::mma::word_offset<Chunk>(lane_row, (lane % 4 + lane / 4 % 2 * 4) * 8);
  const uint32_t wide_of_lane = fmha::mma::word_offset<Chunk>(lane_row, lane % 4 * 16);

  // Address of the lane's bytes in chunk `at` of a part of `count` chunks; from `count` on, of the tail chunk.
  template <int count>
  FMHA_DEVICE uint32_t bytes_at(const Part& part, int32_t at) const {
    const int32_t half = count + at;
    return at < count ? part.address + half / 2 * Chunk::tile_bytes + (bytes_of_lane ^ half % 2 * 64)
                      : part.tail + (bytes_of_lane ^ 64);
  }
  // Data that a lane looks up ahead for its two rows of a block: block table entries; over a list also the keys, and
  // the list's entries for the block after.
  struct Ahead {
    int32_t pages[2], keys[2], entries[2];
  };
  // Looks up a block's rows, of a list from the entries that are known of it; `find_rows` finds where these rows lie,
  // null for zeros.
  FMHA_DEVICE void look_up(int32_t first_key, Ahead& ahead) const {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const int32_t j = first_key + lane_row + 8 * word;
      if constexpr (are_of_token<Keys>()) {
        ahead.keys[word] = key_with(keys.list, ahead.entries[word], j);
        ahead.pages[word] = page_with(ahead.keys[word], j);
        ahead.entries[word] = listed_at(j - kKeys);
      } else {
        ahead.pages[word] = entry_of(j);
      }
    }
  }
  FMHA_DEVICE void find_rows(const View& view, int32_t first_key, const Ahead& ahead, NarrowRow (&rows)[2]) const {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      if constexpr (tile.row_bytes > 0) {
        rows[word] = listed_bytes(ahead.keys[word], ahead.pages[word], first_key + lane_row + 8 * word);
      } else if constexpr (are_of_token<Keys>()) {
        rows[word] = listed_row<NarrowRow>(view, ahead.keys[word], ahead.pages[word], first_key + lane_row + 8 * word);
      } else {
        rows[word] = row_of<NarrowRow>(view, first_key + lane_row + 8 * word, ahead.pages[word]);
      }
    }
  }
  // A bit for each of the warp's rows in the block looked up ahead: whether the row has a key.
  FMHA_DEVICE uint32_t present_of(const Ahead& ahead) const {
    constexpr uint32_t one_of_four = 0x11111111u;
    const uint32_t upper = ptx::vote_ballot(ahead.keys[0] >= 0), lower = ptx::vote_ballot(ahead.keys[1] >= 0);
    return (upper & one_of_four) | (lower & one_of_four) << 1;
  }
  // Copies FP8 chunks of all rows. `whole`: the rows have all these chunks.
  template <int dim, int count, bool whole = dim % kSpan == 0>
  FMHA_DEVICE void copy_narrow(const Part& part, const NarrowRow (&rows)[2]) const {
    const auto copy = [&](int32_t at, int32_t chunk) {
      const uint32_t to = bytes_at<count>(part, at);
      const int32_t column = chunk * kSpan + lane % 4 * 16;
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const bool there = rows[word] != nullptr && (whole || column < dim);
        ptx::cp_async<16>(to + word * kLaneRowsApart, there ? rows[word] + column : p.k.data, there ? 16 : 0);
      }
    };
#pragma unroll
    for (int at = 0; at < count; ++at) copy(at, part.first + at);
    if (part.tail != 0) copy(count, 2 * P::chunks_half);
    ptx::cp_async_commit_group();
  }
  // Tells the consumers that this thread's elements of a part have been widened.
  FMHA_DEVICE void arrive_wide(const Part& part) const {
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive_if(smem.full[part.barrier], true);
  }

  // Copies a part of rows of bytes. Chunks of values lie as above, in the upper half of their memory; a chunk of bf16
  // comes to its own place. Each row's scales of the part come with it.
  using Format = RowFormat<(tile.row_bytes > 0 ? tile.row_bytes : 656)>;
  static constexpr int kScaleBytes = Format::scale_bytes / 2;  // of a row and part
  // Number of a part's chunks of FP8 values.
  FMHA_DEVICE static int32_t narrow_chunks(const Part& part) {
    return min(Format::values / kSpan - part.first, P::chunks_half);
  }
  FMHA_DEVICE static uint32_t narrow_bytes_at(const Part& part, int32_t at, uint32_t of_lane) {
    const int32_t half = narrow_chunks(part) + at;
    return part.address + half / 2 * Chunk::tile_bytes + (of_lane ^ half % 2 * 64);
  }
  FMHA_DEVICE uint32_t scales_at(const Part& part, int32_t slot, int word) const {
    const auto& of_row = smem.scales.of_row[slot][lane_row + 8 * word];
    return ptx::shared_address(&of_row) + (part.first > 0 ? kScaleBytes : 0);
  }
  FMHA_DEVICE void copy_bytes(const Part& part, int32_t slot, const BytesOfRow (&rows)[2]) const {
    const int32_t count = narrow_chunks(part);
    const auto copy = [&](uint32_t to, int32_t offset) {
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const bool there = rows[word].row != nullptr;
        ptx::cp_async<16>(to + word * kLaneRowsApart, there ? rows[word].row + offset : p.k.data, there ? 16 : 0);
      }
    };
#pragma unroll
    for (int at = 0; at < P::chunks_half; ++at) {
      if (at < count) copy(narrow_bytes_at(part, at, bytes_of_lane), (part.first + at) * kSpan + lane % 4 * 16);
    }
    // The chunk that is stored in bf16: the tail, or the part's last.
    const bool ends = count < P::chunks_half;
    if (part.tail != 0 || ends) {
      const uint32_t to = (ends ? part.address + count * Chunk::tile_bytes : part.tail) + wide_of_lane;
#pragma unroll
      for (int k = 0; k < 2; ++k) copy(to ^ 16 * k, Format::rotary + lane % 4 * 32 + 16 * k);
    }
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const bool there = rows[word].row != nullptr;
      const uint8_t* from = rows[word].scales + (part.first > 0 ? kScaleBytes : 0);
      if (lane % 4 != word) continue;
      ptx::cp_async<kScaleBytes>(scales_at(part, slot, word), there ? from : p.k.data, there ? kScaleBytes : 0);
    }
    ptx::cp_async_commit_group();
  }
  // Converts a part of rows of bytes (FP8) to bf16.
  FMHA_DEVICE void widen_bytes(const Part& part, int32_t slot) const {
    const int32_t count = narrow_chunks(part);
    Narrow narrow[P::chunks_half];
    uint32_t scales[2][kScaleBytes / 4];
    // Waits until other lanes' copies of the rows' scales have landed.
    __syncwarp();
#pragma unroll
    for (int at = 0; at < P::chunks_half; ++at) {
      if (at >= count) continue;
#pragma unroll
      for (int word = 0; word < 2; ++word)
        ptx::ld_shared_v4_b32(narrow[at].bytes[word], narrow_bytes_at(part, at, bytes_of_lane) + word * kLaneRowsApart);
    }
#pragma unroll
    for (int word = 0; word < 2; ++word) {
#pragma unroll
      for (int k = 0; k < kScaleBytes / 4; ++k)
        scales[word][k] = ptx::ld_shared_b32(scales_at(part, slot, word) + 4 * k);
    }
    // Waits until every lane has read the bytes that are overwritten next.
    __syncwarp();
#pragma unroll
    for (int at = 0; at < P::chunks_half; ++at) {
      if (at >= count) continue;
      float of_row[2];
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        if constexpr (Format::in_page_tail) of_row[word] = e8m0(scales[word][0] >> 8 * at & 0xff);
        else of_row[word] = float_of(scales[word][at * kSpan / Format::group]);
      }
      store_wide<true>(part.address + at * Chunk::tile_bytes + wide_of_lane, narrow[at], of_row);
    }
    arrive_wide(part);
  }
  // Widens the lane's elements of a chunk to their places in 16 bits; a factor of 1 is left out.
  template <bool scales>
  FMHA_DEVICE void store_wide(uint32_t to, const Narrow& narrow, const float (&descale)[2]) const {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t eight[2] = {narrow.bytes[word][2 * k], narrow.bytes[word][2 * k + 1]};
        uint32_t packed[4];
        widen_word<tile.stored, spec.dtype_qk, true>(eight, scales ? descale[word] : 1.f, packed);
        ptx::st_shared_v4((to ^ 16 * k) + word * kLaneRowsApart, packed);
      }
    }
  }
  template <int count, bool scales>
  FMHA_DEVICE void widen_chunks(const Part& part, float of_all) const {
    const float descale[2] = {of_all, of_all};
    const auto read = [&](int32_t at, Narrow& narrow) {
      const uint32_t from = bytes_at<count>(part, at);
#pragma unroll
      for (int word = 0; word < 2; ++word) ptx::ld_shared_v4_b32(narrow.bytes[word], from + word * kLaneRowsApart);
    };
    const auto wide_at = [&](int32_t at) {
      return (at < count ? part.address + at * Chunk::tile_bytes : part.tail) + wide_of_lane;
    };
    if constexpr (count <= 4) {
      // Registers hold all of the part's bytes, so that no chunk waits for the next one's bytes. With equal shares they
      // have no room for the tail's, which is widened last.
      constexpr bool tail_last = in_shares(tile);
      Narrow narrow[count], tail;
#pragma unroll
      for (int at = 0; at < count; ++at) read(at, narrow[at]);
      if (!tail_last && part.tail != 0) read(count, tail);
      // Every lane has read what is overwritten.
      __syncwarp();
#pragma unroll
      for (int at = 0; at < count; ++at) store_wide<scales>(wide_at(at), narrow[at], descale);
      if (part.tail == 0) return;
      if constexpr (tail_last) {
        read(count, tail);
        __syncwarp();
      }
      store_wide<scales>(wide_at(count), tail, descale);
    } else {
      static_assert(!P::v_in_k, "sm90_mla: a part with a tail fits in registers");
      Narrow narrow;
      read(0, narrow);
#pragma unroll 1
      for (int32_t at = 0; at < count; ++at) {
        Narrow next = narrow;
        if (at + 1 < count) read(at + 1, next);
        // Waits until every lane has read the bytes that this chunk overwrites.
        __syncwarp();
        store_wide<scales>(wide_at(at), narrow, descale);
        narrow = next;
      }
    }
  }
  template <int count>
  FMHA_DEVICE void widen_part(const Part& part, float descale) const {
    if (ptx::uniform(descale == 1.f)) {
      widen_chunks<count, false>(part, descale);
    } else {
      widen_chunks<count, true>(part, descale);
    }
    arrive_wide(part);
  }
  // Widens all parts of all blocks. Parts whose places are free are under way while one is widened. Only the next
  // part is waited for, since the warps that free the places of later parts may themselves wait for it; and, for a V
  // in K, the other half of a block, which is freed soon after the first.
  FMHA_DEVICE void widen_all() {
    constexpr int kAhead = 3, kChunksOfK = P::v_in_k ? P::chunks_half : P::chunks_k;
    const float descale_k = scalar_of(p.descale_k, work.span.i_batch, work.i_head_kv, 1.f);
    const float descale_v = P::v_in_k ? descale_k : scalar_of(p.descale_v, work.span.i_batch, work.i_head_kv, 1.f);
    const int32_t count = ptx::uniform(work.num_blocks) * kPartsOfBlock;
    NarrowRow rows[2];
    Ahead ahead;
    int32_t copied = 0;
    uint32_t present = 0;
    if constexpr (are_of_token<Keys>()) {
#pragma unroll
      for (int word = 0; word < 2; ++word) ahead.entries[word] = listed_at(work.last_block * kKeys + lane_row + 8 * word);
    }
    look_up(work.last_block * kKeys, ahead);
    find_rows(p.k, work.last_block * kKeys, ahead, rows);
    if constexpr (are_of_token<Keys>()) present = present_of(ahead);
    if constexpr (P::v_in_k) look_up((work.last_block - 1) * kKeys, ahead);
#pragma unroll 1
    for (int32_t done = 0; done < count; ++done) {
#pragma unroll 1
      while (copied < count && copied <= done + kAhead) {
        const Part part = part_of(copied);
        Barrier& empty = smem.empty[part.barrier];
        const bool waits = copied == done || (P::v_in_k && copied % kPartsOfBlock == 1);
        if (!waits && !ptx::uniform(ptx::mbarrier_test_parity(empty, part.phase ^ 1))) break;
        ptx::mbarrier_wait_parity(empty, part.phase ^ 1);
        if constexpr (tile.row_bytes > 0) {
          copy_bytes(part, P::slot_of(copied / kPartsOfBlock), rows);
        } else if (part.of_v) {
          copy_narrow<spec.head_dim_v, P::chunks_half, kWholeV>(part, rows);
        } else {
          copy_narrow<spec.head_dim_qk, kChunksOfK>(part, rows);
        }
        ++copied;
        // Addresses of rows are computed while copies are in flight, and the next block's entries are looked up.
        const int32_t block = copied / kPartsOfBlock, at = copied % kPartsOfBlock, first_key = (work.last_block - block) * kKeys;
        if constexpr (are_of_token<Keys>()) {
          if (at == 0) tell(block - 1, present);
        }
        if (at == 0 && copied < count) {
          find_rows(p.k, first_key, ahead, rows);
          if constexpr (are_of_token<Keys>()) present = present_of(ahead);
          if constexpr (P::v_in_k) look_up(first_key - kKeys, ahead);
        }
        if constexpr (!P::v_in_k) {
          if (at == 1) {
            find_rows(p.v, first_key, ahead, rows);
            look_up(first_key - kKeys, ahead);
          }
        }
      }
      switch (copied - done - 1) {
        case 0: ptx::cp_async_wait_group<0>(); break;
        case 1: ptx::cp_async_wait_group<1>(); break;
        case 2: ptx::cp_async_wait_group<2>(); break;
        default: ptx::cp_async_wait_group<3>();
      }
      // The copies of Q were issued earlier; the thread arrives for them here.
      if (done == 0) copier.arrive_at_pending();
      const Part part = part_of(done);
      if constexpr (tile.row_bytes > 0) {
        widen_bytes(part, P::slot_of(done / kPartsOfBlock));
      } else if (part.of_v) {
        widen_part<P::chunks_half>(part, descale_v);
      } else {
        widen_part<kChunksOfK>(part, descale_k);
      }
    }
    copier.flush();
  }
  FMHA_DEVICE void load_q() {
    copy_chunks<spec.head_dim_qk, P::chunks_k>(smem.q, 0, told(query_row_of(p, work, found_row)), p.q.data);
    if constexpr (counts_q(tile)) {
      ptx::cp_async_mbarrier_arrive(smem.q_full);
    } else {
      copier.finish(smem.q_full);
    }
  }

  // Copies chunks `first` to `first + count` of a block's K or V, together with the tail if it belongs to them.
  template <int dim, int count, bool whole = dim % kSpan == 0>
  FMHA_DEVICE void load_part(int32_t part, const View& view, const ptx::TensorMap& map, const Chunk* block, int32_t first,
                             bool with_tail, int32_t first_key, uint32_t phase) {
    constexpr int tail = 2 * P::chunks_half;
    Barrier& full = smem.full[part];
    copier.wait(smem.empty[part], phase ^ 1);
    // Rows behind the last key that some row sees are set to zeros.
    if (first_key + kKeys > work.end) {
      const int32_t j = first_key + found_row;
      const Rows rows = told(row_of<Row>(view, j, entry_of(j)));
      copy_chunks<dim, count, whole>(block + first, first, rows, view.data);
      if (with_tail) copy_chunks<dim, 1>(block + tail, tail, rows, view.data);
      copier.finish(full);
      return;
    }
    // Announces earlier copies first: their data is needed first.
    copier.flush();
    if (warp > 0) return ptx::mbarrier_arrive_if(full, true);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(full, (count + with_tail) * Chunk::tile_bytes);
    } else {
      ptx::mbarrier_arrive_if(full, true);
    }
    __syncwarp();
    bring_chunks<count>(map, full, block + first, first, first_key);
    if (with_tail) bring_chunks<1>(map, full, block + tail, tail, first_key);
    __syncwarp();
  }

  FMHA_DEVICE void run(int32_t index = 0) {
    // Waits until Q's place is released; the consumers have then also read the tile's words before.
    if constexpr (tile.listed && walks_tiles(spec, tile)) ptx::mbarrier_wait_parity(smem.q_empty(), work.turns.tile() ^ 1);
    load_q();
    if constexpr (in_shares(tile)) ptx::bar_arrive<kNumThreads>(kTileTold);
    if constexpr (are_of_token<Keys>()) {
      leave_out_absent();
      tell_tile(smem, index, work.num_blocks, work.turns);
    }
    if constexpr (widens) {
      widen_all();
    } else if constexpr (are_of_token<Keys>()) {
      gather_listed();
    } else if constexpr (gathers(tile)) {
      gather_all();
    } else {
      copy_all();
    }
    // Copies over lists are waited for after the last tile instead.
    if constexpr (!widens && !are_of_token<Keys>() && !in_shares(tile)) end_gathers();
  }
  // Copies chunks of a block row by row. The block's barrier counts the copies as they land, so that nothing waits for
  // them here.
  template <int dim, int count, bool whole = dim % kSpan == 0>
  FMHA_DEVICE void gather_part(int32_t part, const Chunk* block, int32_t first, bool with_tail, const Rows& rows, const void* any,
                               uint32_t phase) const {
    constexpr int tail = 2 * P::chunks_half;
    ptx::mbarrier_wait_parity(smem.empty[part], phase ^ 1);
    copy_chunks<dim, count, whole>(block + first, first, rows, any);
    if (with_tail) copy_chunks<dim, 1>(block + tail, tail, rows, any);
    ptx::cp_async_mbarrier_arrive(smem.full[part]);
  }
  FMHA_DEVICE void gather_all() const {
    const int32_t num_blocks = ptx::uniform(work.num_blocks);
    int32_t j = work.last_block * kKeys + found_row, entry = entry_of(j);
#pragma unroll 1
    for (int32_t i = 0; i < num_blocks; ++i, j -= kKeys) {
      const int32_t slot = P::slot_of(i);
      const uint32_t phase = phase_of<spec, tile>(work, i);
      const Row found = row_of<Row>(p.k, j, entry), found_v = P::v_in_k ? nullptr : row_of<Row>(p.v, j, entry);
      // Entry of the next block; it arrives during this block's copies.
      entry = entry_of(j - kKeys);
      gather_block(slot, phase, found, found_v);
    }
  }
  // Copies a block from the rows whose addresses the lanes have found: K, and V where it is apart.
  FMHA_DEVICE void gather_block(int32_t slot, uint32_t phase, Row found, Row found_v) const {
    if constexpr (P::v_in_k) {
      const Rows rows = told(found);
#pragma unroll 1
      for (int32_t half = 0; half < 2; ++half)
        gather_part<spec.head_dim_qk, P::chunks_half>(P::part_of(slot, half), smem.k[slot], half * P::chunks_half,
                                                      P::comes_with_tail(slot, half), rows, p.k.data, phase);
    } else {
      gather_part<spec.head_dim_qk, P::chunks_k>(0, smem.k[0], 0, false, told(found), p.k.data, phase);
      const Rows rows = told(found_v);
#pragma unroll 1
      for (int32_t half = 0; half < 2; ++half)
        gather_part<spec.head_dim_v, P::chunks_half, kWholeV>(P::part_of(0, half), smem.v, half * P::chunks_half, false, rows,
                                                              p.v.data, phase);
    }
  }
  // Waits for the thread's last copies before the thread ends: hardware is not relied upon to complete them later.
  FMHA_DEVICE static void end_gathers() {
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
  }

  // The list's entry for a place; an absent key outside the part's places.
  FMHA_DEVICE int32_t listed_at(int32_t place) const {
    return place < work.part_keys.begin || place >= work.end ? -1 : entry_at(keys.list, place);
  }
  FMHA_DEVICE int32_t page_with(int32_t key, int32_t place) const {
    return fmha::page_with<spec.kv_layout>(keys.list, key, place);
  }
  // Address of the row of the key at a place, from its page in the block table; null stands for zeros.
  template <class Pointer>
  FMHA_DEVICE Pointer listed_row(const View& view, int32_t key, int32_t page, int32_t place) const {
    return key < 0 ? nullptr : address_with<Pointer>(keys.list, spec.kv_layout, view, key, page, place);
  }
  // Addresses of the bytes of the key at a place; null stands for zeros.
  FMHA_DEVICE BytesOfRow listed_bytes(int32_t key, int32_t page, int32_t place) const {
    static_assert(spec.kv_layout == KvKind::Paged, "sm90_mla: rows of bytes lie in pages");
    if (key < 0) return {};
    return bytes_with<tile.row_bytes>(keys.list, key, page, place);
  }
  // Leaves out the last blocks in pairs as long as they have no key: a list that is not full ends with such blocks.
  FMHA_DEVICE void leave_out_absent() {
    static_assert(2 * kKeys == kWarpgroup, "a thread looks at one place of two blocks");
    while (work.num_blocks > 0) {
      const int32_t place = (work.last_block + 1) * kKeys - 1 - int32_t(threadIdx.x);
      const bool absent = key_with(keys.list, listed_at(place), place) < 0;
      if (!ptx::bar_red_and<kWarpgroup>(kLoaders, absent)) break;
      work.last_block -= 2;
      work.num_blocks = max(work.num_blocks - 2, 0);
    }
  }
  // Tells the consumers which keys of a block are there, by the warp's word. The block's places are free, so that they
  // have read the word of two blocks before.
  FMHA_DEVICE void tell(int32_t block, uint32_t present) const {
    if (lane == 0) ptx::st_shared_b32(ptx::shared_address(&smem.list.present[block % 2][warp]), present);
    ptx::mbarrier_arrive_if(smem.list.told[block % 2], lane == 0);
  }
  // The keys of a token's list. What a block's addresses need has been asked for a block before, and the list's entries
  // a block before that, so that copies wait for neither.
  FMHA_DEVICE void gather_listed() const {
    const int32_t num_blocks = ptx::uniform(work.num_blocks);
    int32_t place = work.last_block * kKeys + found_row;
    int32_t key = key_with(keys.list, listed_at(place), place), page = page_with(key, place);
    int32_t entry = listed_at(place - kKeys);
#pragma unroll 1
    for (int32_t i = 0; i < num_blocks; ++i) {
      const Row found = listed_row<Row>(p.k, key, page, place);
      const Row found_v = P::v_in_k ? nullptr : listed_row<Row>(p.v, key, page, place);
      const uint32_t present = ptx::vote_ballot(key >= 0);
      place -= kKeys;
      key = key_with(keys.list, entry, place);
      page = page_with(key, place);
      entry = listed_at(place - kKeys);
      gather_block(P::slot_of(i), phase_of<spec, tile>(work, i), found, found_v);
      tell(i, present & 0xffffu);
    }
  }
  FMHA_DEVICE void copy_all() {
#pragma unroll 1
    for (int32_t i = 0; i < work.num_blocks; ++i) {
      const int32_t slot = P::slot_of(i), first_key = (work.last_block - i) * kKeys;
      const uint32_t phase = phase_of<spec, tile>(work, i);
      if constexpr (!P::v_in_k)
        load_part<spec.head_dim_qk, P::chunks_k>(0, p.k, maps.k, smem.k[0], 0, false, first_key, phase);
#pragma unroll 1
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t part = P::part_of(slot, half), first = half * P::chunks_half;
        if constexpr (P::v_in_k) {
          const bool with_tail = P::comes_with_tail(slot, half);
          load_part<spec.head_dim_qk, P::chunks_half>(part, p.k, maps.k, smem.k[slot], first, with_tail, first_key, phase);
        } else {
          load_part<spec.head_dim_v, P::chunks_half, kWholeV>(part, p.v, maps.v, smem.v, first, false, first_key, phase);
        }
      }
    }
    copier.flush();
  }
};

}  // namespace fmha::mla
