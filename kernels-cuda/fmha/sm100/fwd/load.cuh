// The load role: one thread keeps TMA fed, of pages a warp's lanes do, or two warps copy themselves, in the
// order in which the issue role takes blocks.
//
//   Q, K(0) .. K(blocks ahead - 1), then V(i), K(i + blocks ahead) for each block, over the tile's end into the next
//
// `SeenKeys`: which keys queries see. With lists a tile's blocks are those that its list has.
#pragma once
#include <fmha/common/pages_of_block.cuh>
#include <fmha/common/scheduler.cuh>
#include <fmha/common/zero_rows.cuh>
#include <fmha/sm100/fwd/block_keys.cuh>
#include <fmha/sm100/fwd/issue.cuh>
#include <fmha/sm100/fwd/pair.cuh>
#include <fmha/sm100/fwd/transpose_pairs.cuh>

namespace fmha::sm100 {

// Named barrier of the copying warps: the rows of a block of V that they transpose have all come, or are all read.
constexpr int kRowsCopied = 6;

// Loads without scales; with them: scales.cuh.
struct NoScales {};
template <FwdSpec spec, Sm100Tile tile, class SeenKeys>
struct ScaleReader;
template <FwdSpec spec, Sm100Tile tile, class SeenKeys, int blocks_ahead>
struct ScaleRole;

// The load role. `Scales`: scales of Q, K and V in memory, or `NoScales`.
template <FwdSpec spec, Sm100Tile tile, class SeenKeys, class Scales = NoScales>
struct Loader {
  using Shared = Smem<spec, tile>;
  static constexpr int q_tiles = Shared::q_tiles, blocks_ahead = Issuer<spec, tile, SeenKeys>::blocks_ahead;

  using Keys = BlockKeys<spec, tile, SeenKeys>;

  const FwdParams& p;
  const Maps& maps;
  Shared& smem;
  const SeenKeys& seen;
  const Scales& scales;
  const bool asks;  // the warp that asks the scheduler
  Slot<tile.stages> ring;
  Slot<kWorkSlots> k_work, v_work;
  Keys k = {}, v = {};
  uint32_t q_phase = 1, zero_phase = 1;
  int32_t ask_at = 0;
  bool more = true;

  static constexpr bool copies = tile.copy_bytes > 0, paged = loads_pages(tile);
  static constexpr int elems_of_byte = has_pairs(tile) ? 2 : 1;  // of those that tiles have as one
  // Without pages one TMA box holds a block.
  using Pages = PagesOfBlock<tile.block_n, loads_pages(tile) ? tile.page_keys : tile.block_n>;
  // With pages a whole warp loads, of which one lane waits for the others and arrives.
  const bool leads = threadIdx.x % 32 == 0;
  Copier<copies ? tile.copy_bytes : 16, CopyThreads<tile>> copier;

  FMHA_DEVICE void wait(Barrier& barrier, uint32_t parity) {
    if constexpr (copies) {
      copier.wait(barrier, parity);
    } else {
      ptx::mbarrier_wait_parity(barrier, parity);
    }
  }
  FMHA_DEVICE void ask() const {
    if (!asks) return;
    if constexpr (copies || paged) __syncwarp();  // a lane arrives for its warp, but not before the others
    ptx::barrier_arrive<kWorkWanted, 64>();
  }

  using Reader = ScaleReader<spec, tile, SeenKeys>;
  // Copies scales to a tile in shared memory; `line_of(tile, l)` returns line l.
  template <int tiles, class Slots, class LineOf>
  FMHA_DEVICE void copy_scales(const Slots& to, LineOf line_of) const {
#pragma unroll 1
    for (int32_t at = CopyThreads<tile>::rank(); at < tiles * 32; at += CopyThreads<tile>::count)
      line_of(at / 32, at % 32).store(to[at / 32], at % 32);
  }
  FMHA_DEVICE Reader reader() const { return {p, scales.of, seen}; }

