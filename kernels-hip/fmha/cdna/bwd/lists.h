// Backward over lists of keys on MFMA (amd/lists_bwd.h): products of 32 own and 32 walked rows.
#pragma once
#include <fmha/amd/lists_bwd.h>
#include <fmha/cdna/bwd/main.h>

namespace fmha::cdna::bwd::lists {

struct UnitMfma {
  using Acc = fmha::Acc;
  using Tanh = cdna::Tanh;
  static constexpr int edge = kEdge, acc_elems = 16;

  static FMHA_DEVICE constexpr int waves(int, int) { return 4; }
  static FMHA_DEVICE int lane_col() { return fmha::lane_col(); }
  static FMHA_DEVICE int lane_half() { return fmha::lane_half(); }
  static FMHA_DEVICE constexpr int acc_row(int i, int half) { return fmha::acc_row(i, half); }
  static FMHA_DEVICE constexpr int walked_row(int i, int half) { return fmha::acc_row(i, half); }
  static FMHA_DEVICE const Acc& in_runs(const Acc& acc) { return acc; }
  static FMHA_DEVICE constexpr int row_of_run(int i, int half) { return fmha::acc_row(i, half); }

  // The wave's columns of a lane's own row.
  template <class C, int dim, int steps>
  struct Own {
    Array<Chunk, steps> chunks;
    FMHA_DEVICE void load(const void* data, int64_t offset, int i_wave) {
      load_row<dim, steps, C::waves>(chunks, static_cast<const uint8_t*>(data) + offset, i_wave, lane_half());
    }
  };

  // The wave's columns of walked rows, of which each lane has its own; `offset` is that row's.
  template <class C, int dim, int steps>
  struct Walked : Own<C, dim, steps> {
    FMHA_DEVICE PairValues product(const Own<C, dim, steps>& own) const {
      PairValues x = {};
#pragma unroll
      for (int s = 0; s < steps; ++s) x = multiply<C::dtype>(this->chunks[s], own.chunks[s], x);
      return x;
    }
  };

  template <DType dtype>
  static FMHA_DEVICE Acc multiply(const Chunk& a, const Chunk& b, Acc c) {
    return mma_step<dtype>(a, b, c);
  }
  template <DType dtype>
  static FMHA_DEVICE BlockFrags packed(const PairValues& x) {
    return block_frags<dtype>(x);
  }
};

}  // namespace fmha::cdna::bwd::lists
