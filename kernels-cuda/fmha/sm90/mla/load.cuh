// The load role, a warpgroup: Q, and the blocks of K and V, in parts as their places are released.
//
// Whole blocks come by TMA, in boxes that lie in one page each. A block that ends with keys that no row sees is copied, and
// these are zeros: memory there may hold NaN, of V too. So are all blocks where pages are not whole boxes.
//
// Caches in FP8 are read into registers, 16 bytes a lane, and widened on the way into shared memory. What a thread has under way
// is too little to wait for memory with: a block's lines are brought into the L2 two blocks before.
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
  template <class Row>
  FMHA_DEVICE Row key_row(const View& view, int32_t first_key) const {
    const int32_t j = first_key + warp + 4 * (lane % kRowsOfWarp);
    if (j >= work.end) return nullptr;
    return static_cast<Row>(view.data) + row_offset(view, kv_row(p, spec.kv_layout, work.span, j), work.i_head_kv);
  }

  template <class Row>
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

  // One or two chunks of all rows of a cache in FP8, in registers: a lane has sixteen elements of a row, four neighbours a chunk's.
  struct Narrow {
    uint32_t bytes[4][4];
  };
  // Of the first of its words; the next is so many rows of its warp, and so many of the chunk, further.
  template <int count>
  FMHA_DEVICE int32_t first_row() const { return lane / (4 * count); }
  template <int count>
  FMHA_DEVICE int32_t chunk_of_lane() const { return lane / 4 % count; }
  template <int count>
  static constexpr int kRowsApart = 8 / count;
  template <int count>
  static constexpr int kBytesApart = 4 * kRowsApart<count> * Chunk::span_bytes;

  template <int dim, int count>
  FMHA_DEVICE void read_chunks(Narrow& narrow, int32_t first, NarrowRow own) const {
    const int32_t column = (first + chunk_of_lane<count>()) * kSpan + lane % 4 * 16;
#pragma unroll
    for (int word = 0; word < 2 * count; ++word) {
      const NarrowRow from = row_of(own, first_row<count>() + word * kRowsApart<count>);
      ptx::ld_global_v4_b32_if(narrow.bytes[word], from + column, from != nullptr && (dim % kSpan == 0 || column < dim));
    }
  }
  template <int count>
  FMHA_DEVICE void widen_chunks(const Chunk* to, const Narrow& narrow, float descale) const {
    // Of a warp's stores at a time, half write the first and half the second of their two words, in different banks. Words apart
    // lie alike in the swizzle.
    static_assert(kBytesApart<count> % (8 * Chunk::span_bytes) == 0, "whole swizzle atoms from word to word");
    const bool second_first = lane & 4;
    const uint32_t of_lane = to[chunk_of_lane<count>()].address() +
                             fmha::mma::word_offset<Chunk>(warp + 4 * first_row<count>(), lane % 4 * 16 + (second_first ? 8 : 0));
#pragma unroll
    for (int word = 0; word < 2 * count; ++word) {
      const uint32_t (&bytes)[4] = narrow.bytes[word];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const bool second = second_first != (k == 1);
        const uint32_t eight[2] = {second ? bytes[2] : bytes[0], second ? bytes[3] : bytes[1]};
        uint32_t packed[4];
        widen_word<tile.stored, spec.dtype_qk, true>(eight, descale, packed);
        ptx::st_shared_v4((of_lane ^ 16 * k) + word * kBytesApart<count>, packed);
      }
    }
  }
  // Chunks `first` to `first + count`, two at a time, the next two under way while these are widened; the first two before their
  // place is free.
  template <int dim, int count>
  FMHA_DEVICE void widen_part(int32_t part, const View& view, const HeadScalars& descales, const Chunk* block, int32_t first,
                              bool with_tail, int32_t first_key, uint32_t phase) const {
    constexpr int tail = 2 * P::chunks_half, pairs = count / 2;
    const NarrowRow own = key_row<NarrowRow>(view, first_key);
    const float descale = scalar_of(descales, work.span.i_batch, work.i_head_kv, 1.f);
    Narrow narrow[2];
    if constexpr (pairs > 0) {
      read_chunks<dim, 2>(narrow[0], first, own);
    } else {
      read_chunks<dim, 1>(narrow[0], first, own);
    }
    ptx::mbarrier_wait_parity(smem.empty[part], phase ^ 1);
    // Unrolled twice and not throughout, which spills.
#pragma unroll 2
    for (int pair = 0; pair < pairs; ++pair) {
      if (pair + 1 < pairs) {
        read_chunks<dim, 2>(narrow[(pair + 1) % 2], first + 2 * pair + 2, own);
      } else if constexpr (count % 2 == 1) {
        read_chunks<dim, 1>(narrow[(pair + 1) % 2], first + 2 * pair + 2, own);
      } else if (with_tail) {
        read_chunks<dim, 1>(narrow[(pair + 1) % 2], tail, own);
      }
      widen_chunks<2>(block + first + 2 * pair, narrow[pair % 2], descale);
    }
    if constexpr (count % 2 == 1) {
      widen_chunks<1>(block + first + 2 * pairs, narrow[pairs % 2], descale);
    } else if (with_tail) {
      widen_chunks<1>(block + tail, narrow[pairs % 2], descale);
    }
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive_if(smem.full[part], true);
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
  FMHA_DEVICE void load_part(int32_t part, const View& view, const HeadScalars& descales, const ptx::TensorMap& map, const Chunk* block,
                             int32_t first, bool with_tail, int32_t first_key, uint32_t phase) {
    if constexpr (widens) return widen_part<dim, count>(part, view, descales, block, first, with_tail, first_key, phase);
    constexpr int tail = 2 * P::chunks_half;
    Barrier& full = smem.full[part];
    copier.wait(smem.empty[part], phase ^ 1);
    // What follows the last key that some row sees is to be zeros.
    if (tile.box_rows == 0 || first_key + kKeys > work.end) {
      const Row own = key_row<Row>(view, first_key);
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
    }
    load_q();
    if constexpr (widens) copier.flush();
#pragma unroll 1
    for (int32_t i = 0; i < work.num_blocks; ++i) {
      const int32_t slot = P::slot_of(i), first_key = (work.last_block - i) * kKeys;
      const uint32_t phase = P::phase_of(i);
      if constexpr (widens) prefetch_block(i + 2);
      if constexpr (!P::v_in_k)
        load_part<spec.head_dim_qk, P::chunks_k>(0, p.k, p.descale_k, maps.k, smem.k[0], 0, false, first_key, phase);
#pragma unroll 1
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t part = P::part_of(slot, half), first = half * P::chunks_half;
        if constexpr (P::v_in_k) {
          const bool with_tail = half == P::half_with_tail(slot);
          load_part<spec.head_dim_qk, P::chunks_half>(part, p.k, p.descale_k, maps.k, smem.k[slot], first, with_tail, first_key,
                                                      phase);
        } else {
          load_part<spec.head_dim_v, P::chunks_half>(part, p.v, p.descale_v, maps.v, smem.v, first, false, first_key, phase);
        }
      }
    }
    copier.flush();
  }
};

}  // namespace fmha::mla
