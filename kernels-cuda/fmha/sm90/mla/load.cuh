// The load role, a warpgroup: Q, and the blocks of K and V, in parts as their places are released.
//
// Whole blocks come by TMA, in boxes that lie in one page each. A block that ends with keys that no row sees is copied, and
// these are zeros: memory there may hold NaN, of V too. So are all blocks where pages are not whole boxes.
//
// Caches in FP8 are copied as they are to where they will lie in 16 bits, and widened there. A block's lines are brought into the
// L2 two blocks before.
#pragma once
#include <fmha/common/copy_tile.cuh>
#include <fmha/common/widen.cuh>
#include <fmha/ptx/collective.cuh>
#include <fmha/ptx/tma.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90/mla/work.cuh>

namespace fmha::mla {

template <FwdSpec spec, Sm90MlaTile tile>
struct Loader {
  const FwdParams& p;
  const Maps& maps;
  const Work& work;
  Smem<spec, tile>& smem;
  ptx::CacheHint hint;
  Copier<16, CopyWarps<0, 15>> copier;
  using P = Plan<spec, tile>;
  using Chunk = typename P::Chunk;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  static constexpr int kRowsOfWarp = kRows / 4;  // a warp copies rows `warp`, `warp + 4`, ...

  static constexpr bool widens = is_fp8(tile.stored);

  // Where row `warp + 4 * lane` lies, of the first sixteen lanes; null: zeros.
  using Row = const uint16_t*;
  using NarrowRow = const uint8_t*;

  FMHA_DEVICE Row query_row() const {
    const int32_t row = work.first_row + warp + 4 * (lane % kRowsOfWarp), i = Work::query_of(p, row);
    if (i >= work.span.seqlen_q) return nullptr;
    const int64_t at = row_offset(p.q, work.span.storage_batch, work.span.q_row + i, work.head_of(p, row, i));
    return static_cast<Row>(p.q.data) + at;
  }
  FMHA_DEVICE Row key_row(const View& view, int32_t first_key) const {
    const int32_t j = first_key + warp + 4 * (lane % kRowsOfWarp);
    if (j >= work.end) return nullptr;
    return static_cast<Row>(view.data) + row_offset(view, kv_row(p, spec.kv_layout, work.span, j), work.i_head_kv);
  }

  FMHA_DEVICE static Row row_of(Row own, int32_t r) {
    return reinterpret_cast<Row>(ptx::shfl_idx(reinterpret_cast<uint64_t>(own), r));
  }
  // Chunks of all rows from chunk `first` of rows of `dim` elements on: a warp copies 64 columns of four rows, or 256 of one, at
  // a time.
  template <int dim, int count>
  FMHA_DEVICE void copy_chunks(const Chunk* to, int32_t first, Row own, const void* any) const {
#pragma unroll 4
    for (int32_t at = lane / 8; at < kRowsOfWarp * count; at += 4) {
      const int32_t r = at / count, chunk = at - r * count, column = lane % 8 * 8, from_column = (first + chunk) * kSpan + column;
      const Row from = row_of(own, r);
      const int32_t there = from ? clamp(dim - from_column, 0, 8) : 0;
      ptx::cp_async<16>(to[chunk].address() + fmha::mma::word_offset<Chunk>(warp + 4 * r, column),
                        there > 0 ? static_cast<const void*>(from + from_column) : any, 2 * there);
    }
  }
  // The boxes of a part's chunks, dealt out to the lanes of one warp. Of a cluster's two CTAs each brings every second chunk, for
  // both.
  template <int count>
  FMHA_DEVICE void bring_chunks(const ptx::TensorMap& map, Barrier& full, const Chunk* to, int32_t first, int32_t first_key) const {
    constexpr int box_rows = tile.box_rows > 0 ? tile.box_rows : kKeys, boxes = kKeys / box_rows;
    for (int32_t at = lane; at < count * boxes; at += 32) {
      const int32_t chunk = at / boxes, row = at % boxes * box_rows;
      const KvRow key = kv_row(p, spec.kv_layout, work.span, first_key + row);
      const int32_t batch = spec.kv_layout == KvKind::Packed ? 0 : key.batch;
      const uint32_t address = to[chunk].address() + row * Chunk::span_bytes;
      const int32_t column = (first + chunk) * kSpan;
      if constexpr (tile.cluster > 1) {
        if ((first + chunk) % tile.cluster == rank_in(tile))
          ptx::cp_async_bulk_tensor_4d_multicast(address, map, full, column, key.row, work.i_head_kv, batch,
                                                 (1 << tile.cluster) - 1, hint);
      } else {
        ptx::cp_async_bulk_tensor_4d(address, map, full, column, key.row, work.i_head_kv, batch, hint);
      }
    }
  }

