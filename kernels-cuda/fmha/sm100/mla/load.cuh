// The load role, four warps: Q once, and the ring's slots in the order of the products (config.cuh).
//
// TMA brings up to 64 keys by 64 columns at once, a box to a lane, whose keys lie in one page. Keys of which some are
// seen by no row are copied, with zeros in the place of those: memory there may hold NaN, of V too. Where pages are no
// whole boxes all rows are copied, each from where it lies.
#pragma once
#include <fmha/ptx/cluster.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm100/mla/work.cuh>

namespace fmha::sm100::mla {

template <FwdSpec spec, Sm100MlaTile tile>
struct Loader {
  using P = Plan<spec>;
  using Row = const uint16_t*;

  const FwdParams& p;
  const Maps& maps;
  const Work& work;
  Smem<spec>& smem;
  const ptx::CacheHint hint_of_v;
  const int32_t lane = threadIdx.x % 32, warp = ptx::uniform(threadIdx.x / 32) - kLoadWarp, rank = rank_in_pair();
  Slot<kStages> ring;
  // Barrier of the copies under way, which stay so while the next slot's are issued.
  Barrier* pending = nullptr;

  // Rows that a warp copies: four of every sixteen. Lane l finds the address of the (l % 16)-th of them (null: zeros),
  // and receives those of four rows, sixteen apart, which have the same swizzle. It copies 16 bytes of a chunk of each
  // row; eight lanes copy the whole chunk.
  static constexpr int kRowsOfLane = 4, kRowsApart = kRows / kRowsOfLane;
  const int32_t found_row = 4 * warp + lane % 4 + lane / 4 % kRowsOfLane * kRowsApart;
  struct Rows {
    Row of_lane[kRowsOfLane];
  };
  FMHA_DEVICE Rows told(Row found) const {
    Rows rows;
#pragma unroll
    for (int k = 0; k < kRowsOfLane; ++k)
      rows.of_lane[k] = reinterpret_cast<Row>(ptx::shfl_idx(reinterpret_cast<uint64_t>(found), lane / 8 + 4 * k));
    return rows;
  }
  FMHA_DEVICE Row query_row() const {
    const int32_t row = work.first_row + found_row, i = Work::query_of(p, row);
    if (i >= work.span.seqlen_q) return nullptr;
    return static_cast<Row>(p.q.data) + query_offset(p, work.span, i, work.head_of(p, row, i));
  }
  // Address of key `j`; null: zeros.
  FMHA_DEVICE Row row_of(const View& view, int32_t j) const {
    if (j >= work.end) return nullptr;
    return static_cast<Row>(view.data) + row_offset(view, kv_row(p, spec.kv_layout, work.span, j), work.i_head_kv);
  }

  // `count` chunks of rows of `dim` elements, from column `column` on.
  template <int count>
  FMHA_DEVICE void copy_chunks(const Chunk* to, int32_t column, int32_t dim, const Rows& rows, const void* any) const {
    const uint32_t of_lane = to->address() + fmha::mma::word_offset<Chunk>(4 * warp + lane / 8, lane % 8 * 8);
    const int32_t first = column + lane % 8 * 8;
#pragma unroll
    for (int k = 0; k < kRowsOfLane; ++k) {
#pragma unroll
      for (int chunk = 0; chunk < count; ++chunk) {
        const int32_t at = first + chunk * kSpan, there = rows.of_lane[k] ? clamp(dim - at, 0, 8) : 0;
        // Without elements nothing is read.
        ptx::cp_async<16>(of_lane + chunk * Chunk::tile_bytes + k * kRowsApart * Chunk::span_bytes,
                          there > 0 ? rows.of_lane[k] + at : any, 2 * there);
      }
    }
  }

  // Copies that this thread has seen complete are announced to the tensor cores of both CTAs.
  FMHA_DEVICE void announce() {
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive_release_at(*pending, kLeader);
    pending = nullptr;
  }
  FMHA_DEVICE void flush() {
    if (!pending) return;
    ptx::cp_async_wait_group<0>();
    announce();
  }
  FMHA_DEVICE void finish_copies(Barrier& full) {
    ptx::cp_async_commit_group();
    if (pending) {
      ptx::cp_async_wait_group<1>();
      announce();
    }
    pending = &full;
  }
  // Waits until the slot is free. The products that free it may wait for copies that are pending here.
  FMHA_DEVICE void wait_empty() {
    Barrier& empty = smem.kv_empty[ring.index];
    const bool free = __all_sync(ptx::kAllLanes, ptx::mbarrier_test_parity(empty, ring.phase ^ 1));
    if (free) return;
    flush();
    ptx::mbarrier_wait_parity(empty, ring.phase ^ 1);
  }

