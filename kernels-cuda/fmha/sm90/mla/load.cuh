// The load role, a warpgroup: Q, and the blocks of K and V, in parts as their places are released.
//
// Whole blocks come by TMA, in boxes that lie in one page each. A block that ends with keys that no row sees is copied, and
// these are zeros: memory there may hold NaN, of V too. So are all blocks where pages are not whole boxes.
#pragma once
#include <fmha/common/copy_tile.cuh>
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
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  static constexpr int kRowsOfWarp = kRows / 4;  // a warp copies rows `warp`, `warp + 4`, ...

  // Where row `warp + 4 * lane` lies, of the first sixteen lanes; null: zeros.
  using Row = const uint16_t*;

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
  // The boxes of a part's chunks, dealt out to the lanes of one warp.
  template <int count>
  FMHA_DEVICE void bring_chunks(const ptx::TensorMap& map, Barrier& full, const Chunk* to, int32_t first, int32_t first_key) const {
    constexpr int box_rows = tile.box_rows > 0 ? tile.box_rows : kKeys, boxes = kKeys / box_rows;
    for (int32_t at = lane; at < count * boxes; at += 32) {
      const int32_t chunk = at / boxes, row = at % boxes * box_rows;
      const KvRow key = kv_row(p, spec.kv_layout, work.span, first_key + row);
      const int32_t batch = spec.kv_layout == KvKind::Packed ? 0 : key.batch;
      ptx::cp_async_bulk_tensor_4d(to[chunk].address() + row * Chunk::span_bytes, map, full, (first + chunk) * kSpan, key.row,
                                   work.i_head_kv, batch, hint);
    }
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
    load_q();
#pragma unroll 1
    for (int32_t i = 0; i < work.num_blocks; ++i) {
      const int32_t slot = P::slot_of(i), first_key = (work.last_block - i) * kKeys;
      const uint32_t phase = P::phase_of(i);
      if constexpr (!P::v_in_k) load_part<spec.head_dim_qk, P::chunks_k>(0, p.k, maps.k, smem.k[0], 0, false, first_key, phase);
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
