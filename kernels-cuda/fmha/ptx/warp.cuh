// Warps: shuffles, register budgets, exit.
// PTX ISA, Data Movement and Conversion Instructions: shfl.sync
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-shfl-sync
// PTX ISA, Miscellaneous Instructions: setmaxnreg
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
#pragma once
#include <fmha/portable.h>

namespace fmha::ptx {

constexpr uint32_t kAllLanes = 0xffffffffu;

// needs: sm_70. The value of lane `lane ^ mask`.
// PTX ISA: shfl.sync.
template <class T>
FMHA_DEVICE T shfl_xor(T value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}

// needs: sm_70. Tells the compiler that a value is the same in every lane.
// PTX ISA: shfl.sync.
FMHA_DEVICE int32_t uniform(int32_t value) { return __shfl_sync(kAllLanes, value, 0); }

// needs: sm_70. Emits no instruction. The compiler forgets what it knows of the value, so that it does not compute
// expressions of it earlier, where they would take registers. PTX ISA: none; Inline PTX Assembly in CUDA, constraints.
FMHA_DEVICE void unknown_here(int32_t& value) { asm volatile("" : "+r"(value)); }

// needs: sm_70. Ends this thread; barriers of the cluster do not wait for it.
// PTX ISA: exit.
FMHA_DEVICE void exit_thread() { asm volatile("exit;"); }

// needs: sm_90a. Gives registers back to the SM's pool; the whole warpgroup executes it.
// PTX ISA: setmaxnreg.
template <int registers>
FMHA_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// needs: sm_90a. Takes registers, waiting until the pool
// has enough. PTX ISA: setmaxnreg.
template <int registers>
FMHA_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace fmha::ptx
