// Backward over lists of keys on WMMA (amd/lists_bwd.h): products of 16 own rows and twice 16 walked ones.
#pragma once
#include <fmha/amd/lists_bwd.h>
#include <fmha/mma/rdna.h>

namespace fmha::cdna::bwd::lists {

struct UnitWmma {
  using Acc = rdna::Acc;
  using Tanh = ExactTanh;
  static constexpr int edge = rdna::kEdge, acc_elems = rdna::kAccElems;

  // Four waves' sums of rows of 512 elements would fill a lane's 256 registers.
  static FMHA_DEVICE constexpr int waves(int dim_qk, int dim_v) { return dim_qk > 256 || dim_v > 256 ? 8 : 4; }
  static FMHA_DEVICE int lane_col() { return rdna::lane_col(); }
  static FMHA_DEVICE int lane_half() { return rdna::lane_half(); }
  static FMHA_DEVICE constexpr int acc_row(int i, int half) { return rdna::acc_row(i, half); }
  static FMHA_DEVICE constexpr int walked_row(int i, int half) {
    return i / acc_elems * edge + rdna::acc_row(i % acc_elems, half);
  }
  static FMHA_DEVICE Array<float, acc_elems> in_runs(const Acc& acc) { return rdna::rows_in_order(acc); }
  static FMHA_DEVICE constexpr int row_of_run(int i, int half) { return 8 * half + i; }

  // The wave's columns of a lane's own row: half of each step, which on gfx11 the wave's halves exchange where they are
  // multiplied.
  template <class C, int dim, int steps>
  struct Own {
    Array<Chunk, steps> chunks;
    FMHA_DEVICE void load(const void* data, int64_t offset, int i_wave) {
      load_row<dim, steps, C::waves>(chunks, static_cast<const uint8_t*>(data) + offset, i_wave, lane_half());
    }
  };

  // The wave's columns of walked rows: of two of them in each lane, loaded where they are multiplied. `offset` is that
  // of the row whose number the lane has.
  template <class C, int dim, int steps>
  struct Walked {
    const uint8_t* rows[2];
    int i_wave;
    FMHA_DEVICE void load(const void* data, int64_t offset, int of_wave) {
      i_wave = of_wave;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        rows[n] = static_cast<const uint8_t*>(data) + offset_of_lane(n * edge + rdna::lane_col(), offset);
      }
    }
    FMHA_DEVICE PairValues product(const Own<C, dim, steps>& own) const {
      Acc x[2] = {};
#pragma unroll
      for (int s = 0; s < steps; ++s) {
        const rdna::Operand<C::dtype> of_own = rdna::joined<C::dtype>(own.chunks[s]);
#pragma unroll
        for (int n = 0; n < 2; ++n) x[n] = rdna::mma<C::dtype>(operand(n, s), of_own, x[n]);
        // Keeps the compiler from loading all steps ahead, for which there are not enough registers.
        if (s % 2 == 1 || s == steps - 1) sched_barrier();
      }
      return __builtin_shufflevector(x[0], x[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }

   private:
    FMHA_DEVICE rdna::Operand<C::dtype> operand(int n, int s) const {
      if constexpr (rdna::kRepeats) {
        // Both halves of the wave load a whole step: their addresses are equal.
        const Chunk low = load_chunk<dim, steps, C::waves>(rows[n], s, i_wave, 0);
        const Chunk high = load_chunk<dim, steps, C::waves>(rows[n], s, i_wave, 1);
        return {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
      } else {
        return load_chunk<dim, steps, C::waves>(rows[n], s, i_wave, lane_half());
      }
    }
  };

  template <DType dtype>
  static FMHA_DEVICE Acc multiply(const Chunk& a, const Chunk& b, Acc c) {
    return rdna::mma<dtype>(rdna::joined<dtype>(a), rdna::joined<dtype>(b), c);
  }
  // P or dS as the B operand of sums: two steps of 16 walked rows, the lane's half of each.
  template <DType dtype>
  static FMHA_DEVICE Array<Chunk, 2> packed(const PairValues& x) {
    const Acc halves[2] = {__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)};
    return {rdna::packed_p<dtype>(halves[0]), rdna::packed_p<dtype>(halves[1])};
  }
};

}  // namespace fmha::cdna::bwd::lists