  FMHA_DEVICE void copy_q(const Work& work, int q) {
    using Elem = typename Shared::QTile::Elem;
    const Elem* data = static_cast<const Elem*>(p.q.data);
    copier.copy(smem.q[q], spec.head_dim_qk / elems_of_byte, data, [&](int32_t row) -> const Elem* {
      const int32_t packed_row = first_row_of<tile>(work, q) + row, i = query_of<tile>(p, packed_row);
      const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
      return i < work.seqlen_q ? data + query_offset(p, span_of(work), i, i_head) : nullptr;
    });
    if constexpr (is_scaled(tile)) {
      copy_scales<ScaleTiles<spec, tile>::qk>(
          smem.q_scales[q], [&](int32_t word, int32_t l) { return reader().of_queries(work, q, word, l); });
    }
    copier.finish(smem.q_full[q]);
  }
  // Copies a block. `columns`: the keys of a row are contiguous, as in [dim, keys].
  template <bool columns, bool values, class Tile>
  FMHA_DEVICE void copy_block(const Tile& to, const View& view, int32_t dim, Barrier& full, const Keys& keys) {
    using Elem = typename Tile::Elem;
    wait(smem.kv_empty[ring.index], ring.phase ^ 1);
    const int32_t first_key = keys.block(seen) * tile.block_n;
    // Keys that no query sees are copied as zeros.
    const int32_t end = keys.next == 0 ? min(keys.seqlen_k, first_key + keys.first_dirty) : keys.seqlen_k;
    const Elem* data = static_cast<const Elem*>(view.data);
    const Elem* head = data + row_offset(view, keys.batch(), keys.k_row, keys.i_head_kv);
    if constexpr (columns && spec.kv_layout == KvKind::Paged) {
      // A word's keys may lie in several pages.
      copier.gather(to, [&](int32_t d, int32_t column) -> const Elem* {
        const int32_t j = first_key + column * elems_of_byte;
        if (d >= dim || j < 0 || j >= end) return nullptr;
        KvRow place = keys.place(p, j);
        place.row /= elems_of_byte;  // pages hold whole pairs
        return data + row_offset(view, place, keys.i_head_kv) + d * view.dim;
      });
    } else if constexpr (columns) {
      const int32_t there = first_key < 0 ? 0 : ceil_div(max(end - first_key, 0), elems_of_byte);
      copier.copy(to, there, data, [&](int32_t d) -> const Elem* {
        return d < dim ? head + d * view.dim + first_key / elems_of_byte : nullptr;
      });
    } else {
      copier.copy(to, dim, data, [&](int32_t row) -> const Elem* {
        const int32_t j = first_key + row;
        if (j < 0 || j >= end) return nullptr;
        if constexpr (spec.kv_layout == KvKind::Paged) return data + row_offset(view, keys.place(p, j), keys.i_head_kv);
        else return head + j * view.row;
      });
    }
    if constexpr (values && transposes_v(spec, tile)) {
      copier.land();
      const auto sync = [] { ptx::barrier_sync<kRowsCopied, CopyThreads<tile>::count>(); };
      sync();
      transpose_pairs<spec, tile, CopyThreads<tile>::count>(smem.kv[ring.index], CopyThreads<tile>::rank(), sync);
    }
    if constexpr (is_scaled(tile)) {
      constexpr int tiles = values ? ScaleTiles<spec, tile>::v : ScaleTiles<spec, tile>::qk;
      copy_scales<tiles>(smem.kv_scales[ring.index], [&](int32_t at, int32_t l) {
        return values ? reader().of_values(keys, at, l) : reader().of_keys(keys, at, l);
      });
    }
    copier.finish(full);
    ring.advance();
  }

  FMHA_DEVICE void load_q(const Work& work) {
    using Tile = typename Shared::QTile;
    const int32_t head_in_group = work.i_head - work.i_head_kv * p.gqa_ratio;
#pragma unroll
    for (int q = 0; q < q_tiles; ++q) {
      wait(smem.q_empty[q], q_phase);
      if constexpr (copies) {
        copy_q(work, q);
        continue;
      }
      if (paged && !leads) continue;
      const LoadBarrier<tile, true> full(smem.q_full[q]);
      // A box has fewer rows than the tile where whole groups of heads do not fill it.
      constexpr int row_bytes = Tile::num_chunks * Tile::span_bytes;
      full.arrive_expect_tx(whole_groups<tile>() ? rows_of_tile<tile>(p) * row_bytes : Tile::tile_bytes);
      // Queries whose axes are exchanged have a batch axis, also where they are packed (query_offset).
      const bool in_place = spec.q_layout == QLayout::Packed && p.q.batch == 0;
      const int32_t row = (in_place ? work.q_row : 0) + query_of<tile>(p, first_row_of<tile>(work, q));
#pragma unroll
      for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
        full.load(smem.q[q].address() + chunk * Tile::chunk_bytes, maps.q, chunk * Tile::span, head_in_group, row,
                  work.i_head_kv, in_place ? 0 : work.i_batch, ptx::CacheHint::EvictFirst);
      }
    }
    q_phase ^= 1;
  }