  // Caches in FP8, copied as they are. The bytes of a part's chunks lie in the upper half of where these will, and are widened from
  // its first chunk upwards: what a chunk overwrites are its own bytes, or those of chunks before it. The tail's lie in its own
  // upper half. A thread widens what it has copied, and a warp's bytes lie in the sixteen rows of the chunks that are its own
  // here, so that no warp waits for another one.
  struct Part {
    uint32_t address;  // of its first chunk
    int32_t first;     // chunk of the block
    uint32_t tail;     // address of the tail, if that comes with it, or 0
    int32_t barrier;
    uint32_t phase;
    bool of_v;  // of V, which lies apart
  };
  static constexpr int kPartsOfBlock = P::v_in_k ? 2 : 3;
  // The n-th part of all blocks, in the order in which they are widened.
  FMHA_DEVICE Part part_of(int32_t n) const {
    const int32_t block = n / kPartsOfBlock, at = n % kPartsOfBlock, slot = P::slot_of(block);
    const uint32_t phase = P::phase_of(block);
    if constexpr (P::v_in_k) {
      const uint32_t tail = at == P::half_with_tail(slot) ? smem.k[slot][2 * P::chunks_half].address() : 0;
      return {smem.k[slot][at * P::chunks_half].address(), at * P::chunks_half, tail, P::part_of(slot, at), phase, false};
    } else {
      if (at == 0) return {smem.k[0][0].address(), 0, 0, 0, phase, false};
      const int32_t first = (at - 1) * P::chunks_half;
      return {smem.v[first].address(), first, 0, P::part_of(0, at - 1), phase, true};
    }
  }
  // Of a chunk a lane has sixteen elements of each of two rows, eight apart. Eight lanes, of two neighbouring rows, have words in
  // different banks both as bytes, of which odd rows have their halves exchanged, and as 16 bits.
  struct Narrow {
    uint32_t bytes[2][4];
  };
  static constexpr int kLaneRowsApart = 8 * Chunk::span_bytes;
  const int32_t lane_row = warp * kRowsOfWarp + lane / 4;
  const uint32_t bytes_of_lane = fmha::mma::word_offset<Chunk>(lane_row, (lane % 4 + lane / 4 % 2 * 4) * 8);
  const uint32_t wide_of_lane = fmha::mma::word_offset<Chunk>(lane_row, lane % 4 * 16);

