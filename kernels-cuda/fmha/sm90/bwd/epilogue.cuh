// Stores gradients from registers to memory: dK and dV of a finished key block, and rows of any gradient.
#pragma once
#include <fmha/num.h>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/sm90/bwd/work.cuh>
#include <fmha/common/quads.cuh>

namespace fmha::sm90::bwd {

// Stores rows of a gradient times `factor`. The gradient's batch stride is 0 where keys are packed. `row`: the first of
// the thread's two in the key block; `first_column`: where the fragment's columns begin.
template <DType dtype, int dim, int n>
FMHA_DEVICE void store_elems(const mma::Accumulator<n>& grad, const View& view, const Work& work, int32_t row,
                             int32_t first_column, float factor) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t j = work.keys.begin + row + 8 * r;
    const int64_t at = row_offset(view, work.span.i_batch, int64_t(work.span.k_row) + j, work.i_head_kv);
#pragma unroll
    for (int e = 2 * r; e < grad.num_elems; e += 4) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int32_t column = first_column + grad.column(e + k) + mma::fragment_column();
        const float value = grad[e + k] * factor;
        const bool inside = j < work.keys.end && column < dim;
        if constexpr (dtype == DType::F32) {
          ptx::st_global_f32_if(static_cast<float*>(view.data) + at + column, value, inside);
        } else {
          const uint16_t half = uint16_t(ptx::cvt_rn_x2<dtype>(value, 0.f));
          ptx::st_global_u16_if(static_cast<uint16_t*>(view.data) + at + column, half, inside);
        }
      }
    }
  }
  __syncwarp();
}

// Stores eight columns of a row, of which the first `columns` exist; with `vector` 16 bytes at a time.
template <DType dtype, bool vector>
FMHA_DEVICE void store_eight(void* data, int64_t at, int32_t columns, const float (&values)[8]) {
  if constexpr (vector && dtype != DType::F32) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) words[k] = ptx::cvt_rn_x2<dtype>(values[2 * k], values[2 * k + 1]);
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + at) = {words[0], words[1], words[2], words[3]};
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < columns) store_elem<dtype>(data, at + k, values[k]);
    }
  }
}

// Number of columns that `store_rows` stages at a time, and the bytes of shared memory that a warp needs for them.
constexpr int kStagedColumns = 64, kStagingBytes = 16 * kStagedColumns * 2;

// Stores rows of a gradient 16 bytes at a time. A warp's 16 rows go through its own shared memory at `staging`, since
// exchanging them between lanes takes more instructions. A 16-byte piece's index in its row there is XORed with the
// row's last three bits.
template <DType dtype, int dim, int n>
FMHA_DEVICE void store_rows(const mma::Accumulator<n>& grad, const View& view, const Work& work, int32_t row,
                            int32_t first_column, float factor, uint32_t staging) {
  constexpr int pieces = kStagedColumns / 8, row_bytes = kStagedColumns * 2;
  const int32_t lane = threadIdx.x % 32, own_row = lane % 16, own_piece = lane / 16;
  const int32_t piece = lane % pieces, column = first_column + 8 * piece;
  const int32_t first_row = work.keys.begin + row - lane / 4;
#pragma unroll
  for (int part = 0; part < n; part += kStagedColumns) {
#pragma unroll
    for (int c = 0; c < pieces && part + 8 * c < n; c += 2) {
      const int e = part / 2 + 4 * c;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = ptx::cvt_rn_x2<dtype>(grad[e + 2 * i] * factor, grad[e + 2 * i + 1] * factor);
      ptx::stmatrix_x4(staging + own_row * row_bytes + ((c + own_piece) ^ own_row % 8) * 16, words);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < pieces / 2; ++i) {
      const int32_t r = lane / pieces + i * (32 / pieces);
      uint32_t words[4] = {};
      // A fragment may end within the staged columns, so only columns that it has are stored.
      if (part + kStagedColumns <= n || part + 8 * piece < n)
        ptx::ld_shared_v4_b32(words, staging + r * row_bytes + (piece ^ r % 8) * 16);
      const int64_t at = row_offset(view, work.span.i_batch, int64_t(work.span.k_row) + first_row + r, work.i_head_kv);
      ptx::st_global_v4_b32_if(static_cast<uint16_t*>(view.data) + at + part + column, words,
                               first_row + r < work.keys.end && part + column < dim);
    }
    __syncwarp();
  }
}

}  // namespace fmha::sm90::bwd