  // Loads a block of K or V whose first key is `row` and whose first element of each row is `dim`. `columns`: the keys
  // of a row are contiguous, as in [dim, keys].
  template <bool columns, class Tile, class Full>
  FMHA_DEVICE void load_block(const Tile& to, const TensorMap& map, const Full& full, const Keys& keys, int32_t row,
                              int32_t dim, const Pages& pages) {
    if (!paged || leads) full.arrive_expect_tx(Tile::tile_bytes);
    if constexpr (paged) {
      static_assert(!columns && !is_pair(tile), "sm100: rows in pages, of a CTA by itself");
      __syncwarp();
      pages.load(to, map, full, keys.i_head_kv);
    } else {
#pragma unroll
      for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
        full.load(to.address() + chunk * Tile::chunk_bytes, map, chunk * Tile::span + (columns ? row : dim),
                  columns ? dim : row, keys.i_head_kv, keys.batch(), ptx::CacheHint::EvictLast);
      }
    }
    ring.advance();
  }
  // The pages of a block, if keys lie in pages. The block table is read before the wait for the block's slot.
  FMHA_DEVICE Pages pages_of(const Keys& keys) const {
    if constexpr (paged) return Pages::find(p, keys.i_batch, keys.block(seen) * tile.block_n, keys.seqlen_k);
    else return {};
  }
  // Which half of a block this CTA of a pair loads.
  FMHA_DEVICE static int32_t half() { return is_pair(tile) ? cluster_rank<tile>() : 0; }

  // Begins the tile whose K is loaded next, and loads its Q.
  FMHA_DEVICE void begin_k() {
    ptx::mbarrier_wait_parity(smem.work_full[k_work.index], k_work.phase);
    const Work& work = smem.work[k_work.index];
    k.begin(work);
    k_work.advance();
    more = k.end > 0;
    if (!more) return;
    // The next tile is taken some blocks before this one's end. If it were taken earlier, this CTA would hold a tile
    // that an idle CTA could take; if later, the time to plan it would show.
    ask_at = max(k.end - 3, 1);
    load_q(work);
  }
  FMHA_DEVICE void load_k() {
    if (k.next == k.end && more) begin_k();
    if (!more) return;
    if constexpr (copies) {
      copy_block<false, false>(smem.kv[ring.index].k(), p.k, spec.head_dim_qk / elems_of_byte, smem.kv_full[ring.index], k);
    } else {
      const Pages pages = pages_of(k);
      ptx::mbarrier_wait_parity(smem.kv_empty[ring.index], ring.phase ^ 1);
      load_block<false>(smem.kv[ring.index].k(), maps.k, LoadBarrier<tile, true>(smem.kv_full[ring.index]), k,
                        k.row(seen) + half() * Shared::own_keys, 0, pages);
    }
    if (++k.next == ask_at) ask();
  }
  FMHA_DEVICE bool begin_v() {
    ptx::mbarrier_wait_parity(smem.work_full[v_work.index], v_work.phase);
    v.begin(smem.work[v_work.index]);
    if constexpr (copies || paged) __syncwarp();
    ptx::mbarrier_arrive_if(smem.work_empty[v_work.index], threadIdx.x % 32 == 0);
    v_work.advance();
    return v.end > 0;
  }
  FMHA_DEVICE void load_v() {
    const int32_t slot = ring.index;
    if constexpr (copies) {
      if constexpr (transposes_v(spec, tile)) {
        copy_block<false, true>(smem.kv[slot].v_rows(), p.v, ceil_div(spec.head_dim_v, 2), smem.kv_full[slot], v);
      } else {
        copy_block<Shared::v_columns, true>(smem.kv[slot].v(), p.v, spec.head_dim_v, smem.kv_full[slot], v);
      }
    } else if constexpr (transposes_v(spec, tile)) {
      const Pages pages = pages_of(v);
      ptx::mbarrier_wait_parity(smem.kv_empty[slot], ring.phase ^ 1);
      load_block<false>(smem.kv[slot].v_rows(), maps.v, LoadBarrier<tile, false>(smem.kv_raw[slot]), v, v.row(seen), 0,
                        pages);
    } else {
      // Elements of E2M1 have no NaN and no infinity, so none of V's rows need zeros.
      const bool raw = !has_pairs(tile) && v.next == 0 && v.first_dirty < tile.block_n;
      const int32_t row = v.row(seen) / elems_of_byte, dim = half() * Shared::own_dim_v;
      const Pages pages = pages_of(v);
      ptx::mbarrier_wait_parity(smem.kv_empty[slot], ring.phase ^ 1);
      if (raw) {
        load_block<Shared::v_columns>(smem.kv[slot].v(), maps.v, LoadBarrier<tile, false>(smem.kv_raw[slot]), v, row, dim,
                                      pages);
        tell_zero_role(slot, v.first_dirty);
      } else {
        load_block<Shared::v_columns>(smem.kv[slot].v(), maps.v, LoadBarrier<tile, true>(smem.kv_full[slot]), v, row, dim,
                                      pages);
      }
    }
    ++v.next;
  }
  FMHA_DEVICE void tell_zero_role(int32_t slot, int32_t first_row) {
    // The role that gathers scales visits the tile's blocks itself, so nothing is to be told to it.
    if constexpr (has_scale_role(tile)) return;
    ptx::mbarrier_wait_parity(smem.zero_empty, zero_phase);
    zero_phase ^= 1;
    // Keeps the lanes together: a lane that is late at a barrier could otherwise miss the phase.
    if constexpr (paged) __syncwarp();
    if (paged && !leads) return;
    smem.zero.slot = slot;
    smem.zero.first_row = first_row;
    ptx::mbarrier_arrive_if(smem.zero_full, true);
  }

  FMHA_DEVICE void run() {
    if (!copies && (!paged || leads)) {
      ptx::prefetch_tensormap(maps.q);
      ptx::prefetch_tensormap(maps.k);
      ptx::prefetch_tensormap(maps.v);
    }
    ask();
#pragma unroll 1
    for (int i = 0; i < blocks_ahead; ++i) load_k();
    while (begin_v()) {
#pragma unroll 1
      while (v.next < v.end) {
        load_v();
        load_k();
      }
    }
    if constexpr (copies) {
      copier.flush();
    } else {
      tell_zero_role(-1, 0);
    }
  }
};