  // Where the lane's bytes of chunk `at` of a part of so many lie; beyond them the tail's.
  template <int count>
  FMHA_DEVICE uint32_t bytes_at(const Part& part, int32_t at) const {
    const int32_t half = count + at;
    return at < count ? part.address + half / 2 * Chunk::tile_bytes + (bytes_of_lane ^ half % 2 * 64)
                      : part.tail + (bytes_of_lane ^ 64);
  }
  // Where the lane's two rows of a block lie; null: zeros.
  FMHA_DEVICE void find_rows(const View& view, int32_t first_key, NarrowRow (&rows)[2]) const {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const int32_t j = first_key + lane_row + 8 * word;
      rows[word] = nullptr;
      if (j < work.end)
        rows[word] = static_cast<NarrowRow>(view.data) + row_offset(view, kv_row(p, spec.kv_layout, work.span, j), work.i_head_kv);
    }
  }
  template <int dim, int count>
  FMHA_DEVICE void copy_narrow(const Part& part, const NarrowRow (&rows)[2]) const {
    const auto copy = [&](int32_t at, int32_t chunk) {
      const uint32_t to = bytes_at<count>(part, at);
      const int32_t column = chunk * kSpan + lane % 4 * 16;
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const bool there = rows[word] != nullptr && (dim % kSpan == 0 || column < dim);
        ptx::cp_async<16>(to + word * kLaneRowsApart, there ? rows[word] + column : p.k.data, there ? 16 : 0);
      }
    };
#pragma unroll
    for (int at = 0; at < count; ++at) copy(at, part.first + at);
    if (part.tail != 0) copy(count, 2 * P::chunks_half);
    ptx::cp_async_commit_group();
  }
  // To where the lane's elements of a chunk lie in 16 bits; a factor of 1 is left out.
  template <bool scales>
  FMHA_DEVICE void store_wide(uint32_t to, const Narrow& narrow, float descale) const {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t eight[2] = {narrow.bytes[word][2 * k], narrow.bytes[word][2 * k + 1]};
        uint32_t packed[4];
        widen_word<tile.stored, spec.dtype_qk, true>(eight, scales ? descale : 1.f, packed);
        ptx::st_shared_v4((to ^ 16 * k) + word * kLaneRowsApart, packed);
      }
    }
  }
  template <int count, bool scales>
  FMHA_DEVICE void widen_chunks(const Part& part, float descale) const {
    const auto read = [&](int32_t at, Narrow& narrow) {
      const uint32_t from = bytes_at<count>(part, at);
#pragma unroll
      for (int word = 0; word < 2; ++word) ptx::ld_shared_v4_b32(narrow.bytes[word], from + word * kLaneRowsApart);
    };
    const auto wide_at = [&](int32_t at) {
      return (at < count ? part.address + at * Chunk::tile_bytes : part.tail) + wide_of_lane;
    };
    if constexpr (count <= 4) {
      // Registers hold all of the part's bytes, so that no chunk waits for the next one's.
      Narrow narrow[count], tail;
#pragma unroll
      for (int at = 0; at < count; ++at) read(at, narrow[at]);
      if (part.tail != 0) read(count, tail);
      // Every lane has read what is overwritten.
      __syncwarp();
#pragma unroll
      for (int at = 0; at < count; ++at) store_wide<scales>(wide_at(at), narrow[at], descale);
      if (part.tail != 0) store_wide<scales>(wide_at(count), tail, descale);
    } else {
      static_assert(!P::v_in_k, "sm90_mla: a part with a tail fits in registers");
      Narrow narrow;
      read(0, narrow);
#pragma unroll 1
      for (int32_t at = 0; at < count; ++at) {
        Narrow next = narrow;
        if (at + 1 < count) read(at + 1, next);
        // Every lane has read what the chunk overwrites.
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
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive_if(smem.full[part.barrier], true);
  }
  // All parts of all blocks. Those whose places are free are under way while one is widened. Only the one that is next is waited
  // for, since who frees the places of later ones may itself wait for it; and of a V in K the other half of a block, which is freed
  // soon after the first.
  FMHA_DEVICE void widen_all() {
    constexpr int kAhead = 3, kChunksOfK = P::v_in_k ? P::chunks_half : P::chunks_k;
    const float descale_k = scalar_of(p.descale_k, work.span.i_batch, work.i_head_kv, 1.f);
    const float descale_v = P::v_in_k ? descale_k : scalar_of(p.descale_v, work.span.i_batch, work.i_head_kv, 1.f);
    const int32_t count = ptx::uniform(work.num_blocks) * kPartsOfBlock;
    NarrowRow rows[2];
    int32_t copied = 0;
    find_rows(p.k, work.last_block * kKeys, rows);
#pragma unroll 1
    for (int32_t done = 0; done < count; ++done) {
#pragma unroll 1
      while (copied < count && copied <= done + kAhead) {
        const Part part = part_of(copied);
        Barrier& empty = smem.empty[part.barrier];
        const bool waits = copied == done || (P::v_in_k && copied % kPartsOfBlock == 1);
        if (!waits && !ptx::uniform(ptx::mbarrier_test_parity(empty, part.phase ^ 1))) break;
        ptx::mbarrier_wait_parity(empty, part.phase ^ 1);
        if (part.of_v) {
          copy_narrow<spec.head_dim_v, P::chunks_half>(part, rows);
        } else {
          copy_narrow<spec.head_dim_qk, kChunksOfK>(part, rows);
        }
        ++copied;
        // Rows are found, and lines brought into the L2, beneath the copies.
        const int32_t block = copied / kPartsOfBlock, at = copied % kPartsOfBlock, first_key = (work.last_block - block) * kKeys;
        if (at == 0 && copied < count) {
          find_rows(p.k, first_key, rows);
          prefetch_block(block + 1);
        }
        if constexpr (!P::v_in_k) {
          if (at == 1) find_rows(p.v, first_key, rows);
        }
      }
      switch (copied - done - 1) {
        case 0: ptx::cp_async_wait_group<0>(); break;
        case 1: ptx::cp_async_wait_group<1>(); break;
        case 2: ptx::cp_async_wait_group<2>(); break;
        default: ptx::cp_async_wait_group<3>();
      }
      // Q's copies were begun before.
      if (done == 0) copier.arrive_at_pending();
      const Part part = part_of(done);
      if (part.of_v) {
        widen_part<P::chunks_half>(part, descale_v);
      } else {
        widen_part<kChunksOfK>(part, descale_k);
      }
    }
    copier.flush();
  }
  // Two threads a row.
  template <int dim>
  FMHA_DEVICE void prefetch(const View& view, int32_t first_key) const {
    const int32_t j = first_key + int32_t(threadIdx.x % kWarpgroup) / 2;
    if (j < 0 || j >= work.end) return;
    const NarrowRow from = static_cast<NarrowRow>(view.data) + row_offset(view, kv_row(p, spec.kv_layout, work.span, j), work.i_head_kv);
#pragma unroll 1
    for (int32_t at = threadIdx.x % 2 * 128; at < dim; at += 256) ptx::prefetch_global_l2(from + at);
  }
  FMHA_DEVICE void prefetch_block(int32_t i) const {
    if (i >= work.num_blocks) return;
    const int32_t first_key = (work.last_block - i) * kKeys;
    prefetch<spec.head_dim_qk>(p.k, first_key);
    if constexpr (!P::v_in_k) prefetch<spec.head_dim_v>(p.v, first_key);
  }

  FMHA_DEVICE void load_q() {
    copy_chunks<spec.head_dim_qk, P::chunks_k>(smem.q, 0, query_row(), p.q.data);
    copier.finish(smem.q_full);
  }

  // Chunks `first` to `first + count` of a block's K or V; with them the tail, if they have it.
  template <int dim, int count>
  FMHA_DEVICE void load_part(int32_t part, const View& view, const ptx::TensorMap& map, const Chunk* block, int32_t first,
                             bool with_tail, int32_t first_key, uint32_t phase) {
    constexpr int tail = 2 * P::chunks_half;
    Barrier& full = smem.full[part];
    copier.wait(smem.empty[part], phase ^ 1);
    // What follows the last key that some row sees is to be zeros.
    if (tile.box_rows == 0 || first_key + kKeys > work.end) {
      const Row own = key_row(view, first_key);
      copy_chunks<dim, count>(block + first, first, own, view.data);
      if (with_tail) copy_chunks<dim, 1>(block + tail, tail, own, view.data);
      copier.finish(full);
      return;
    }
    // What was copied before is needed first.
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

  FMHA_DEVICE void run() {
    if constexpr (widens) {
      prefetch_block(0);
      prefetch_block(1);
      load_q();
      widen_all();
    } else {
      load_q();
      copy_all();
    }
  }
  FMHA_DEVICE void copy_all() {
#pragma unroll 1
    for (int32_t i = 0; i < work.num_blocks; ++i) {
      const int32_t slot = P::slot_of(i), first_key = (work.last_block - i) * kKeys;
      const uint32_t phase = P::phase_of(i);
      if constexpr (!P::v_in_k)
        load_part<spec.head_dim_qk, P::chunks_k>(0, p.k, maps.k, smem.k[0], 0, false, first_key, phase);
#pragma unroll 1
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t part = P::part_of(slot, half), first = half * P::chunks_half;
        if constexpr (P::v_in_k) {
          const bool with_tail = half == P::half_with_tail(slot);
          load_part<spec.head_dim_qk, P::chunks_half>(part, p.k, maps.k, smem.k[slot], first, with_tail, first_key, phase);
        } else {
          load_part<spec.head_dim_v, P::chunks_half>(part, p.v, maps.v, smem.v, first, false, first_key, phase);
        }
      }
    }
    copier.flush();
  }
};

}  // namespace fmha::mla
