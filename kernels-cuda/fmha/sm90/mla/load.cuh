// The load role, a warpgroup: Q, and the blocks of K into their two slots, each in two parts as they are released.
//
// Whole blocks come by TMA, in boxes that lie in one page each. A block that ends with keys that no row sees is copied, and
// these are zeros: memory there may hold NaN, which is V's too. So are all blocks where pages are not whole boxes.
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
  const ptx::TensorMap& map;
  const Work& work;
  Smem& smem;
  ptx::CacheHint hint;
  Copier<16, CopyWarps<0, 15>> copier;
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
  FMHA_DEVICE Row key_row(int32_t first_key) const {
    const int32_t j = first_key + warp + 4 * (lane % kRowsOfWarp);
    if (j >= work.end) return nullptr;
    return static_cast<Row>(p.k.data) + row_offset(p.k, kv_row(p, spec.kv_layout, work.span, j), work.i_head_kv);
  }

  FMHA_DEVICE static Row row_of(Row own, int32_t r) {
    return reinterpret_cast<Row>(ptx::shfl_idx(reinterpret_cast<uint64_t>(own), r));
  }
  FMHA_DEVICE static void copy_word(uint32_t to, Row from, const void* any) {
    ptx::cp_async<16>(to, from ? from : any, from ? 16 : 0);
  }
  // A half's columns of all rows: a warp copies a row at a time.
  FMHA_DEVICE void copy_half(const LatentTile& to, int half, Row own, const void* any) const {
    using Tile = LatentTile::Half;
#pragma unroll 4
    for (int32_t r = 0; r < kRowsOfWarp; ++r) {
      const Row from = row_of(own, r);
      const int32_t column = 8 * lane;
      copy_word(to.half[half].address() + fmha::mma::word_offset<Tile>(warp + 4 * r, column),
                from ? from + half * kHalf + column : nullptr, any);
    }
  }
  // The last columns: a warp copies four rows at a time.
  FMHA_DEVICE void copy_tail(const LatentTile& to, Row own, const void* any) const {
    using Tile = LatentTile::Tail;
#pragma unroll
    for (int32_t r = 0; r < kRowsOfWarp; r += 4) {
      const Row from = row_of(own, r + lane / 8);
      const int32_t column = lane % 8 * 8;
      copy_word(to.tail.address() + fmha::mma::word_offset<Tile>(warp + 4 * (r + lane / 8), column),
                from ? from + kDimV + column : nullptr, any);
    }
  }

  FMHA_DEVICE void load_q() {
    const Row own = query_row();
    copy_half(smem.q, 0, own, p.q.data);
    copy_half(smem.q, 1, own, p.q.data);
    copy_tail(smem.q, own, p.q.data);
    copier.finish(smem.q_full);
  }

  FMHA_DEVICE void copy_part(int32_t slot, int half, int32_t first_key) {
    const Row own = key_row(first_key);
    copy_half(smem.k[slot], half, own, p.k.data);
    if (half == half_with_tail(slot)) copy_tail(smem.k[slot], own, p.k.data);
    copier.finish(smem.k_full[slot][half]);
  }

  // The boxes of a part, dealt out to the lanes of one warp.
  FMHA_DEVICE void bring_part(int32_t slot, int half, int32_t first_key) {
    using Half = LatentTile::Half;
    using Tail = LatentTile::Tail;
    Barrier& full = smem.k_full[slot][half];
    if (warp > 0) return ptx::mbarrier_arrive_if(full, true);
    const bool with_tail = half == half_with_tail(slot);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(full, Half::tile_bytes + (with_tail ? Tail::tile_bytes : 0));
    } else {
      ptx::mbarrier_arrive_if(full, true);
    }
    __syncwarp();
    constexpr int box_rows = tile.box_rows > 0 ? tile.box_rows : kKeys, boxes = kKeys / box_rows;
    const LatentTile& to = smem.k[slot];
    for (int32_t at = lane; at < (Half::num_chunks + with_tail) * boxes; at += 32) {
      const int32_t chunk = at / boxes, row = at % boxes * box_rows;
      const bool is_tail = chunk == Half::num_chunks;
      const uint32_t chunk_address = is_tail ? to.tail.address() : to.half[half].address() + chunk * Half::chunk_bytes;
      const int32_t column = is_tail ? kDimV : half * kHalf + chunk * Half::span;
      const KvRow key = kv_row(p, spec.kv_layout, work.span, first_key + row);
      const int32_t batch = spec.kv_layout == KvKind::Packed ? 0 : key.batch;
      ptx::cp_async_bulk_tensor_4d(chunk_address + row * Half::span_bytes, map, full, column, key.row, work.i_head_kv, batch,
                                   hint);
    }
    __syncwarp();
  }

  FMHA_DEVICE void run() {
    load_q();
#pragma unroll 1
    for (int32_t i = 0; i < work.num_blocks; ++i) {
      const int32_t slot = i % 2, first_key = (work.last_block - i) * kKeys;
      const uint32_t phase = i / 2 % 2;
      // What follows the last key that some row sees is to be zeros.
      const bool copies = tile.box_rows == 0 || first_key + kKeys > work.end;
#pragma unroll 1
      for (int32_t half = 0; half < 2; ++half) {
        copier.wait(smem.k_empty[slot][half], phase ^ 1);
        if (copies) {
          copy_part(slot, half, first_key);
        } else {
          // What was copied before is needed first.
          copier.flush();
          bring_part(slot, half, first_key);
        }
      }
    }
    copier.flush();
  }
};

}  // namespace fmha::mla
