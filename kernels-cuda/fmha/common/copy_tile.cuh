// Loads without TMA: warps copy a tile to the layout that
// TMA would produce, for strides that TMA does not support.
#pragma once
#include <fmha/mma/smem_tile.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/mbarrier.cuh>

namespace fmha {

// The threads that copy: the warps of a warpgroup whose bits in `copying` are set.
template <int warpgroup, uint32_t copying>
struct CopyWarps {
  // Number of copying warps among the warpgroup's first `warps`.
  FMHA_DEVICE static constexpr int num_warps(uint32_t warps) {
    int number = 0;
    for (uint32_t warp = 0; warp < warps; ++warp) number += copying >> warp & 1;
    return number;
  }
  static constexpr int count = 32 * num_warps(4);

  // Index of this thread among the copying threads.
  FMHA_DEVICE static int32_t rank() {
    const uint32_t thread = threadIdx.x - 128 * warpgroup;
    return 32 * num_warps(thread / 32) + thread % 32;
  }
};

template <int bytes, class Threads>
struct Copier {
  // Barrier of a tile whose copies this thread has issued and not announced yet. The thread arrives at it after it has
  // issued the next tile's copies, so that copies of two tiles overlap.
  ptx::Barrier* pending = nullptr;

  // Copies rows of a tile from the addresses `row_of` returns (null: zeros), `dim`
  // elements each, then zeros. Fewer than 4 bytes at a time are read element by element.
  template <class Tile, class RowOf>
  FMHA_DEVICE void copy(const Tile& tile, int32_t dim, const void* any, RowOf row_of) const {
    using Elem = typename Tile::Elem;
    constexpr int size = Tile::elem_bytes, word = 16 / size;
    constexpr int elems = bytes < 4 ? word : bytes / size;  // by one thread, at a time
    constexpr int units = Tile::dim / elems;
#pragma unroll 2
    for (int32_t at = Threads::rank(); at < Tile::rows * units; at += Threads::count) {
      const int32_t row = at / units, column = at % units * elems;
      const Elem* from = row_of(row);
      const int32_t there = from ? clamp(dim - column, 0, elems) : 0;
      const uint32_t to = tile.address() + mma::word_offset<Tile>(row, column / word * word) + column % word * size;
      if constexpr (bytes >= 4) {
        ptx::cp_async<bytes>(to, there > 0 ? from + column : any, size * there);
      } else {
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          words[k] = 0;
#pragma unroll
          for (int e = 0; e < 4 / size; ++e) {
            const int at_elem = k * (4 / size) + e;
            if (at_elem < there) words[k] |= uint32_t(from[column + at_elem]) << 8 * size * e;
          }
        }
        ptx::st_shared_v4(to, words);
      }
    }
  }

  // Copies a tile element by element. `elem_of(row, column)` returns an element's address; null stands for a zero.
  template <class Tile, class ElemOf>
  FMHA_DEVICE void gather(const Tile& tile, ElemOf elem_of) const {
    using Elem = typename Tile::Elem;
    constexpr int size = Tile::elem_bytes, word = 16 / size, units = Tile::dim / word;
#pragma unroll 1
    for (int32_t at = Threads::rank(); at < Tile::rows * units; at += Threads::count) {
      const int32_t row = at / units, column = at % units * word;
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[k] = 0;
#pragma unroll
        for (int e = 0; e < 4 / size; ++e) {
          const Elem* from = elem_of(row, column + k * (4 / size) + e);
          if (from) words[k] |= uint32_t(*from) << 8 * size * e;
        }
      }
      ptx::st_shared_v4(tile.address() + mma::word_offset<Tile>(row, column), words);
    }
  }

  // Makes these ordinary writes visible to the tensor cores by a fence, then arrives at the tile's barrier.
  FMHA_DEVICE void arrive() {
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive_if(*pending, true);
  }
  // Arrives at `full` once the last copies have landed.
  FMHA_DEVICE void finish(ptx::Barrier& full) {
    ptx::cp_async_commit_group();
    if (pending) {
      ptx::cp_async_wait_group<1>();
      arrive();
    }
    pending = &full;
  }
  FMHA_DEVICE void flush() {
    if (pending) drain();
  }
  // Waits for this thread's groups of copies, and announces the tile before.
  FMHA_DEVICE void drain() {
    ptx::cp_async_wait_group<0>();
    arrive_at_pending();
  }
  // Waits for this thread's copies under way, the last tile's too, which is not announced.
  FMHA_DEVICE void land() {
    ptx::cp_async_commit_group();
    drain();
  }
  // Announces the last copy, which this thread has seen complete.
  FMHA_DEVICE void arrive_at_pending() {
    if (pending) arrive();
    pending = nullptr;
  }
  // Waits until a slot is free. Pending copies are announced first, since the warp that frees the slot may itself wait
  // for them.
  FMHA_DEVICE void wait(ptx::Barrier& barrier, uint32_t parity) {
    if (ptx::mbarrier_test_parity(barrier, parity)) return;
    flush();
    ptx::mbarrier_wait_parity(barrier, parity);
  }
};

}  // namespace fmha
