// Matrix descriptors: how wgmma finds a tile in shared memory.
// PTX ISA, Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format, Shared Memory Matrix Layout
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout
#pragma once
#include <fmha/mma/smem_tile.cuh>

namespace fmha::mma::sm90 {

// Matrix descriptor of wgmma. The low word alone holds the address, so a step within a tile is one 32-bit addition,
// which never carries: shared memory ends below 2^18.
struct Descriptor {
  uint32_t low;
  uint32_t high;

  FMHA_DEVICE Descriptor plus_bytes(uint32_t bytes) const { return {low + (bytes >> 4), high}; }
  FMHA_DEVICE uint64_t bits() const { return uint64_t(high) << 32 | low; }
};

// `leading_bytes` is the distance between chunks of a tile that is read across its rows; it is ignored for one read
// along them.
template <int span_bytes>
FMHA_DEVICE Descriptor descriptor(uint32_t address, uint32_t leading_bytes) {
  constexpr uint32_t swizzle = span_bytes == 128 ? 1 : span_bytes == 64 ? 2 : 3;
  constexpr uint32_t eight_rows = 8 * span_bytes;
  return {address >> 4 | (leading_bytes >> 4) << 16, eight_rows >> 4 | swizzle << 30};
}

}  // namespace fmha::mma::sm90
