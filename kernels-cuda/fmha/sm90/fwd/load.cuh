// The load role: one thread issues TMA loads; with pages all lanes of its warp do; where TMA cannot load, three warps
// copy.
#pragma once
#include <fmha/ptx/barrier.cuh>
#include <fmha/common/arrivals.cuh>
#include <fmha/common/pages_of_block.cuh>
#include <fmha/common/scheduler.cuh>
#include <fmha/sm90/fwd/cache_role.cuh>
#include <fmha/sm90/fwd/load_bias.cuh>
#include <fmha/sm90/fwd/prepare_values.cuh>
#include <fmha/sm90/fwd/value_role.cuh>
#include <fmha/sm90/fwd/zero_values.cuh>

namespace fmha::sm90 {

// The load role. `ArrivedKeys` waits for keys that other devices copy while the kernel runs, if there are any;
// `SeenKeys` says which keys queries see.
template <FwdSpec spec, Sm90Tile tile, class ArrivedKeys, class SeenKeys>
struct Loader {
  using Shared = Smem<spec, tile>;
  const FwdParams& p;
  const Maps& maps;
  const PreparedValues& values;
  Shared& smem;
  ArrivedKeys& arrived;
  const SeenKeys& seen;
  Slot<Shared::q_buffers> q_slot;
  Slot<tile.stages> k_slot, v_slot;
  Slot<max(tile.raw_stages, 1)> raw_slot;  // of a cache that is widened: both K's and V's
  Slot<kWorkSlots> work_slot;

  static constexpr bool copies = tile.copy_bytes > 0, paged = loads_pages(tile);
  // With pages a whole warp loads, and one lane waits at barriers and arrives for all.
  static constexpr bool by_warp = copies || paged;
  const bool leads = threadIdx.x % 32 == 0;
  // Pages of the newest K block, and of the one whose V comes next: V lies where K does. Without pages a block is one
  // box.
  using Pages = PagesOfBlock<tile.block_n, paged ? tile.page_keys : tile.block_n>;
  Pages k_pages, v_pages;
  Copier<copies ? tile.copy_bytes : 16, CopyThreads> copier;

  FMHA_DEVICE void wait(Barrier& barrier, uint32_t parity) {
    if constexpr (copies) {
      copier.wait(barrier, parity);
    } else {
      ptx::mbarrier_wait_parity(barrier, parity);
    }
  }

  FMHA_DEVICE void copy_q(const Work& work, int32_t first_row) {
    const uint16_t* data = static_cast<const uint16_t*>(p.q.data);
    copier.copy(smem.q[q_slot.index], spec.head_dim_qk, data, [&](int32_t row) -> const uint16_t* {
      const int32_t packed_row = first_row + row, i = query_of<tile>(p, packed_row);
      const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
      return i < work.seqlen_q ? data + row_offset(p.q, work.storage_batch, work.q_row + i, i_head) : nullptr;
    });
    copier.finish(smem.q_full[q_slot.index]);
  }

  FMHA_DEVICE void load_q(const Work& work, int32_t piece) {
    const int32_t first_row = work.first_row + piece * Shared::q_rows;
    using Tile = typename Shared::QTile;
    Barrier& full = smem.q_full[q_slot.index];
    wait(smem.q_empty[q_slot.index], q_slot.phase ^ 1);
    if constexpr (copies) {
      copy_q(work, first_row);
      q_slot.advance();
      return;
    }
    if (!paged || leads) {
      // A box has fewer rows than the tile where whole groups of heads do not fill it.
      constexpr int row_bytes = Tile::num_chunks * Tile::span_bytes;
      ptx::mbarrier_arrive_expect_tx(full, whole_groups<tile>() ? rows_of_tile<tile>(p) * row_bytes : Tile::tile_bytes);
      const int32_t head_in_group = work.i_head - work.i_head_kv * p.gqa_ratio;
#pragma unroll
      for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
        ptx::cp_async_bulk_tensor_5d(smem.q[q_slot.index].address() + chunk * Tile::chunk_bytes, maps.q, full,
                                     chunk * Tile::span, head_in_group,
                                     work.q_row + query_of<tile>(p, first_row), work.i_head_kv,
                                     work.storage_batch, ptx::CacheHint::EvictFirst);
      }
    }
    // Keeps the lanes together: a lane that is late at a barrier could otherwise miss the phase.
    if constexpr (paged) __syncwarp();
    q_slot.advance();
  }

  // First keys of a tile's blocks, kept in registers, so that a load is issued as soon as its slot is released.
  struct Keys {
    const SeenKeys& seen;
    int32_t i_batch, i_head_kv, storage_batch, k_row, seqlen_k, last_block, num_band_blocks, last_sink_block, first_dirty, part;

