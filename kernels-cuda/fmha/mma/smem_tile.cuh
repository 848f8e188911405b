// Swizzled shared-memory tiles as TMA writes them and the tensor cores read them.
// PTX ISA, Tensors: Swizzling Modes
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tensor-swizzling-modes
#pragma once
#include <fmha/ptx/memory.cuh>
#include <fmha/spec.h>

namespace fmha::mma {

// Storage type of a tile's elements. It depends on their size alone; the product's instruction names their format.
template <DType dtype>
struct StorageOf {
  using Type = uint16_t;
};
template <>
struct StorageOf<DType::E4m3Fn> {
  using Type = uint8_t;
};
template <>
struct StorageOf<DType::E5m2> {
  using Type = uint8_t;
};
template <DType dtype>
using Storage = typename StorageOf<dtype>::Type;

// The widest swizzle whose span divides a row; its elements are also the inner box of the tensor map.
constexpr int swizzle_bytes(int row_bytes) { return row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : 32; }

// A [rows, dim] tile: chunks of one swizzle span, [dim / span][rows][span]. `clustered`: its address may hold the
// rank of a CTA in a cluster.
template <class Storage, int num_rows, int num_cols, bool clustered = false>
struct alignas(1024) SmemTile {
  using Elem = Storage;
  static constexpr int elem_bytes = sizeof(Elem);
  static constexpr int rows = num_rows, dim = num_cols;
  static constexpr int span_bytes = swizzle_bytes(dim * elem_bytes);
  static constexpr int span = span_bytes / elem_bytes;
  static constexpr int num_chunks = dim / span;
  static constexpr int chunk_bytes = rows * span_bytes;
  static constexpr int tile_bytes = num_chunks * chunk_bytes;
  static_assert(dim % span == 0, "a tile's row is whole swizzle spans");
  static_assert(rows % 8 == 0, "a tile is whole swizzle atoms of 8 rows");

  Elem elems[num_chunks][rows][span];

  FMHA_DEVICE uint32_t address() const { return ptx::shared_address(this); }
  // Address for matrix descriptors. In a cluster an address of the CTA's own shared memory carries its rank from bit 24
  // up (seen on an H200), which would get into the descriptor's next field.
  FMHA_DEVICE uint32_t offset() const { return clustered ? address() & 0x3ffff : address(); }
};

// Offset of 16 bytes of a tile: row `row`, from element `column`, which begins 16 bytes. The swizzle exchanges the
// 16-byte words of a span by the 128-byte line they are on.
template <class Tile>
FMHA_DEVICE uint32_t word_offset(int32_t row, int32_t column) {
  const uint32_t offset = row * Tile::span_bytes + column % Tile::span * Tile::elem_bytes;
  constexpr uint32_t exchanged = Tile::span_bytes / 16 - 1;
  return column / Tile::span * Tile::chunk_bytes + (offset ^ (offset >> 7 & exchanged) << 4);
}

// Offset of the word `row0` rows and `column0` columns beyond a place of the lane whose offset is `offset`. The place
// lies in rows 0 to 31 and in the first 32 bytes of a row; `row0` and `column0` are known when compiling. The swizzle
// is linear, so one XOR adds the column's part.
template <class Tile>
FMHA_DEVICE uint32_t beyond(uint32_t offset, int32_t row0, int32_t column0) {
  static_assert(Tile::span_bytes >= 32 && sizeof(typename Tile::Elem) == 1, "whole groups of 32 elements in a span");
  return (offset ^ uint32_t(column0 % Tile::span)) + row0 * Tile::span_bytes + column0 / Tile::span * Tile::chunk_bytes;
}

}  // namespace fmha::mma
