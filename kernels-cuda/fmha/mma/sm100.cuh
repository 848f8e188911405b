// Typed products of one CTA, or of a pair whose tensor cores compute as one: 128 rows a CTA, accumulators in tensor
// memory, where row m is lane m and column n column n. A pair may have 64 rows a CTA: row m is then lane m with the
// first half of the columns, and lane m + 64 with the last.
// PTX ISA, TensorCore 5th Generation Family Instructions: tcgen05.mma, matrix and instruction descriptors
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-instruction-descriptor
#pragma once
#include <fmha/mma/smem_tile.cuh>
#include <fmha/num.h>
#include <fmha/ptx/tcgen05.cuh>

namespace fmha::mma::sm100 {

using ptx::MmaKind;

constexpr int kRows = 128;       // of one CTA's product, and of one CTA's in a pair's
constexpr int kStepBytes = 32;   // of a row of A, contracted by one instruction

FMHA_DEVICE constexpr MmaKind kind_of(DType dtype) { return is_fp8(dtype) ? MmaKind::F8f6f4 : MmaKind::F16; }
// Elements contracted by one instruction.
FMHA_DEVICE constexpr int depth_of(DType dtype) { return kStepBytes / size_bytes(dtype); }
// Number of columns of tensor memory for `elems` elements of operand A.
FMHA_DEVICE constexpr int columns_of(DType dtype, int elems) { return elems * size_bytes(dtype) / 4; }

// Instruction descriptor of a product: A [m, k] and B [n, k] of `dtype`, sums in f32. In a pair's product (m 256)
// each CTA has 128 of A's rows and half of B's, and gets its own rows of D whole.
struct Instruction {
  DType dtype;
  int m, n;
  bool negate_a = false;
  bool b_across_rows = false;  // B's tile is [k, n]
  bool a_across_rows = false;  // A's is [k, m]
  bool pair_of_64 = false;     // of a pair with 64 rows a CTA, m 128

  FMHA_DEVICE constexpr int num_ctas() const { return pair_of_64 ? 2 : m / kRows; }
  FMHA_DEVICE constexpr uint32_t bits() const {
    const uint32_t format = dtype == DType::Bf16 || dtype == DType::E5m2;  // else f16, e4m3
    constexpr uint32_t f32_sums = 1 << 4;
    return f32_sums | format << 7 | format << 10 | uint32_t(negate_a) << 13 | uint32_t(a_across_rows) << 15 |
           uint32_t(b_across_rows) << 16 | uint32_t(n / 8) << 17 | uint32_t(m / 16) << 24;
  }
};

// Instruction descriptor of a product of FP8 elements with scales: each 32 elements of a row share a power of two.
// `byte` is the byte of the word in tensor memory that has the scales of A and of B.
FMHA_DEVICE constexpr uint32_t block_scaled(const Instruction& x, int byte) {
  constexpr uint32_t e8m0 = 1 << 23, type_of_sums = 3 << 4, m = 31 << 24;
  const uint32_t bytes = uint32_t(byte) << 4 | uint32_t(byte) << 29;
  return (x.bits() & ~(type_of_sums | m)) | bytes | e8m0 | uint32_t(x.m / 128) << 27;
}

// Instruction descriptor of a product of E2M1 elements, packed in pairs; each 16 elements share an E4M3 scale. One step
// takes all four bytes of a word of scales.
FMHA_DEVICE constexpr uint32_t pairs_scaled(const Instruction& x) {
  constexpr uint32_t type_of_sums = 3 << 4, types = 7 << 7 | 7 << 10, m = 31 << 24, e2m1 = 1 << 7 | 1 << 10;
  return (x.bits() & ~(type_of_sums | types | m)) | e2m1 | uint32_t(x.m / 128) << 27;
}

constexpr int kScaleColumns = 4;  // of tensor memory, for 128 rows
constexpr int kScalesOfWord = 4;

// Scales of 128 rows in shared memory, a word each: line l has those of rows l, l + 32, l + 64 and l + 96, as
// tensor memory has them in lane l of four columns. PTX ISA: layout of the scale factor matrices.
struct alignas(128) ScaleTile {
  uint32_t words[32][kScaleColumns];