    FMHA_DEVICE Keys(const Work& work, const SeenKeys& seen)
        : seen(seen), i_batch(work.i_batch), i_head_kv(work.i_head_kv), storage_batch(work.storage_batch), k_row(work.k_row),
          seqlen_k(work.seqlen_k), last_block(work.last_block), num_band_blocks(work.num_band_blocks), last_sink_block(work.last_sink_block),
          first_dirty(work.first_dirty), part(work.part) {}

    FMHA_DEVICE int32_t block(int32_t i) const {
      if constexpr (SeenKeys::has_tile_list) return seen.entry(part, num_band_blocks, i);
      return spec.sink_columns && i >= num_band_blocks ? last_sink_block - (i - num_band_blocks) : last_block - i;
    }
    // Where key j lies in memory, for a copy of its row.
    FMHA_DEVICE KvRow place(const FwdParams& p, int32_t j) const {
      return kv_row(p, spec.kv_layout, {i_batch, i_batch, 0, 0, k_row, seqlen_k}, j);
    }
    FMHA_DEVICE int32_t row(int32_t i) const {
      const int32_t block = this->block(i);
      // A tile without keys has block -1: rows before the tensor, where TMA reads zeros.
      return block < 0 ? -tile.block_n : k_row + block * tile.block_n;
    }
  };

  // Loads a block. `columns`: the keys of a row are contiguous, as in [dim, keys].
  template <bool columns, class Tile, class Ring>
  FMHA_DEVICE void load_block(const Tile& to, const TensorMap& map, Barrier& full, Barrier& empty, Ring& slot,
                              const Keys& keys, int32_t i) {
    const int32_t row = keys.row(i);
    load_box(to, map, full, empty, slot, {columns ? row : 0, columns ? 0 : row, keys.i_head_kv, keys.storage_batch});
  }
  // Barrier of a slot in the form in which the TMA boxes of pages arrive at it.
  struct Full {
    Barrier& barrier;
    FMHA_DEVICE void load(uint32_t to, const TensorMap& map, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                          ptx::CacheHint hint) const {
      ptx::cp_async_bulk_tensor_4d(to, map, barrier, c0, c1, c2, c3, hint);
    }
  };
  // Loads a block that lies in pages. All lanes of the warp call it.
  template <class Tile, class Ring>
  FMHA_DEVICE void load_pages(const Tile& to, const TensorMap& map, Barrier& full, Barrier& empty, Ring& slot,
                              const Keys& keys, const Pages& pages) {
    wait(empty, slot.phase ^ 1);
    if (leads) ptx::mbarrier_arrive_expect_tx(full, Tile::tile_bytes);
    __syncwarp();
    pages.load(to, map, Full{full}, keys.i_head_kv);
    slot.advance();
  }
  // Loads a block that the workspace holds in the tile's own layout. A tile without keys has block -1, where TMA reads
  // zeros.
  FMHA_DEVICE void load_prepared(const Keys& keys, int32_t i) {
    const int32_t block = keys.block(i), head = keys.i_batch * p.num_heads_kv + keys.i_head_kv;
    if constexpr (tile.prepare_v == PrepareV::Beside) wait_until_prepared<spec, tile>(values, head, block);
    load_box(smem.v[v_slot.index], maps.v, smem.v_full[v_slot.index], smem.v_empty[v_slot.index], v_slot, {0, 0, block, head});
  }

  // Coordinates of a block's start in its tensor map.
  struct Place {
    int32_t c0, c1, c2, c3;
  };
  template <class Tile, class Ring>
  FMHA_DEVICE void load_box(const Tile& whole, const TensorMap& map, Barrier& full, Barrier& empty, Ring& slot,
                            const Place& at) {
    wait(empty, slot.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, Tile::tile_bytes);
    // The CTAs of a cluster divide a block's rows: each loads its share for all of them.
    constexpr int share = Tile::rows / tile.cluster;
    const int32_t first = cluster_rank<tile>() * share;
#pragma unroll
    for (int chunk = 0; chunk < Tile::num_chunks; ++chunk) {
      const uint32_t to = whole.address() + chunk * Tile::chunk_bytes + first * Tile::span_bytes;
      const int32_t c0 = at.c0 + chunk * Tile::span, c1 = at.c1 + first;
      if constexpr (tile.cluster > 1) {
        ptx::cp_async_bulk_tensor_4d_multicast(to, map, full, c0, c1, at.c2, at.c3, (1 << tile.cluster) - 1,
                                               ptx::CacheHint::EvictLast);
      } else {
        ptx::cp_async_bulk_tensor_4d(to, map, full, c0, c1, at.c2, at.c3, ptx::CacheHint::EvictLast);
      }
    }
    slot.advance();
  }

