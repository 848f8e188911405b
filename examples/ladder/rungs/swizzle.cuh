// 5. Swizzle: eight rows of a tile lie in eight different groups of banks.
//
// Changes   of each 128-byte line of a tile the 16-byte words are exchanged: word w of line l lies at w ^ (l % 8). The
//           tiles and products are now the library's, fmha/mma/smem_tile.cuh and fmha/mma/sm80.cuh, whose addresses are
//           one XOR and one addition of constants away from a lane's first, and which read a fragment ahead.
// Why       ldmatrix reads eight rows of 16 bytes at a time. They were all in the same four of 32 banks, and took eight
//           turns; now they take one. A row that is 16 bytes too long does it too, but neither TMA nor wgmma knows such.
// On paper  ldmatrix four clocks in place of 32: up to eight times as fast. Shared memory is then level with the tensor
//           cores, as sixteen rows to a warp have it, and exponentials are next.
// Measured  315, 6.1 times the step before: what one change to addresses is worth. The emulator counts no turn of waiting.
#pragma once
#include <fmha/mma/sm80.cuh>
#include <fmha/ptx/copy.cuh>
#include <ladder/common.cuh>

namespace ladder {

constexpr int kQueries = 64, kKeys = 64, kThreads = 128;

template <int dim>
struct Smem {
  mma::SmemTile<uint16_t, kQueries, dim> q;
  mma::SmemTile<uint16_t, kKeys, dim> k[2], v[2];
};

template <class Tile>
FMHA_DEVICE void copy_async(const Tile& to, const uint16_t* from, int32_t stride) {
  constexpr int words = Tile::dim / 8;
#pragma unroll
  for (int i = 0; i < Tile::rows * words; i += kThreads) {
    const int32_t at = i + threadIdx.x, row = at / words, column = at % words * 8;
    ptx::cp_async<16>(to.address() + mma::word_offset<Tile>(row, column), from + int64_t(row) * stride + column, 16);
  }
}

template <int dim, bool causal>
FMHA_DEVICE void attention(const Call& call, const Work& work) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<dim>& smem = *reinterpret_cast<Smem<dim>*>(raw);
  const Rows rows = rows_of_head<dim>(call, work.head);
  const int32_t warp_row = threadIdx.x / 32 * 16, first_row = work.first_query + warp_row;
  const int32_t num_blocks = blocks_of<kQueries, kKeys, causal>(call, work.first_query);
  const auto load_block = [&](int32_t block) {
    if (block < num_blocks) {
      const int64_t first_key = rows.first + int64_t(block) * kKeys * rows.stride;
      copy_async(smem.k[block % 2], call.k + first_key, rows.stride);
      copy_async(smem.v[block % 2], call.v + first_key, rows.stride);
    }
    ptx::cp_async_commit_group();
  };

  // A warp has sixteen rows, so one accumulator.
  mma::Accumulator<dim> o[1];
  mma::RegisterTile<uint16_t, kKeys> p[1];
  RowSoftmax softmax;
  o[0].clear();
  copy_async(smem.q, call.q + rows.first + int64_t(work.first_query) * rows.stride, rows.stride);
  load_block(0);
#pragma unroll 1
  for (int32_t block = 0; block < num_blocks; ++block) {
    load_block(block + 1);
    ptx::cp_async_wait_group<1>();
    __syncthreads();

    mma::Accumulator<kKeys> s[1];
    mma::sm80::product_abt<DType::Bf16, 1>(s, smem.q, warp_row, smem.k[block % 2]);
    if (causal && (block + 1) * kKeys > first_row) softmax.hide(s[0], first_row, block * kKeys);
    softmax.step(s[0], o[0], call.scale_log2);
    p[0].template from<DType::Bf16>(s[0], 0);
    mma::sm80::product_ab<DType::Bf16, 1, false>(o, p, smem.v[block % 2]);
    __syncthreads();
  }
  softmax.store(o[0], call.o + rows.first + int64_t(first_row) * rows.stride, rows.stride);
}

}  // namespace ladder
