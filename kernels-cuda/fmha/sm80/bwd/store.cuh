// A warp's rows of a gradient, scaled, from registers to memory; rows that a hidden NaN or infinity has reached are
// computed again, pair by pair.
#pragma once
#include <fmha/common/store_rows.cuh>
#include <fmha/simt/bwd.h>
#include <fmha/sm80/bwd/config.cuh>

namespace fmha::sm80::bwd {

// The spec with which a gradient with rows of `dim` elements is stored, as if it were an O.
template <BwdSpec spec, int dim>
FMHA_DEVICE constexpr FwdSpec as_output() {
  FwdSpec output = spec.fwd;
  output.dtype_o = spec.dtype_grad;
  output.head_dim_v = dim;
  return output;
}

// Stores the warp's rows of a gradient. `row_at(row)` is the address of a row, and `is_there(row)` says whether the
// sequence has it. Returns a bit for each of the thread's two rows that contains a NaN or an infinity.
template <BwdSpec spec, Sm80BwdTile tile, int dim, int n, class RowAt, class IsThere>
FMHA_DEVICE uint32_t store_gradient(const View& view, const mma::Accumulator<n>& x, float factor, RowAt row_at, IsThere is_there) {
  constexpr FwdSpec output = as_output<spec, dim>();
  uint32_t found = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t row = threadIdx.x % 32 / 4 + 8 * r;
    const bool there = is_there(row);
    const int64_t at = there ? row_at(row) : 0;
    if constexpr (tile.vector_store && size_bytes(spec.dtype_grad) == 2) {
      store_vectors<output, false>(static_cast<uint16_t*>(view.data) + at, x, r, factor, there);
    } else {
      store_elements<output, false>(view.data, at, x, r, factor, there);
    }
    if (there && has_non_finite(x, r)) found |= 1u << r;
  }
  return found;
}

// Calls `again(row)` by the whole warp for each of its 16 rows that a lane has marked in `found` as not finite.
// `store_gradient` returns `found`.
template <class Again>
FMHA_DEVICE void for_each_found(uint32_t found, Again again) {
  __syncwarp();
#pragma unroll 1
  for (int32_t row = 0; row < 16; ++row) {
    const bool is_it = found >> row / 8 & 1 && threadIdx.x % 32 / 4 == uint32_t(row % 8);
    if (__any_sync(ptx::kAllLanes, is_it)) again(row);
  }
}

}  // namespace fmha::sm80::bwd