  // Loads an 8-bit block of a cache to the ring from which it is widened.
  template <class Tile>
  FMHA_DEVICE void load_raw(const TensorMap& map, const Keys& keys, int32_t i, const Pages& pages) {
    const Tile& to = reinterpret_cast<const Tile&>(smem.cache[raw_slot.index]);
    Barrier &full = smem.v_raw[raw_slot.index], &empty = smem.v_raw_empty[raw_slot.index];
    if constexpr (paged) {
      load_pages(to, map, full, empty, raw_slot, keys, pages);
    } else {
      load_block<false>(to, map, full, empty, raw_slot, keys, i);
    }
  }

  template <class Tile>
  FMHA_DEVICE void copy_block(Tile (&tiles)[tile.stages], const View& view, int32_t dim, Barrier (&full)[tile.stages],
                              Barrier (&empty)[tile.stages], Slot<tile.stages>& slot, const Keys& keys, int32_t i) {
    wait(empty[slot.index], slot.phase ^ 1);
    const int32_t first_key = keys.block(i) * tile.block_n;
    // No zero role follows a copy: keys that no query sees are copied as zeros.
    const int32_t end = i == 0 ? min(keys.seqlen_k, first_key + keys.first_dirty) : keys.seqlen_k;
    const uint16_t* data = static_cast<const uint16_t*>(view.data);
    const uint16_t* head = data + row_offset(view, keys.storage_batch, keys.k_row, keys.i_head_kv);
    copier.copy(tiles[slot.index], dim, data, [&](int32_t row) -> const uint16_t* {
      const int32_t j = first_key + row;
      if (j < 0 || j >= end) return nullptr;
      if constexpr (spec.kv_layout == KvKind::Paged) return data + row_offset(view, keys.place(p, j), keys.i_head_kv);
      return head + j * view.row;
    });
    copier.finish(full[slot.index]);
    slot.advance();
  }

  FMHA_DEVICE void load_k(const Keys& keys, int32_t i) {
    if constexpr (copies) {
      copy_block(smem.k, p.k, spec.head_dim_qk, smem.k_full, smem.k_empty, k_slot, keys, i);
    } else if constexpr (paged) {
      // Reads the block table before the wait for the block's slot.
      v_pages = k_pages;
      k_pages = Pages::find(p, keys.i_batch, keys.block(i) * tile.block_n, keys.seqlen_k);
      if constexpr (widens_cache(spec, tile)) {
        load_raw<RawK<spec, tile>>(maps.k, keys, i, k_pages);
      } else {
        load_pages(smem.k[k_slot.index], maps.k, smem.k_full[k_slot.index], smem.k_empty[k_slot.index], k_slot, keys, k_pages);
      }
    } else if constexpr (widens_cache(spec, tile)) {
      load_raw<RawK<spec, tile>>(maps.k, keys, i, {});
    } else {
      arrived.wait(keys.row(i), tile.block_n);
      load_block<false>(smem.k[k_slot.index], maps.k, smem.k_full[k_slot.index], smem.k_empty[k_slot.index], k_slot, keys, i);
    }
  }
  // Loads a V block: that of the newest K block with `newest`, otherwise that of the K block before.
  FMHA_DEVICE void load_v(const Keys& keys, int32_t i, bool newest = false) {
    if constexpr (copies) {
      copy_block(smem.v, p.v, spec.head_dim_v, smem.v_full, smem.v_empty, v_slot, keys, i);
    } else if constexpr (takes_prepared_v(tile)) {
      load_prepared(keys, i);
    } else if constexpr (widens_cache(spec, tile)) {
      load_raw<RawV<spec, tile>>(maps.v, keys, i, newest ? k_pages : v_pages);
    } else if constexpr (paged) {
      const bool raw = i == 0 && keys.first_dirty < tile.block_n;
      const Pages pages = newest ? k_pages : v_pages;
      if constexpr (Shared::prepared) {
        load_pages(smem.raw[v_slot.index], maps.v, smem.v_raw[v_slot.index], smem.v_raw_empty[v_slot.index], v_slot, keys, pages);
      } else {
        load_pages(smem.v[v_slot.index], maps.v, raw ? smem.v_raw[v_slot.index] : smem.v_full[v_slot.index],
                   smem.v_empty[v_slot.index], v_slot, keys, pages);
      }
    } else if constexpr (Shared::prepared) {
      load_block<spec.v_layout == VLayout::ColMajor>(smem.raw[v_slot.index], maps.v, smem.v_raw[v_slot.index],
                                                            smem.v_raw_empty[v_slot.index], v_slot, keys, i);
    } else {
      const bool raw = i == 0 && keys.first_dirty < tile.block_n;
      Barrier& full = raw ? smem.v_raw[v_slot.index] : smem.v_full[v_slot.index];
      load_block<Shared::v_columns>(smem.v[v_slot.index], maps.v, full, smem.v_empty[v_slot.index], v_slot, keys, i);
    }
  }