  FMHA_DEVICE uint32_t line(int32_t l) const { return ptx::shared_address(&words[l]); }
};

// Descriptor of an operand's tile in shared memory. The low word alone holds the address, so a step within a tile is
// one 32-bit addition, which never carries: shared memory ends below 2^18.
struct Descriptor {
  uint32_t low, high;

  FMHA_DEVICE Descriptor plus_bytes(uint32_t bytes) const { return {low + (bytes >> 4), high}; }
  FMHA_DEVICE uint64_t bits() const { return uint64_t(high) << 32 | low; }
};

// `leading_bytes` is the distance between chunks of a tile that is read across its rows; it is ignored for one read
// along them.
template <class Tile>
FMHA_DEVICE Descriptor descriptor(const Tile& tile, uint32_t leading_bytes) {
  constexpr uint32_t swizzle = Tile::span_bytes == 128 ? 2 : Tile::span_bytes == 64 ? 4 : 6;
  constexpr uint32_t eight_rows = 8 * Tile::span_bytes, version = 1 << 14;
  return {tile.offset() >> 4 | (leading_bytes >> 4) << 16, eight_rows >> 4 | version | swizzle << 29};
}

// Start of step `step` of a product in a tile that is read along its rows.
template <class Tile>
FMHA_DEVICE constexpr uint32_t step_along_rows(int step) {
  constexpr int steps_a_chunk = Tile::span_bytes / kStepBytes;
  return step / steps_a_chunk * Tile::chunk_bytes + step % steps_a_chunk * kStepBytes;
}

// An operand's tile, read along its rows or across them: its descriptor, and where step `step` of a product begins in
// it.
template <DType dtype, bool across_rows, class Tile>
struct Operand {
  const Descriptor first;

