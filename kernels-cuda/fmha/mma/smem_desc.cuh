// Swizzled shared-memory tiles as the copy engine writes them and wgmma reads them.
// PTX ISA, Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format, Shared Memory Matrix Layout
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout
#pragma once
#include <fmha/ptx/memory.cuh>

namespace fmha::mma {

// The widest swizzle whose span divides a row of `dim` 16-bit elements; also the inner box of the
// tensor map, `swizzle_bytes / 2` elements.
constexpr int swizzle_bytes(int dim) { return dim % 64 == 0 ? 128 : dim % 32 == 0 ? 64 : 32; }

// A [rows, dim] tile of 16-bit elements: chunks of one swizzle span, [dim / span][rows][span].
template <int num_rows, int num_cols>
struct alignas(1024) SmemTile {
  static constexpr int rows = num_rows, dim = num_cols;
  static constexpr int span_bytes = swizzle_bytes(dim);
  static constexpr int span = span_bytes / 2;
  static constexpr int num_chunks = dim / span;
  static constexpr int chunk_bytes = rows * span_bytes;
  static constexpr int tile_bytes = num_chunks * chunk_bytes;
  static_assert(dim % span == 0, "a tile's row is whole swizzle spans");
  static_assert(rows % 8 == 0, "a tile is whole swizzle atoms of 8 rows");

  uint16_t elems[num_chunks][rows][span];

  FMHA_DEVICE uint32_t address() const { return ptx::shared_address(this); }
};

// Descriptor bits that do not depend on the address. `leading_bytes`: from chunk to chunk, for a
// tile read across its rows; ignored for one read along them.
template <int span_bytes>
FMHA_DEVICE constexpr uint64_t descriptor_bits(uint32_t leading_bytes) {
  constexpr uint64_t swizzle = span_bytes == 128 ? 1 : span_bytes == 64 ? 2 : 3;
  constexpr uint64_t eight_rows = 8 * span_bytes;
  return swizzle << 62 | (eight_rows >> 4) << 32 | uint64_t(leading_bytes >> 4) << 16;
}

FMHA_DEVICE uint64_t descriptor(uint32_t address, uint64_t bits) { return bits | (address & 0x3ffff) >> 4; }

}  // namespace fmha::mma