  FMHA_DEVICE void ask() const {
    if (threadIdx.x >= 32) return;
    if constexpr (by_warp) __syncwarp();  // one lane's arrival counts for its warp, and must come after the others
    ptx::barrier_arrive<kWorkWanted, 64>();
  }

  // Waits until the next tile is planned, and loads its Q (the first piece) and first K. Returns its number of blocks.
  FMHA_DEVICE int32_t begin_tile() {
    wait(smem.work_full[work_slot.index], work_slot.phase);
    const Work& work = smem.work[work_slot.index];
    if (work.num_blocks > 0) {
      // Without lookahead Q has a single slot, which becomes free last, so K is loaded first.
      if constexpr (!looks_ahead(tile)) load_k(Keys(work, seen), 0);
      load_q(work, 0);
      if constexpr (looks_ahead(tile)) load_k(Keys(work, seen), 0);
    }
    return work.num_blocks;
  }
  // Q's other pieces take the places that the last tile's warpgroups release one by one, some only once that tile's
  // last V is there.
  FMHA_DEVICE void load_other_pieces() {
#pragma unroll 1
    for (int32_t piece = 1; piece < Shared::q_pieces; ++piece) load_q(smem.work[work_slot.index], piece);
  }

  FMHA_DEVICE void run() {
    ask();
    int32_t num_blocks = begin_tile();
    while (num_blocks > 0) {
      load_other_pieces();
      const Keys keys(smem.work[work_slot.index], seen);
      if constexpr (by_warp) __syncwarp();
      ptx::mbarrier_arrive_if(smem.work_empty[work_slot.index], threadIdx.x % 32 == 0);
      work_slot.advance();
      // The next tile is taken some blocks before the end: earlier, this CTA would hold a tile that an idle one could
      // take; later, the time to resolve it would show.
      const int32_t ask_at = max(num_blocks - 3, 0);
#pragma unroll 1
      for (int32_t i = 0; i < num_blocks - 1; ++i) {
        if (i == ask_at) ask();
        load_k(keys, i + 1);
        load_v(keys, i);
      }
      if (num_blocks == 1) ask();
      // K runs one block ahead of V, across the tile's end too, unless there is one Q buffer: that is free only
      // after the tile's last scores.
      const int32_t last = num_blocks - 1;
      if constexpr (looks_ahead(tile)) {
        num_blocks = begin_tile();
        // If no tile follows, the newest K block is still this tile's last.
        load_v(keys, last, num_blocks == 0);
      } else {
        load_v(keys, last, true);
        num_blocks = begin_tile();
      }
    }
    if constexpr (copies) copier.flush();
  }
};

template <FwdSpec spec, Sm90Tile tile, class ArrivedKeys, class SeenKeys>
FMHA_DEVICE void load(const FwdParams& p, const Maps& maps, const TileSchedule& schedule, const PreparedValues& values,
                      ArrivedKeys arrived, const SeenKeys& seen, Smem<spec, tile>& smem) {
  ptx::setmaxnreg_dec<regs(tile).load>();
  if (threadIdx.x == 0 || (loads_pages(tile) && threadIdx.x < 32) || (tile.copy_bytes > 0 && threadIdx.x / 32 != 1)) {
    Loader<spec, tile, ArrivedKeys, SeenKeys> loader{p, maps, values, smem, arrived, seen};
    loader.run();
  } else if (in_shares<tile>() ? threadIdx.x / 32 == 1 : threadIdx.x == 32) {
    if constexpr (in_shares<tile>()) schedule_shares<spec, tile>(p, schedule, smem);
    else schedule_tiles<spec, tile>(p, schedule, smem, seen);
  } else if (tile.prepare_v == PrepareV::Beside && threadIdx.x / 32 >= 4 - kValueWarps) {
    if constexpr (tile.prepare_v == PrepareV::Beside) prepare_beside<spec, tile>(p, values);
  } else if constexpr (widens_cache(spec, tile)) {
    if (threadIdx.x / 32 >= 4 - kValueWarps) {
      CacheRole<spec, tile> cache{p, smem};
      cache.run();
    }
  } else if constexpr (prepares_v(spec, tile)) {
    if (threadIdx.x / 32 >= 4 - kValueWarps) {
      ValueRole<spec, tile> values{smem};
      values.run();
    }
  } else if (tile.copy_bytes == 0 && !takes_prepared_v(tile) && threadIdx.x / 32 == 2) {
    ZeroRole<spec, tile> zero{smem};
    zero.run();
  } else if constexpr (tile.bias_stages > 0) {
    if (threadIdx.x == 96) {
      BiasRole<spec, tile> bias{p, maps.bias, smem};
      bias.run();
    }
  } else if constexpr (tile.cluster > 1) {
    ptx::exit_thread();  // else the role's idle lanes would wait at the cluster's barrier before its only lane arrives
  }
}

}  // namespace fmha::sm90
