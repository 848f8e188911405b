// Loads without the copy engine: three warps copy a tile into the places where it would have put
// it. For strides that it does not take.
#pragma once
#include <fmha/mma/register_product.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/sm90/scheduler.cuh>

namespace fmha::sm90 {

template <int bytes>
struct Copier {
  // Copies of a tile are under way while the next tile's are issued; this barrier is then told.
  Barrier* pending = nullptr;

  // Of the threads that copy.
  FMHA_DEVICE static int32_t rank() { return threadIdx.x < 32 ? threadIdx.x : threadIdx.x - 32; }

  // Rows of a tile from where `row_of` says (null: zeros), `dim` elements each, zeros after them.
  template <class Tile, class RowOf>
  FMHA_DEVICE void copy(const Tile& tile, int32_t dim, const void* any, RowOf row_of) const {
    constexpr int elems = bytes == 2 ? 8 : bytes / 2;  // by one thread, at a time
    constexpr int units = Tile::dim / elems;
#pragma unroll 2
    for (int32_t at = rank(); at < Tile::rows * units; at += kCopyThreads) {
      const int32_t row = at / units, column = at % units * elems;
      const uint16_t* from = row_of(row);
      const int32_t there = from ? clamp(dim - column, 0, elems) : 0;
      const uint32_t to = tile.address() + mma::word_offset<Tile>(row, column / 8 * 8) + column % 8 * 2;
      if constexpr (bytes > 2) {
        ptx::cp_async<bytes>(to, there > 0 ? from + column : any, 2 * there);
      } else {
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t low = 2 * k < there ? from[column + 2 * k] : 0;
          const uint32_t high = 2 * k + 1 < there ? from[column + 2 * k + 1] : 0;
          words[k] = low | high << 16;
        }
        ptx::st_shared_v4(to, words);
      }
    }
  }

  // The tensor cores read what ordinary writes have put there: a fence, then the arrival.
  FMHA_DEVICE void tell() {
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive_if(*pending, true);
  }
  // What was copied last is `full`'s.
  FMHA_DEVICE void finish(Barrier& full) {
    ptx::cp_async_commit_group();
    if (pending) {
      ptx::cp_async_wait_group<1>();
      tell();
    }
    pending = &full;
  }
  FMHA_DEVICE void flush() {
    if (!pending) return;
    ptx::cp_async_wait_group<0>();
    tell();
    pending = nullptr;
  }
  // Whoever is to free a slot may be waiting for what is pending.
  FMHA_DEVICE void wait(Barrier& barrier, uint32_t parity) {
    if (ptx::mbarrier_test_parity(barrier, parity)) return;
    flush();
    ptx::mbarrier_wait_parity(barrier, parity);
  }
};

}  // namespace fmha::sm90
