// Attention forward on mma.sync, for every NVIDIA GPU from sm_80 on.
//
// The schedule is that of FlashAttention-2 (Dao, 2023): a CTA has a tile of queries, its warps 16 or 32 rows each,
// and all warps load K and V by cp.async beside computing. K and V have rings of `stages` blocks; with s stages, of
// block i:
//
//   waits for             issues         computes
//   K(i), all warps here  V(i + s - 1)   S = Q K(i)^T, softmax
//   V(i), all warps here  K(i + s)       O += P V(i)
//
// Each barrier says two things: what every thread has copied is there, and the slot that is loaded next has been read
// by all. Every issue is one group, an empty one at the tile's end, so that waits count the same throughout.
//
// The grid is a CTA a tile, longest tiles first, of which an SM holds several: one's products run under another's
// loads and exponentials. In shares (common/shares.cuh) it is as many CTAs as there is room for, and each walks
// pieces of tiles.
#pragma once
#include <fmha/common/shares.cuh>
#include <fmha/ptx/grid.cuh>
#include <fmha/sm80/fwd/epilogue.cuh>
#include <fmha/sm80/fwd/load.cuh>

namespace fmha::sm80 {

// Fewest keys of a part for which loads of K and V alternate.
constexpr int32_t kLongPart = 1024;

// Walks the tile's blocks of keys with each load written once: the loop's first passes only load. A kernel for short
// queries runs few blocks, so the time to fetch its code counts, and the code is short. A slot is loaded again as soon
// as its product is computed, so that loads fill all slots but one. In a long part K and V are loaded one after the
// other: memory is busy then, and faster with one stream a CTA. `unit`: the descales of an unconverted K and V are 1.
template <bool unit, FwdSpec spec, Sm80Tile tile, class Keys>
FMHA_DEVICE void walk_in_little_code(const Loader<spec, tile, Keys>& loader, Consumer<spec, tile, Keys>& consumer,
                                     const Work& work) {
  auto& blocks = loader.smem;
  constexpr int stages = tile.stages;
  constexpr bool takes_turns = stages == 1 && tile.shares == 0 && tile.split_keys >= kLongPart && !reads_raw_blocks(spec, tile);
  constexpr int under_way = takes_turns ? 0 : 2 * stages - 1;
  loader.load_q();
  consumer.begin();
  typename Loader<spec, tile, Keys>::KeyRows of_v = {};
#pragma unroll 1
  for (int32_t i = -stages; i < work.num_blocks; ++i) {
    const int32_t block = i < 0 ? -1 : loader.block_of(i), loaded = i + stages;
    const bool computes = !consumer.is_hidden(block);
    const auto keys = loader.look_up(loaded);
    if (i >= 0) {
      ptx::cp_async_wait_group<under_way>();
      __syncthreads();
      if constexpr (takes_turns) {
        loader.load_v(i, of_v);
        ptx::cp_async_commit_group();
      }
      if (computes) {
        if constexpr (reads_raw_blocks(spec, tile)) consumer.template score<unit>(blocks.raw_k[i % stages], block);
        else consumer.score(blocks.k[i % stages], block);
      }
      if constexpr (takes_turns) ptx::cp_async_wait_group<0>();
      __syncthreads();
    }
    if (loaded < work.num_blocks) loader.load_k(loaded, keys);
    ptx::cp_async_commit_group();
    if (i >= 0) {
      if constexpr (!takes_turns) {
        ptx::cp_async_wait_group<under_way>();
        __syncthreads();
      }
      if (computes) {
        if constexpr (reads_raw_blocks(spec, tile)) consumer.template accumulate<unit>(blocks.raw_v[i % stages]);
        else consumer.accumulate(blocks.v[i % stages]);
      }
      if constexpr (!takes_turns) __syncthreads();
    }
    if constexpr (takes_turns) {
      of_v = keys;
    } else {
      if (loaded < work.num_blocks) loader.load_v(loaded, keys);
      ptx::cp_async_commit_group();
    }
  }
}

// Processes the tile's blocks of keys one after another.
template <FwdSpec spec, Sm80Tile tile, class Keys>
FMHA_DEVICE void walk(const Loader<spec, tile, Keys>& loader, Consumer<spec, tile, Keys>& consumer, const Work& work) {
  if constexpr (tile.stages == 1 && Loader<spec, tile, Keys>::has_few_warps) return walk_in_little_code<true>(loader, consumer, work);
  auto& blocks = loader.smem;
  // Copies are committed in groups: Q with K(0), V(0), K(1), V(1), ... This many groups may be unfinished after a wait.
  constexpr int under_way = 2 * (tile.stages - 1);
  loader.load_q();
  typename Loader<spec, tile, Keys>::KeyRows keys = {};
#pragma unroll
  for (int i = 0; i < tile.stages; ++i) {
    keys = loader.look_up(i);
    if (i < work.num_blocks) loader.load_k(i, keys);
    ptx::cp_async_commit_group();
    if (i + 1 == tile.stages) break;
    if (i < work.num_blocks) loader.load_v(i, keys);
    ptx::cp_async_commit_group();
  }
  consumer.begin();
#pragma unroll 1
  for (int32_t i = 0; i < work.num_blocks; ++i) {
    const int32_t block = loader.block_of(i);
    const bool computes = !consumer.is_hidden(block);
    const auto next = loader.look_up(i + tile.stages);
    ptx::cp_async_wait_group<under_way>();
    __syncthreads();
    if (i + tile.stages - 1 < work.num_blocks) loader.load_v(i + tile.stages - 1, keys);
    keys = next;
    ptx::cp_async_commit_group();
    if (computes) consumer.score(blocks.k[i % tile.stages], block);
    ptx::cp_async_wait_group<under_way>();
    __syncthreads();
    if (i + tile.stages < work.num_blocks) loader.load_k(i + tile.stages, keys);
    ptx::cp_async_commit_group();
    if (computes) consumer.accumulate(blocks.v[i % tile.stages]);
  }
}

// Loads Q, and the first blocks of an FP8 cache, one block a slot. K and V of a block are one group of copies each.
template <FwdSpec spec, Sm80Tile tile, class Keys>
FMHA_DEVICE void load_first_raw(const Loader<spec, tile, Keys>& loader, const Work& work) {
  loader.load_q();
#pragma unroll
  for (int i = 0; i < tile.stages; ++i) {
    const auto keys = loader.look_up(i);
    if (i < work.num_blocks) loader.load_k(i, keys);
    ptx::cp_async_commit_group();
    if (i < work.num_blocks) loader.load_v(i, keys);
    ptx::cp_async_commit_group();
  }
}

// Loop over an FP8 cache that the products read unconverted. A slot
// is free after its product. `unit`: the descales of K and V are 1.
template <bool unit, FwdSpec spec, Sm80Tile tile, class Keys>
FMHA_DEVICE void walk_raw(const Loader<spec, tile, Keys>& loader, Consumer<spec, tile, Keys>& consumer,
                          const Work& work) {
  if constexpr (tile.stages == 1) return walk_in_little_code<unit>(loader, consumer, work);
  auto& blocks = loader.smem;
  constexpr int under_way = 2 * tile.stages - 1;
  load_first_raw(loader, work);
  consumer.begin();
#pragma unroll 1
  for (int32_t i = 0; i < work.num_blocks; ++i) {
    const int32_t block = loader.block_of(i);
    const bool computes = !consumer.is_hidden(block);
    const auto keys = loader.look_up(i + tile.stages);
    ptx::cp_async_wait_group<under_way>();
    __syncthreads();
    if (computes) consumer.template score<unit>(blocks.raw_k[i % tile.stages], block);
    __syncthreads();
    if (i + tile.stages < work.num_blocks) loader.load_k(i + tile.stages, keys);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<under_way>();
    __syncthreads();
    if (computes) consumer.template accumulate<unit>(blocks.raw_v[i % tile.stages]);
    __syncthreads();
    if (i + tile.stages < work.num_blocks) loader.load_v(i + tile.stages, keys);
    ptx::cp_async_commit_group();
  }
}

// Walks an FP8 cache of which one block at a time is widened. A raw block's slot is free as soon as the block is
// widened, before the products that read it, so loads fill all slots but the current one. Steps of block i, each
// behind a barrier:
//
//   K(i) raw is there, the wide block is read   widen K(i)
//   K(i) wide is there, its slot is free        load K(i + s), S = Q K(i)^T, softmax
//   V(i) raw is there, the wide block is read   widen V(i)
//   V(i) wide is there, its slot is free        load V(i + s), O += P V(i)
template <FwdSpec spec, Sm80Tile tile, class Keys>
FMHA_DEVICE void walk_widening(const Loader<spec, tile, Keys>& loader, Consumer<spec, tile, Keys>& consumer,
                               const Work& work) {
  auto& blocks = loader.smem;
  constexpr int under_way = 2 * tile.stages - 1;
  load_first_raw(loader, work);
  const float descale_k = loader.descale_of(loader.p.descale_k), descale_v = loader.descale_of(loader.p.descale_v);
  consumer.begin();
#pragma unroll 1
  for (int32_t i = 0; i < work.num_blocks; ++i) {
    const int32_t block = loader.block_of(i);
    const bool computes = !consumer.is_hidden(block);
    const auto keys = loader.look_up(i + tile.stages);
    ptx::cp_async_wait_group<under_way>();
    __syncthreads();
    loader.widen_k(i, descale_k);
    __syncthreads();
    if (i + tile.stages < work.num_blocks) loader.load_k(i + tile.stages, keys);
    ptx::cp_async_commit_group();
    if (computes) consumer.score(blocks.wide.k, block);
    ptx::cp_async_wait_group<under_way>();
    __syncthreads();
    loader.widen_v(i, descale_v);
    __syncthreads();
    if (i + tile.stages < work.num_blocks) loader.load_v(i + tile.stages, keys);
    ptx::cp_async_commit_group();
    if (computes) consumer.accumulate(blocks.wide.v);
  }
}

// Loop over blocks that serve as K and V: each is loaded once, and its slot is
// free after both products. The other slots' loads are in flight meanwhile.
template <FwdSpec spec, Sm80Tile tile, class Keys>
FMHA_DEVICE void walk_sharing(const Loader<spec, tile, Keys>& loader, Consumer<spec, tile, Keys>& consumer,
                              const Work& work) {
  using VTile = typename Smem<spec, tile>::VTile;
  auto& blocks = loader.smem.k;
  loader.load_q();
#pragma unroll
  for (int i = 0; i < tile.stages; ++i) {
    const auto keys = loader.look_up(i);
    if (i < work.num_blocks) loader.load_k(i, keys);
    ptx::cp_async_commit_group();
  }
  consumer.begin();
#pragma unroll 1
  for (int32_t i = 0; i < work.num_blocks; ++i) {
    const int32_t block = loader.block_of(i);
    const bool computes = !consumer.is_hidden(block);
    const auto keys = loader.look_up(i + tile.stages);
    ptx::cp_async_wait_group<tile.stages - 1>();
    __syncthreads();
    if (computes) {
      consumer.score(blocks[i % tile.stages], block);
      consumer.accumulate(reinterpret_cast<const VTile&>(blocks[i % tile.stages]));
    }
    __syncthreads();
    if (i + tile.stages < work.num_blocks) loader.load_k(i + tile.stages, keys);
    ptx::cp_async_commit_group();
  }
}

// Walks blocks of rows of bytes, of which one at a time is widened, for K and V. A slot is free as soon as its block is
// widened, so loads fill all slots but the current one. Steps of block i, each behind a barrier:
//
//   its bytes are there, the wide block is read    widen
//   the wide block is there, its slot is free      load i + s, S = Q K^T, softmax, O += P V
template <FwdSpec spec, Sm80Tile tile, class Keys>
FMHA_DEVICE void walk_bytes(const Loader<spec, tile, Keys>& loader, Consumer<spec, tile, Keys>& consumer,
                            const Work& work) {
  using VTile = typename Smem<spec, tile>::VTile;
  auto& wide = loader.smem.wide.k;
  loader.load_q();
#pragma unroll
  for (int i = 0; i < tile.stages; ++i) {
    const auto keys = loader.look_up(i);
    if (i < work.num_blocks) loader.load_bytes(i, keys);
    ptx::cp_async_commit_group();
  }
  consumer.begin();
#pragma unroll 1
  for (int32_t i = 0; i < work.num_blocks; ++i) {
    const int32_t block = loader.block_of(i);
    const bool computes = !consumer.is_hidden(block);
    const auto keys = loader.look_up(i + tile.stages);
    ptx::cp_async_wait_group<tile.stages - 1>();
    __syncthreads();
    loader.widen_bytes(i);
    __syncthreads();
    if (i + tile.stages < work.num_blocks) loader.load_bytes(i + tile.stages, keys);
    ptx::cp_async_commit_group();
    if (computes) {
      consumer.score(wide, block);
      consumer.accumulate(reinterpret_cast<const VTile&>(wide));
    }
  }
}

// Computes O and LSE of a tile's rows over the keys of its work.
template <FwdSpec spec, Sm80Tile tile, class Keys>
FMHA_DEVICE void attend(const FwdParams& p, const Work& work, Smem<spec, tile>& smem, const Keys& keys) {
  const Loader<spec, tile, Keys> loader{p, work, smem, keys};
  Consumer<spec, tile, Keys> consumer{p, work, smem, keys};
  if constexpr (row_bytes_of<Keys>() > 0) {
    walk_bytes(loader, consumer, work);
  } else if constexpr (reads_raw_blocks(spec, tile)) {
    if (consumer.descale_k == 1.f && consumer.descale_v == 1.f) walk_raw<true>(loader, consumer, work);
    else walk_raw<false>(loader, consumer, work);
  } else if constexpr (widens_blocks(spec, tile)) {
    walk_widening(loader, consumer, work);
  } else if constexpr (shares_blocks(spec, tile)) {
    walk_sharing(loader, consumer, work);
  } else {
    walk(loader, consumer, work);
  }
  store(consumer);
}

template <FwdSpec spec, Sm80Tile tile, class Keys = EveryKey>
FMHA_DEVICE void fwd(const FwdParams& p, const TileSchedule& schedule, const Keys& keys = {}) {
  static_assert(spec.dtype_qk == spec.dtype_v || is_fp8(spec.dtype_qk), "sm80: Q, K and V share a type, or Q and K are FP8");
  static_assert(size_bytes(spec.dtype_qk) <= 2 && size_bytes(spec.dtype_v) <= 2, "sm80: mma.sync takes 8 and 16 bits");
  static_assert(!is_fp8(spec.dtype_v) || tile.block_n % mma::kDepth<uint8_t> == 0, "sm80: blocks are whole steps of P V");
  static_assert(!is_fp8(spec.dtype_v) || tile.value_parts == 1, "sm80: a warp has all of O's columns beside an FP8 V");
  static_assert(tile.row_bytes == row_bytes_of<Keys>(), "sm80: lists say where rows of bytes lie");
  static_assert(!spec.write_keep_mask, "sm80: it does not write the keep mask");
  static_assert(tile.block_m * tile.value_parts % (mma::kRows * tile.warps) == 0, "sm80: a warp has whole sixteens of rows");
  static_assert(tile.value_parts == 1 || spec.head_dim_v % (64 * tile.value_parts) == 0, "sm80: parts of O are whole spans");
  // Lets the merge's grid start: its CTAs wait until all CTAs of this grid have ended.
  if constexpr (tile.launches_merge) ptx::launch_dependents();
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<spec, tile>& smem = *reinterpret_cast<Smem<spec, tile>*>(raw);
  if constexpr (tile.shares > 0) {
    Share<spec, shared(tile)> share{p, schedule, threadIdx.x < 32};
#pragma unroll 1
    while (!share.is_over()) {
      const Work work = share.next();
      if (work.num_blocks == 0) continue;
      attend(p, work, smem, keys);
      // Waits until every thread has read Q and the blocks of the part before.
      __syncthreads();
    }
  } else {
    if (int32_t(blockIdx.x) >= schedule.num_tiles) return;
    const Work work = resolve_tile<spec, shared(tile)>(p, schedule, blockIdx.x);
    if (work.num_blocks > 0) attend(p, work, smem, keys);
  }
}

}  // namespace fmha::sm80
