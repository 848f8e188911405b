// One lane of a warp that runs together.
// PTX ISA, Parallel Synchronization and Communication Instructions: elect.sync
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-elect-sync
#pragma once
#include <fmha/portable.h>

namespace fmha::ptx {

// needs: sm_90. True in exactly one lane, always the same one. ptxas knows this, and keeps values that only that lane
// needs in uniform registers: descriptors, tensor-memory addresses. PTX ISA: elect.sync.
FMHA_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{ .reg .pred p; elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p; }"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace fmha::ptx
