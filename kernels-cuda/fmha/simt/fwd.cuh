// `fmha/row_fwd.h` on warps: every spec of the contract, slowly.
#pragma once
#include <fmha/ptx/collective.cuh>
#include <fmha/row_fwd.h>

namespace fmha::simt {

struct Warp {
  static constexpr int32_t count = 32;
  static FMHA_DEVICE int32_t index() { return int32_t(threadIdx.x % count); }
  static FMHA_DEVICE uint64_t ballot(bool x) { return ptx::vote_ballot(x); }
  static FMHA_DEVICE float from(float x, int32_t lane) { return ptx::shfl_idx(x, lane); }
};

// Any grid of whole warps: each takes rows until none is left.
template <FwdSpec spec, class Masks = NoMasks, class Elems = StoredElems>
FMHA_DEVICE void fwd(const FwdParams& p, const Masks& masks = {}, const Elems& elems = {}) {
  const int64_t num_warps = int64_t(gridDim.x) * (blockDim.x / Warp::count), num_rows = num_fwd_rows(p);
  for (int64_t at = int64_t(blockIdx.x) * (blockDim.x / Warp::count) + threadIdx.x / Warp::count; at < num_rows;
       at += num_warps) {
    fwd_row<spec, Warp>(p, at, masks, elems);
  }
}

}  // namespace fmha::simt