  // Boxes of `count` chunks of 64 keys, dealt out to the lanes of a warp.
  template <int count>
  FMHA_DEVICE void bring(const Chunk* to, const ptx::TensorMap& map, uint32_t barrier, int32_t first_key,
                         int32_t column, ptx::CacheHint hint) const {
    constexpr int box_keys = tile.by_tma ? tile.box_keys : kHalf, boxes = kHalf / box_keys;
    static_assert(box_keys % 8 == 0 && count * boxes <= 32, "a lane's box is whole lines of the swizzle");
    const int32_t chunk = lane / boxes, box = lane % boxes;
    if (chunk >= count) return;
    const KvRow key = kv_row(p, spec.kv_layout, work.span, first_key + box * box_keys);
    const int32_t batch = spec.kv_layout == KvKind::Packed ? 0 : key.batch;
    ptx::cp_async_bulk_tensor_4d_pair(to[chunk].address() + box * box_keys * Chunk::span_bytes, map, barrier,
                                      column + chunk * kSpan, key.row, work.i_head_kv, batch, hint);
  }

  // A slot: 64 keys from `first_key` on, `count` chunks of their columns from `column` on.
  template <int count>
  FMHA_DEVICE void load(const View& view, const ptx::TensorMap& map, int32_t dim, int32_t first_key, int32_t column,
                        ptx::CacheHint hint) {
    wait_empty();
    const Chunk* to = smem.kv[ring.index].chunks;
    Barrier& full = smem.kv_full[ring.index];
    if (!tile.by_tma || first_key + kHalf > work.end) {
      copy_chunks<count>(to, column, dim, told(row_of(view, first_key + found_row)), view.data);
      finish_copies(full);
    } else {
      // Earlier copies are needed first.
      flush();
      const uint32_t barrier = ptx::address_at(full, kLeader);
      if (warp > 0) {
        ptx::mbarrier_arrive_at_if(full, kLeader, lane == 0);
      } else {
        if (lane == 0) ptx::mbarrier_arrive_expect_tx_at(barrier, count * Chunk::tile_bytes);
        __syncwarp();
        bring<count>(to, map, barrier, first_key, column, hint);
        __syncwarp();
      }
    }
    ring.advance();
  }

  FMHA_DEVICE void load_q() {
    const Rows rows = told(query_row());
#pragma unroll 1
    for (int32_t chunk = 0; chunk < P::chunks_k; ++chunk)
      copy_chunks<1>(smem.q + chunk, chunk * kSpan, spec.head_dim_qk, rows, p.q.data);
    finish_copies(smem.q_full);
  }
  FMHA_DEVICE void load_k(int32_t block) {
    const int32_t first_key = block * kKeys + rank * kHalf;
#pragma unroll 1
    for (int32_t slot = 0; slot < P::chunks_k / 2; ++slot)
      load<2>(p.k, maps.k, spec.head_dim_qk, first_key, slot * 2 * kSpan, ptx::CacheHint::EvictLast);
    if constexpr (P::chunks_k % 2 == 1)
      load<1>(p.k, maps.k, spec.head_dim_qk, first_key, (P::chunks_k - 1) * kSpan, ptx::CacheHint::EvictLast);
  }
  FMHA_DEVICE void load_v(int32_t block) {
#pragma unroll 1
    for (int32_t half = 0; half < kCtas; ++half) {
#pragma unroll 1
      for (int32_t group = 0; group < P::groups_v; ++group)
        load<2>(p.v, maps.v, spec.head_dim_v, block * kKeys + half * kHalf, group * kGroup + rank * (kGroup / kCtas),
                hint_of_v);
    }
  }

  FMHA_DEVICE void run() {
    load_q();
#pragma unroll 1
    for (int32_t i = 0; i <= work.num_blocks; ++i) {
      if (i < work.num_blocks) load_k(work.last_block - i);
      if (i > 0) load_v(work.last_block - (i - 1));
    }
    flush();
  }
};

}  // namespace fmha::sm100::mla
