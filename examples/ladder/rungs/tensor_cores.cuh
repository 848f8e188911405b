// 2. Tensor cores: both products by mma.sync.
//
// Changes   four warps have sixteen queries each. S and O are mma's accumulators, in registers; a row of S lies in four
//           lanes, so that its maximum is two shuffles. P goes to shared memory, rounded to bf16, to come back as an operand.
// Why       one mma.m16n8k16 is 2048 multiply-adds: 64 a lane, in place of one.
// On paper  1024 multiply-adds a clock and multiprocessor, of f32 lanes 128: eight times as fast. mma.sync has some 60 %
//           of what a Hopper multiprocessor can do, 490 TFLOP/s at 1.8 GHz. But sixteen rows to a warp take a fragment of
//           K or V for two products alone: 512 bytes of shared memory, four clocks, for four clocks of the tensor
//           cores. And rows that lie 256 bytes apart begin in the same bank: eight reads in place of one, so that
//           shared memory bounds it at an eighth, 60 TFLOP/s.
// Measured  44.0, 2.0 times the step before. The emulator counts 287 thousand turns of waiting for a bank, beside 153
//           thousand instructions, where there were 4 thousand.
#pragma once
#include <ladder/products.cuh>

namespace ladder {

constexpr int kQueries = 64, kKeys = 64;

template <int dim>
struct Smem {
  PlainTile<kQueries, dim> q;
  PlainTile<kKeys, dim> k, v;
  PlainTile<kQueries, kKeys> p;
};

// Copies a tile from memory through registers to shared memory: each thread waits for its own loads.
template <class Tile>
FMHA_DEVICE void copy(const Tile& to, const uint16_t* from, int32_t stride) {
  constexpr int words = Tile::dim / 8;
#pragma unroll 4
  for (int i = 0; i < Tile::rows * words; i += kThreads) {
    const int32_t at = i + threadIdx.x, row = at / words, column = at % words * 8;
    uint32_t word[4];
    ptx::ld_global_v4(word, from + int64_t(row) * stride + column);
    ptx::st_shared_v4(to.address(row, column), word);
  }
}

template <int dim, bool causal>
FMHA_DEVICE void attention(const Call& call) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<dim>& smem = *reinterpret_cast<Smem<dim>*>(raw);
  const Work work = work_of_cta<kQueries>(call);
  const Rows rows = rows_of_head<dim>(call, work.head);
  const int32_t warp_row = threadIdx.x / 32 * 16, first_row = work.first_query + warp_row;

  mma::Accumulator<dim> o;
  RowSoftmax softmax;
  o.clear();
  copy(smem.q, call.q + rows.first + int64_t(work.first_query) * rows.stride, rows.stride);
  const int32_t num_blocks = blocks_of<kQueries, kKeys, causal>(call, work.first_query);
#pragma unroll 1
  for (int32_t block = 0; block < num_blocks; ++block) {
    const int64_t first_key = rows.first + int64_t(block) * kKeys * rows.stride;
    __syncthreads();  // all have read the block before
    copy(smem.k, call.k + first_key, rows.stride);
    copy(smem.v, call.v + first_key, rows.stride);
    __syncthreads();

    mma::Accumulator<kKeys> s;
    scores(s, smem.q, warp_row, smem.k);
    if (causal && (block + 1) * kKeys > first_row) softmax.hide(s, first_row, block * kKeys);
    softmax.step(s, o, call.scale_log2);

#pragma unroll
    for (int e = 0; e < kKeys / 2; e += 2) {
      const int32_t row = warp_row + threadIdx.x % 32 / 4 + 8 * s.row(e), column = mma::fragment_column() + s.column(e);
      *reinterpret_cast<uint32_t*>(&smem.p.elems[row][column]) = ptx::cvt_rn_x2<DType::Bf16>(s[e], s[e + 1]);
    }
    __syncwarp();  // its rows of P are the warp's own
    add_values(o, [&](uint32_t (&a)[4], int key) { ptx::ldmatrix_x4(a, smem.p.down(warp_row, key)); }, smem.v);
    __syncwarp();
  }
  softmax.store(o, call.o + rows.first + int64_t(first_row) * rows.stride, rows.stride);
}

}  // namespace ladder
