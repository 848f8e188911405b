// `fmha/row_bwd.h` on warps: every backward spec of the contract, slowly.
#pragma once
#include <fmha/row_bwd.h>
#include <fmha/simt/fwd.cuh>

namespace fmha::simt {

// Any grid of whole warps: each calls `row` for every `num_warps`-th of the rows.
template <class Row>
FMHA_DEVICE void for_each_row(int64_t num_rows, Row row) {
  const int64_t num_warps = int64_t(gridDim.x) * (blockDim.x / Warp::count);
  for (int64_t at = int64_t(blockIdx.x) * (blockDim.x / Warp::count) + threadIdx.x / Warp::count; at < num_rows;
       at += num_warps) {
    row(at);
  }
}

// The first launch.
template <BwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void bwd_stats(const BwdParams& p, const Masks& masks = {}) {
  for_each_row(num_query_rows(p), [&](int64_t at) { fmha::bwd_stats<spec, Warp>(p, at, masks); });
}

// The second.
template <BwdSpec spec, class Masks = NoMasks>
FMHA_DEVICE void bwd(const BwdParams& p, const Masks& masks = {}) {
  for_each_row(num_bwd_rows<spec>(p), [&](int64_t at) { bwd_row<spec, Warp>(p, at, masks); });
}

// The third, where captured tensors have gradients: an element a thread.
template <BwdSpec spec>
FMHA_DEVICE void bwd_captured(const BwdParams& p) {
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < p.captured_elems;
       at += int64_t(gridDim.x) * blockDim.x) {
    bwd_captured_element(p, at);
  }
}

}  // namespace fmha::simt
