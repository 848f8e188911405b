// 3. cp.async: the next block is on its way while this one is computed.
//
// Changes   two blocks of K and V in shared memory. cp.async writes there from memory past the registers, and nobody waits
//           for it before the block is wanted: wait_group<1> leaves the newest group of copies under way.
// Why       a block's 32 KB at D 128 come from L2 in a microsecond or so, in which the rung before computes nothing unless
//           another CTA of the multiprocessor does.
// On paper  time of a block: the longer of copying and computing, in place of their sum. Where shared memory
//           bounds the products, that saves what is left beside it: 10 to 30 %.
// Measured  46.2, 1.05 times the step before: another CTA of the multiprocessor hid most of it already, and 24 KB more
//           let fewer be there.
#pragma once
#include <ladder/products.cuh>

namespace ladder {

constexpr int kQueries = 64, kKeys = 64;

template <int dim>
struct Smem {
  PlainTile<kQueries, dim> q;
  PlainTile<kKeys, dim> k[2], v[2];
  PlainTile<kQueries, kKeys> p;
};

template <int dim, bool causal>
FMHA_DEVICE void attention(const Call& call) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<dim>& smem = *reinterpret_cast<Smem<dim>*>(raw);
  const Work work = work_of_cta<kQueries>(call);
  const Rows rows = rows_of_head<dim>(call, work.head);
  const int32_t warp_row = threadIdx.x / 32 * 16, first_row = work.first_query + warp_row;
  const int32_t num_blocks = blocks_of<kQueries, kKeys, causal>(call, work.first_query);

  // Each block is one group of copies, and an empty group follows the last, so that the number of groups to wait for
  // never changes.
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
    __syncthreads();  // what every thread has copied of this block is there

    mma::Accumulator<kKeys> s;
    scores(s, smem.q, warp_row, smem.k[block % 2]);
    if (causal && (block + 1) * kKeys > first_row) softmax.hide(s, first_row, block * kKeys);
    softmax.step(s, o, call.scale_log2);

#pragma unroll
    for (int e = 0; e < kKeys / 2; e += 2) {
      const int32_t row = warp_row + threadIdx.x % 32 / 4 + 8 * s.row(e), column = mma::fragment_column() + s.column(e);
      *reinterpret_cast<uint32_t*>(&smem.p.elems[row][column]) = ptx::cvt_rn_x2<DType::Bf16>(s[e], s[e + 1]);
    }
    __syncwarp();
    add_values(o, [&](uint32_t (&a)[4], int key) { ptx::ldmatrix_x4(a, smem.p.down(warp_row, key)); }, smem.v[block % 2]);
    __syncthreads();  // all have read the slot that the next turn loads into
  }
  softmax.store(o, call.o + rows.first + int64_t(first_row) * rows.stride, rows.stride);
}

}  // namespace ladder
