// TMA: asynchronous copies of boxes of a tensor.
// PTX ISA, Data Movement and Conversion Instructions: cp.async.bulk.tensor
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
#pragma once
#include <fmha/ptx/mbarrier.cuh>

namespace fmha::ptx {

// A CUtensorMap, opaque.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// How long the L2 is to keep the copied lines: cache-policy words as the instruction createpolicy makes them.
enum class CacheHint : uint64_t {
  EvictFirst = 0x12F0000000000000,
  EvictLast = 0x14F0000000000000,
};

// needs: sm_90. Copies a box of a four-dimensional tensor to shared memory. Coordinates count from the innermost
// dimension; what lies outside the tensor becomes zeros. PTX ISA: cp.async.bulk.tensor.
FMHA_DEVICE void cp_async_bulk_tensor_4d(uint32_t to, const TensorMap& map, Barrier& barrier, int32_t c0, int32_t c1,
                                         int32_t c2, int32_t c3, CacheHint hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(uint64_t(hint))
      : "memory");
}

// needs: sm_90.
// PTX ISA: cp.async.bulk.tensor.
FMHA_DEVICE void cp_async_bulk_tensor_5d(uint32_t to, const TensorMap& map, Barrier& barrier, int32_t c0, int32_t c1,
                                         int32_t c2, int32_t c3, int32_t c4, CacheHint hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(uint64_t(hint))
      : "memory");
}

// needs: sm_90. Copies as cp_async_bulk_tensor_4d does, to the same addresses and barriers of every CTA whose bit is
// in `ctas`.
// PTX ISA: cp.async.bulk.tensor, .multicast::cluster.
FMHA_DEVICE void cp_async_bulk_tensor_4d_multicast(uint32_t to, const TensorMap& map, Barrier& barrier, int32_t c0,
                                                   int32_t c1, int32_t c2, int32_t c3, uint16_t ctas, CacheHint hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(ctas), "l"(uint64_t(hint))
      : "memory");
}

// needs: sm_100a. Copies to this CTA as cp_async_bulk_tensor_4d does, for a barrier of either CTA of its pair: an
// address in the cluster's window.
// PTX ISA: cp.async.bulk.tensor, .cta_group::2.
FMHA_DEVICE void cp_async_bulk_tensor_4d_pair(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t c0,
                                              int32_t c1, int32_t c2, int32_t c3, CacheHint hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(uint64_t(hint))
      : "memory");
}

// needs: sm_100a. cp_async_bulk_tensor_4d_pair for five
// dimensions. PTX ISA: cp.async.bulk.tensor, .cta_group::2.
FMHA_DEVICE void cp_async_bulk_tensor_5d_pair(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t c0,
                                              int32_t c1, int32_t c2, int32_t c3, int32_t c4, CacheHint hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(uint64_t(hint))
      : "memory");
}

// needs: sm_100a. Brings four rows of a matrix to this CTA, whose box is one row: elements from column `c0` on. The
// rows follow each other in shared memory, in the map's swizzle of their addresses; one outside the matrix is zeros.
// The barrier is of either CTA of the pair: an address in the cluster's window.
// PTX ISA: cp.async.bulk.tensor, .tile::gather4, .cta_group::2.
FMHA_DEVICE void cp_async_bulk_tensor_gather4_pair(uint32_t to, const TensorMap& map, uint32_t barrier, int32_t c0,
                                                   const int32_t (&rows)[4], CacheHint hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes.cta_group::2"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(uint64_t(hint))
      : "memory");
}

// needs: sm_90. Fetches the tensor map itself ahead of its first use. PTX ISA: prefetch.
FMHA_DEVICE void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace fmha::ptx
