// `fmha/row_lists.h` on warps: lists of keys, slowly.
#pragma once
#include <fmha/row_lists.h>
#include <fmha/simt/fwd.cuh>

namespace fmha::simt {

// Any grid of whole warps: each takes rows until none is left.
template <FwdSpec spec>
FMHA_DEVICE void fwd_lists(const FwdParams& p, const ListParams& lists) {
  const int64_t num_warps = int64_t(gridDim.x) * (blockDim.x / Warp::count), num_rows = num_fwd_rows(p);
  for (int64_t at = int64_t(blockIdx.x) * (blockDim.x / Warp::count) + threadIdx.x / Warp::count; at < num_rows;
       at += num_warps) {
    list_row<spec, Warp>(p, lists, at);
  }
}

}  // namespace fmha::simt