// The zero role: V rows that are not the sequence's (padding, another sequence) may hold anything, NaN included, and
// NaN times their P of 0 would be NaN in O. Only a tile's first block has such rows; this warp zeroes them before it
// announces the block.
template <FwdSpec spec, Sm100Tile tile>
FMHA_DEVICE void zero_values(Smem<spec, tile>& smem) {
  using Shared = Smem<spec, tile>;
  const int32_t lane = threadIdx.x % 32;
  uint32_t phase = 0, raw_phases = 0;  // of kv_raw a bit a slot: only where rows are to be zeroed is there a phase
  while (true) {
    ptx::mbarrier_wait_parity(smem.zero_full, phase);
    phase ^= 1;
    const int32_t slot = ptx::uniform(smem.zero.slot), first_row = smem.zero.first_row;
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.zero_empty, lane == 0);
    if (slot < 0) return;
    ptx::mbarrier_wait_parity(smem.kv_raw[slot], raw_phases >> slot & 1);
    raw_phases ^= 1u << slot;
    if constexpr (Shared::v_columns) {
      zero_columns(smem.kv[slot].v(), first_row, lane, 32);
    } else {
      zero_rows(smem.kv[slot].v(), first_row, lane, 32);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    arrive_release_at_leader_if<tile>(smem.kv_full[slot], lane == 0);
  }
}

}  // namespace fmha::sm100
