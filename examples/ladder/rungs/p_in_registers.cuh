// 4. P in registers: an accumulator, packed, is an operand.
//
// Changes   P no longer goes through shared memory. Of an accumulator a lane has rows l / 4 and that + 8, columns
//           2 (l % 4) and the next of each eight; of operand A it is to have the same ones. So two numbers are rounded to
//           one register, and that is all.
// Why       stores, loads and 8 KB less; P's rows lie 128 bytes apart, all in the same banks, so that each store and
//           each read of them takes eight turns.
// On paper  of a block's reads of shared memory, 16 ldmatrix of P stand beside 128 of K and V at D 128 (beside 64 at
//           D 64), and the stores are as many again: 15 to 30 % of the traffic that bounds it.
// Measured  51.4, 1.11 times the step before; at D 64 1.22 times.
#pragma once
#include <ladder/products.cuh>

namespace ladder {

constexpr int kQueries = 64, kKeys = 64;

template <int dim>
struct Smem {
  PlainTile<kQueries, dim> q;
  PlainTile<kKeys, dim> k[2], v[2];
};

template <int dim, bool causal>
FMHA_DEVICE void attention(const Call& call) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<dim>& smem = *reinterpret_cast<Smem<dim>*>(raw);
  const Work work = work_of_cta<kQueries>(call);
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

  mma::Accumulator<dim> o;
  RowSoftmax softmax;
  o.clear();
  copy_async(smem.q, call.q + rows.first + int64_t(work.first_query) * rows.stride, rows.stride);
  load_block(0);
#pragma unroll 1
  for (int32_t block = 0; block < num_blocks; ++block) {
    load_block(block + 1);
    ptx::cp_async_wait_group<1>();
    __syncthreads();

    mma::Accumulator<kKeys> s;
    scores(s, smem.q, warp_row, smem.k[block % 2]);
    if (causal && (block + 1) * kKeys > first_row) softmax.hide(s, first_row, block * kKeys);
    softmax.step(s, o, call.scale_log2);

    // Loads sixteen columns of P: a lane's operand is eight numbers of its accumulator, in order.
    const auto load_p = [&](uint32_t (&a)[4], int key) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = ptx::cvt_rn_x2<DType::Bf16>(s[key / 2 + 2 * i], s[key / 2 + 2 * i + 1]);
    };
    add_values(o, load_p, smem.v[block % 2]);
    __syncthreads();
  }
  softmax.store(o, call.o + rows.first + int64_t(first_row) * rows.stride, rows.stride);
}

}  // namespace ladder