  FMHA_DEVICE explicit Operand(const Tile& tile) : first(descriptor(tile, across_rows ? Tile::chunk_bytes : 16)) {}
  FMHA_DEVICE uint64_t at(int step) const {
    return first.plus_bytes(across_rows ? step * depth_of(dtype) * Tile::span_bytes : step_along_rows<Tile>(step)).bits();
  }
};

// Starts d (+)= A B over an inner dimension of `k` elements, and does not wait. Both operands are in shared memory. One
// thread calls it.
template <Instruction instruction, int k, class TileA, class TileB>
FMHA_DEVICE void start_product(uint32_t d, const TileA& a, const TileB& b, bool accumulate) {
  const Operand<instruction.dtype, instruction.a_across_rows, TileA> a_steps(a);
  const Operand<instruction.dtype, instruction.b_across_rows, TileB> b_steps(b);
#pragma unroll
  for (int step = 0; step < k / depth_of(instruction.dtype); ++step) {
    ptx::tcgen05_mma_ss<instruction.num_ctas(), kind_of(instruction.dtype)>(d, a_steps.at(step), b_steps.at(step),
                                                                           instruction.bits(), accumulate || step != 0);
  }
}

// Starts d = A B^T of two tiles read along their rows, and does not wait. One thread calls it.
template <Instruction instruction, class TileA, class TileB>
FMHA_DEVICE void start_product_abt(uint32_t d, const TileA& a, const TileB& b) {
  static_assert(TileA::dim == TileB::dim, "A and B share their inner dimension");
  start_product<instruction, TileA::dim>(d, a, b, false);
}

// Starts d (+)= A B over the steps [first, end) of the inner dimension, and does not wait. A is in tensor memory from
// column `a` on; B's tile is [k, n] or, where its instruction says so, [n, k]. One thread calls it.
template <Instruction instruction, int first, int end, class TileB>
FMHA_DEVICE void start_product_tmem(uint32_t d, uint32_t a, const TileB& b, bool accumulate) {
  const Operand<instruction.dtype, instruction.b_across_rows, TileB> b_steps(b);
#pragma unroll
  for (int step = first; step < end; ++step) {
    ptx::tcgen05_mma_ts<instruction.num_ctas(), kind_of(instruction.dtype)>(
        d, a + step * (kStepBytes / 4), b_steps.at(step), instruction.bits(), accumulate || step != 0);
  }
}

// Starts a copy of a tile of scales to four columns of tensor memory, and does not wait. Products that the thread
// starts later see the scales. One thread calls it.
FMHA_DEVICE void start_copy(uint32_t to, const ScaleTile& tile) {
  constexpr uint32_t eight_lines = 8 * 16, version = 1 << 14;
  ptx::tcgen05_cp_32x128b_warpx4(to, Descriptor{tile.line(0) >> 4, eight_lines >> 4 | version}.bits());
}

// Starts d = A B^T of two tiles read along their rows, and does not wait. Each 32 elements share a scale; the words of
// scales lie `kScaleColumns` apart. One thread calls it.
template <Instruction instruction, class TileA, class TileB>
FMHA_DEVICE void start_scaled_product_abt(uint32_t d, const TileA& a, const TileB& b, uint32_t scales_a,
                                          uint32_t scales_b) {
  static_assert(TileA::dim == TileB::dim && TileB::rows <= 128, "one inner dimension; a word's scales in four columns");
  const Operand<instruction.dtype, false, TileA> a_steps(a);
  const Operand<instruction.dtype, false, TileB> b_steps(b);
#pragma unroll
  for (int step = 0; step < TileA::dim / depth_of(instruction.dtype); ++step) {
    const uint32_t word = step / kScalesOfWord * kScaleColumns;
    ptx::tcgen05_mma_block32_ss(d, a_steps.at(step), b_steps.at(step), block_scaled(instruction, step % kScalesOfWord),
                                scales_a + word, scales_b + word, step != 0);
  }
}

// Starts d (+)= A B over the steps [first, end) of the inner dimension, and does not wait. A is in tensor memory from
// column `a` on. Each step uses one byte of the words of scales. One thread calls it.
template <Instruction instruction, int first, int end, class TileB>
FMHA_DEVICE void start_scaled_product_tmem(uint32_t d, uint32_t a, const TileB& b, uint32_t scales_a, uint32_t scales_b,
                                           bool accumulate) {
  static_assert(end <= kScalesOfWord, "a word has the scales of a block");
  const Operand<instruction.dtype, instruction.b_across_rows, TileB> b_steps(b);
#pragma unroll
  for (int step = first; step < end; ++step) {
    ptx::tcgen05_mma_block32_ts(d, a + step * (kStepBytes / 4), b_steps.at(step), block_scaled(instruction, step),
                                scales_a, scales_b, accumulate || step != 0);
  }
}

// Starts d = A B^T of E2M1 elements, packed in pairs, and does not wait. Both tiles are read along their rows. Each
// step of 64 elements uses one word of scales; these lie `kScaleColumns` apart. One thread calls it.
template <Instruction instruction, class TileA, class TileB>
FMHA_DEVICE void start_pairs_product_abt(uint32_t d, const TileA& a, const TileB& b, uint32_t scales_a,
                                         uint32_t scales_b) {
  static_assert(TileA::dim == TileB::dim && TileB::rows <= 128, "one inner dimension; a word's scales in four columns");
  const Operand<instruction.dtype, false, TileA> a_steps(a);
  const Operand<instruction.dtype, false, TileB> b_steps(b);
#pragma unroll
  for (int step = 0; step < TileA::dim / kStepBytes; ++step) {
    ptx::tcgen05_mma_block16_ss(d, a_steps.at(step), b_steps.at(step), pairs_scaled(instruction),
                                scales_a + step * kScaleColumns, scales_b + step * kScaleColumns, step != 0);
  }
}

// Starts d (+)= A B of E2M1 elements, packed in pairs, over the steps [first, end) of the inner dimension, and does not
// wait. A is in tensor memory from column `a` on; B's tile is [n, k], and its words of scales lie `columns_of_word`
// apart. One thread calls it.
template <Instruction instruction, int first, int end, int columns_of_word, class TileB>
FMHA_DEVICE void start_pairs_product_tmem(uint32_t d, uint32_t a, const TileB& b, uint32_t scales_a, uint32_t scales_b,
                                          bool accumulate) {
  const Operand<instruction.dtype, false, TileB> b_steps(b);
#pragma unroll
  for (int step = first; step < end; ++step) {
    ptx::tcgen05_mma_block16_ts(d, a + step * (kStepBytes / 4), b_steps.at(step), pairs_scaled(instruction),
                                scales_a + step * kScaleColumns, scales_b + step * columns_of_word,
                                accumulate || step != 0);
  }
}

}  // namespace fmha::mma::sm100
