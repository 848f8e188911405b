// Fragments of the tensor cores' operands and sums in registers, in the layout that mma.sync and wgmma share.
//
// Lane l of a warp, which has 16 rows, holds rows l / 4 and that + 8, columns 8 c + 2 (l % 4) and the next, of every
// 8-column group c. Element e of the fragment: column 8 (e / 4) + (e & 1) + 2 (l % 4), upper row iff e & 2.
#pragma once
#include <fmha/ptx/num.cuh>

namespace fmha::mma {

// Inner dimension of one matrix instruction, in elements: 32 bytes of either operand.
template <class Elem>
constexpr int kDepth = 32 / int(sizeof(Elem));

// A thread's accumulators (sums) of a product with n columns.
template <int n>
struct Accumulator {
  static constexpr int columns = n, num_elems = n / 2;
  float elems[num_elems];

  // Which of the thread's two rows element e lies in, 0 or 1.
  static constexpr int row(int e) { return e >> 1 & 1; }
  // Column of element e, counted from the thread's first column.
  static constexpr int column(int e) { return 8 * (e / 4) + (e & 1); }

  FMHA_DEVICE float& operator[](int e) { return elems[e]; }
  FMHA_DEVICE float operator[](int e) const { return elems[e]; }
  FMHA_DEVICE void clear() {
#pragma unroll
    for (int e = 0; e < num_elems; ++e) elems[e] = 0.f;
  }
  // Writes -inf to an element whose row does not see its column.
  template <class Columns>
  FMHA_DEVICE void hide(const Columns& upper, const Columns& lower) {
#pragma unroll
    for (int e = 0; e < num_elems; ++e) {
      if (!(row(e) == 0 ? upper : lower).has(column(e))) elems[e] = -infinity();
    }
  }
};

// The thread's first column in a fragment.
FMHA_DEVICE int32_t fragment_column() { return threadIdx.x % 4 * 2; }

// An A operand with `depth` columns. With 16-bit elements it has the accumulator's layout, packed.
template <class Elem, int depth>
struct RegisterTile {
  uint32_t elems[depth / kDepth<Elem>][4];

  // Columns that x lacks become `zero`: a 0 that ptxas does not know for one, since it writes known
  // constants before the wait for the product that still reads these registers, and then serialises.
  template <DType dtype, int n>
  FMHA_DEVICE void from(const Accumulator<n>& x, uint32_t zero) {
    static_assert(sizeof(Elem) == 2, "only of 16-bit elements is an accumulator's layout that of A");
    static_assert(n <= depth, "a tile takes no more columns than it has");
#pragma unroll
    for (int i = 0; i < depth / 4; ++i) {
      elems[i / 4][i % 4] = i < n / 4 ? ptx::cvt_rn_x2<dtype>(x[2 * i], x[2 * i + 1]) : zero;
    }
  }
};

}  // namespace fmha::mma
