// Swizzled shared-memory tiles as the copy engine writes them and wgmma reads them.
// PTX ISA, Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format, Shared Memory Matrix Layout
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout
#pragma once
#include <fmha/ptx/memory.cuh>

namespace fmha::mma {

// The widest swizzle whose span divides a row of `dim` 16-bit elements; also the inner box of the
// tensor map, `swizzle_bytes / 2` elements.
constexpr int swizzle_bytes(int dim) { return dim % 64 == 0 ? 128 : dim % 32 == 0 ? 64 : 32; }

// A [rows, dim] tile of 16-bit elements: chunks of one swizzle span, [dim / span][rows][span]. `clustered`:
// its address may hold the rank of a CTA in a cluster.
template <int num_rows, int num_cols, bool clustered = false>
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
  // As descriptors have it: in a cluster an address of the CTA's own carries its rank from bit 24 up (seen on
  // an H200), which would get into the descriptor's next field.
  FMHA_DEVICE uint32_t offset() const { return clustered ? address() & 0x3ffff : address(); }
};

// A matrix descriptor. Its low word alone holds the address, so that a step within a tile is one
// 32-bit addition, which never carries: shared memory ends below 2^18.
struct Descriptor {
  uint32_t low;
  uint32_t high;

  FMHA_DEVICE Descriptor plus_bytes(uint32_t bytes) const { return {low + (bytes >> 4), high}; }
  FMHA_DEVICE uint64_t bits() const { return uint64_t(high) << 32 | low; }
};

// `leading_bytes`: from chunk to chunk, for a tile read across its rows; ignored for one read along them.
template <int span_bytes>
FMHA_DEVICE Descriptor descriptor(uint32_t address, uint32_t leading_bytes) {
  constexpr uint32_t swizzle = span_bytes == 128 ? 1 : span_bytes == 64 ? 2 : 3;
  constexpr uint32_t eight_rows = 8 * span_bytes;
  return {address >> 4 | (leading_bytes >> 4) << 16, eight_rows >> 4 | swizzle << 30};
}

}  // namespace fmha::mma
