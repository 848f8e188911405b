// Named barriers of a CTA.
// PTX ISA, Parallel Synchronization and Communication Instructions: bar / barrier
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
#pragma once
#include <fmha/portable.h>

namespace fmha::ptx {

// needs: sm_70. Waits until `num_threads` threads, this one
// included, have arrived at barrier `id`. PTX ISA: bar.sync.
template <int num_threads>
FMHA_DEVICE void bar_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(num_threads) : "memory");
}

// needs: sm_70. Arrives without waiting.
// PTX ISA: bar.arrive.
template <int num_threads>
FMHA_DEVICE void bar_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(num_threads) : "memory");
}

// needs: sm_70. Waits as bar_sync does, and returns whether `value` is true in all threads. PTX ISA: bar.red.
template <int num_threads>
FMHA_DEVICE bool bar_red_and(int id, bool value) {
  uint32_t all;
  asm volatile(
      "{ .reg .pred mine, all; setp.ne.b32 mine, %3, 0;\n"
      "bar.red.and.pred all, %1, %2, mine;\n"
      "selp.b32 %0, 1, 0, all; }"
      : "=r"(all)
      : "r"(id), "n"(num_threads), "r"(uint32_t(value))
      : "memory");
  return all != 0;
}

// needs: sm_70. Waits as bar_sync does; any one lane counts for its whole warp.
// PTX ISA: barrier.sync.
template <int id, int num_threads>
FMHA_DEVICE void barrier_sync() {
  asm volatile("barrier.sync %0, %1;" ::"n"(id), "n"(num_threads) : "memory");
}

// needs: sm_70. Arrives as bar_arrive does; any one lane counts for its whole warp.
// PTX ISA: barrier.arrive.
template <int id, int num_threads>
FMHA_DEVICE void barrier_arrive() {
  asm volatile("barrier.arrive %0, %1;" ::"n"(id), "n"(num_threads) : "memory");
}

}  // namespace fmha::ptx
