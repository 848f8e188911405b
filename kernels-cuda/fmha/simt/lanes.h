// Lanes of the kernels in `fmha/simt`: a warp's lanes, and how a grid of any number of whole warps divides the rows.
#pragma once
#include <fmha/portable.h>
#include <fmha/ptx/collective.cuh>

namespace fmha::simt {

struct Warp {
  static constexpr int32_t count = 32;
  static FMHA_DEVICE int32_t index() { return int32_t(threadIdx.x % count); }
  static FMHA_DEVICE uint64_t ballot(bool x) { return ptx::vote_ballot(x); }
  static FMHA_DEVICE float from(float x, int32_t lane) { return ptx::shfl_idx(x, lane); }
};
using Lanes = Warp;

// Calls `row` for this warp's rows: every `num_warps`-th of all rows.
template <class Row>
FMHA_DEVICE void for_each_row(int64_t num_rows, Row row) {
  const int64_t num_warps = int64_t(gridDim.x) * (blockDim.x / Warp::count);
  for (int64_t at = int64_t(blockIdx.x) * (blockDim.x / Warp::count) + threadIdx.x / Warp::count; at < num_rows;
       at += num_warps) {
    row(at);
  }
}

// Calls `element` for this thread's elements of a row.
template <class Element>
FMHA_DEVICE void for_each_element(int64_t num_elements, Element element) {
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < num_elements;
       at += int64_t(gridDim.x) * blockDim.x) {
    element(at);
  }
}

}  // namespace fmha::simt
