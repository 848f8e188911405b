// Exchange between the lanes of a warp: broadcasts, votes, reductions.
// PTX ISA, Data Movement and Conversion Instructions: shfl.sync
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-shfl-sync
// PTX ISA, Parallel Synchronization and Communication Instructions: vote.sync
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-vote-sync
// PTX ISA, Parallel Synchronization and Communication Instructions: redux.sync
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-redux-sync
#pragma once
#include <fmha/portable.h>

namespace fmha::ptx {

// needs: sm_70. Returns the value of one lane to all lanes. PTX ISA: shfl.sync.idx.
template <class T>
FMHA_DEVICE T shfl_idx(T value, int32_t lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

// needs: sm_70. Bit l is lane l's predicate. PTX ISA: vote.sync.ballot.
FMHA_DEVICE uint32_t vote_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

// needs: sm_80. Returns the smallest of all lanes' values to all lanes. PTX ISA: redux.sync.min.
FMHA_DEVICE uint32_t redux_min(uint32_t value) { return __reduce_min_sync(0xffffffffu, value); }

// needs: sm_80. Returns the greatest of all lanes' values to all lanes. PTX ISA: redux.sync.max.
FMHA_DEVICE uint32_t redux_max(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }

// needs: sm_80. Returns the sum of all lanes' values to all lanes. PTX ISA: redux.sync.add.
FMHA_DEVICE uint32_t redux_add(uint32_t value) { return __reduce_add_sync(0xffffffffu, value); }

// needs: sm_80. Bits that any lane's value has, in all. PTX ISA: redux.sync.or.
FMHA_DEVICE uint32_t redux_or(uint32_t value) { return __reduce_or_sync(0xffffffffu, value); }

}  // namespace fmha::ptx
