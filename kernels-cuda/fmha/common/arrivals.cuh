// Waits for keys and values that other devices copy to this one while the kernel runs: they arrive in pieces of rows,
// and each piece has a flag in memory.
//
// One thread of a CTA loads K and V by TMA. Before it loads rows of a piece for the first time it polls the piece's
// flag; the copies need no multiprocessor, so a grid that fills the device may wait for them.
#pragma once
#include <fmha/ptx/flag.cuh>

namespace fmha {

// For a launch whose K and V are complete in memory before it begins: nothing waits.
struct AllKeysHere {
  static constexpr bool waits = false;
  FMHA_DEVICE void wait(int32_t, int32_t) const {}
};

// `ArrivalParams`, rendered from Rust; each thread keeps its own record of the pieces that have arrived.
template <class Params>
struct ArrivingKeys {
  static constexpr bool waits = true;
  const Params& p;
  uint64_t here;               // pieces whose flag this thread need not read any more, a bit each
  int32_t begin = 0, end = 0;  // rows that are here

  FMHA_DEVICE explicit ArrivingKeys(const Params& p) : p(p), here(p.here) { know_all(); }

  // Records that every piece has arrived. From then on the check before a key block is two comparisons.
  FMHA_DEVICE void know_all() {
    if (here != ~uint64_t(0)) return;
    begin = -0x7fffffff - 1;
    end = 0x7fffffff;
  }

  FMHA_DEVICE int32_t end_of(int32_t i) const { return i + 1 < int32_t(p.count) ? int32_t(p.ends[i]) : 0x7fffffff; }

  // Waits until rows `row .. row + rows` of K and V have arrived, so that TMA may load them. A key block that ends
  // beyond the last row, or lies before the first (a tile without keys), reads zeros there.
  FMHA_DEVICE void wait(int32_t row, int32_t rows) {
    if (row >= begin && row + rows <= end) return;
    find(row, rows);
  }

  FMHA_DEVICE void find(int32_t row, int32_t rows) {
    int32_t first = 0, last = int32_t(p.count) - 1;  // the first piece that ends behind the row, by halving
    while (first < last) {
      const int32_t middle = (first + last) / 2;
      if (end_of(middle) > row) {
        last = middle;
      } else {
        first = middle + 1;
      }
    }
    bool polled = false;
    begin = first == 0 ? -0x7fffffff - 1 : int32_t(p.ends[first - 1]);
    for (int32_t i = first; i < int32_t(p.count); ++i) {
      if (!(here >> i & 1)) {
        wait_for_piece(i);
        polled = true;
      }
      end = end_of(i);
      if (row + rows <= end) break;
    }
    know_all();
    // Other devices' copies write keys through the generic proxy, and TMA reads through the asynchronous proxy: the
    // fence orders them.
    if (polled) ptx::fence_proxy_async_global();
  }

  FMHA_DEVICE void wait_for_piece(int32_t i) {
    uint32_t* late = p.flags + p.count;
    const uint64_t start = ptx::globaltimer();
    while (ptx::ld_acquire_sys(p.flags + i) == 0) {
      if (ptx::globaltimer() - start > p.timeout_ns) *late = i + 1;
      if (ptx::ld_acquire_sys(late) != 0) {
        here = ~uint64_t(0);  // no result of this call is one: nothing more is waited for
        return;
      }
      ptx::nanosleep(100);
    }
    here |= uint64_t(1) << i;
  }
};

}  // namespace fmha
