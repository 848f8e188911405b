// Programmatic dependent launch: grids of one stream that overlap at their ends.
// PTX ISA, Parallel Synchronization and Communication Instructions: griddepcontrol
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
#pragma once
#include <fmha/portable.h>

namespace fmha::ptx {

// needs: sm_90. Once every CTA has called this or ended, a dependent next
// grid of the stream may start. PTX ISA: griddepcontrol.launch_dependents.
FMHA_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// needs: sm_90. Waits until earlier grids have ended and
// their memory is visible; returns at once in a launch that
// is not dependent. PTX ISA: griddepcontrol.wait.
FMHA_DEVICE void wait_for_grids_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace fmha::ptx
