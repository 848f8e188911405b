// A row-major V of 8-bit elements from [keys, dim] to [dim, keys], in which wgmma reads it.
//
// Sixteen keys of 32 dimensions at a time. A transposing ldmatrix moves pairs of bytes: lane 4 p + t receives
// dimensions 2 p and 2 p + 1 of the keys 2 t and 2 t + 1 of an 8 x 16 matrix. Two prmt of the registers of keys 0..7
// and 8..15 part the dimensions: dimension 2 p of keys {2 t, 2 t + 1, 8 + 2 t, 9 + 2 t}, and 2 p + 1 of the same.
// Stored as four bytes of a row the keys have the order that P has in its registers (mma/fp8_operand.cuh), so P needs
// no exchange. The even dimensions of sixteen become the first eight rows, the odd ones the others: stored in their
// own places, two apart, eight rows would lie in half of the banks. The epilogue knows (`dim_at`).
#pragma once
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/matrix.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/sm90/fwd/config.cuh>

namespace fmha::sm90 {

// Dimension of V that column `column` of O holds, for a V that was transposed here.
FMHA_DEVICE constexpr int dim_at(int column) { return column / 16 * 16 + column % 8 * 2 + column / 8 % 2; }
// Column of O that holds dimension `dim`.
FMHA_DEVICE constexpr int column_of(int dim) { return dim / 16 * 16 + dim % 2 * 8 + dim % 16 / 2; }

// Transposes a block; each warp takes sixteen of 32 keys. `batch` loads are issued before the first store, so that
// stores do not wait for single loads. The role's registers limit their number, and more than 160 dimensions are
// processed in parts.
template <int batch, class Raw, class Turned>
FMHA_DEVICE void turn_values(const Raw& raw, const Turned& turned) {
  constexpr int all_steps = Turned::rows / 32, steps = all_steps > 5 ? Raw::span / 32 : all_steps;
  const int32_t matrix = threadIdx.x % 32 / 8, row = threadIdx.x % 8, key = threadIdx.x / 32 % kValueWarps * 16;
  const uint32_t from = raw.address() + fmha::mma::word_offset<Raw>(key + matrix % 2 * 8 + row, matrix / 2 * 16);
  const uint32_t to = turned.address() + fmha::mma::word_offset<Turned>(matrix * 8 + row, key);
#pragma unroll 1
  for (int32_t at = 0; at < all_steps / steps * Raw::rows; at += 32) {
    const int32_t part = at / Raw::rows, dim0 = part * (steps * 32), key0 = at - part * Raw::rows;
    const uint32_t from_part = fmha::mma::beyond<Raw>(from, key0, dim0), to_part = fmha::mma::beyond<Turned>(to, dim0, key0);
#pragma unroll
    for (int first = 0; first < steps; first += batch) {
      uint32_t v[batch][4];  // keys 0..7 and 8..15 of the first sixteen dimensions, then of the others
#pragma unroll
      for (int i = 0; i < batch && first + i < steps; ++i)
        ptx::ldmatrix_x4_trans(v[i], fmha::mma::beyond<Raw>(from_part, 0, (first + i) * 32));
#pragma unroll
      for (int i = 0; i < batch && first + i < steps; ++i) {
        const uint32_t parted[4] = {ptx::prmt(v[i][0], v[i][1], 0x6420), ptx::prmt(v[i][0], v[i][1], 0x7531),
                                    ptx::prmt(v[i][2], v[i][3], 0x6420), ptx::prmt(v[i][2], v[i][3], 0x7531)};
        ptx::stmatrix_x4(fmha::mma::beyond<Turned>(to_part, (first + i) * 32, 0), parted);
      }
    }
  }
}

}  // namespace fmha::sm90
