// Bulk copies without a tensor map: contiguous bytes into shared memory, and sums out of it.
// PTX ISA, Data Movement and Conversion Instructions: cp.async.bulk, cp.reduce.async.bulk
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
#pragma once
#include <fmha/ptx/mbarrier.cuh>

namespace fmha::ptx {

// needs: sm_90. `bytes` and both addresses are multiples of 16; the barrier counts the bytes.
// PTX ISA: cp.async.bulk.
FMHA_DEVICE void cp_async_bulk(uint32_t to, const void* from, uint32_t bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// needs: sm_90. Adds f32 numbers to those in global memory, each addition by itself atomic; `bytes` and both
// addresses are multiples of 16.
// PTX ISA: cp.reduce.async.bulk.
FMHA_DEVICE void cp_reduce_async_bulk_add_f32(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// needs: sm_90. Copies from shared to global memory; `bytes` and both addresses are multiples of 16.
// PTX ISA: cp.async.bulk.
FMHA_DEVICE void cp_async_bulk_store(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// needs: sm_90. This thread's bulk copies out of shared memory since the last commit become a group.
// PTX ISA: cp.async.bulk.commit_group.
FMHA_DEVICE void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// needs: sm_90. Waits until at most `pending` of this thread's groups have yet to read their shared memory.
// PTX ISA: cp.async.bulk.wait_group.
template <int pending>
FMHA_DEVICE void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// needs: sm_90. Waits until at most `pending` of this thread's groups have yet to write.
// PTX ISA: cp.async.bulk.wait_group.
template <int pending>
FMHA_DEVICE void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace fmha::ptx
