// 8. wgmma: four warps are one operand of 64 rows, and the tensor cores read shared memory themselves.
//
// Changes   two warpgroups of 64 queries each compute, blocks have 128 keys, and a third warpgroup's one thread loads. wgmma
//           takes K, V and Q by descriptors from where TMA has put them; P comes from registers, as an accumulator has it.
//           The loading warps give their registers to the others: 240 a thread hold O, S and P.
// Why       mma.sync reaches some 60 % of Hopper's tensor cores, and each fragment of K and V passed through registers,
//           once for each warp. Now 64 rows share what is read, and no ldmatrix is issued.
// On paper  989 TFLOP/s, of which a warpgroup's products take half the time and its softmax the other half, more or
//           less: the second warpgroup computes meanwhile, if nothing makes both do the same at once. 450 to 600.
// Measured  547, 1.7 times the step before; the library's sm90 746.
//
// Additions of the library's kernel: products under way beside the softmax of the block before, turns that keep the two
// warpgroups apart, lazy rescaling, a persistent grid whose next tile's loads start early. docs/kernels/sm90-fwd.md has
// each.
#pragma once
#include <fmha/mma/sm90.cuh>
#include <ladder/tma.cuh>

namespace ladder::wgmma {

constexpr int kQueries = 128, kKeys = 128, kConsumers = 2, kStages = 2;

template <int dim>
using Smem = TmaSmem<dim, kQueries, kKeys, kStages>;

template <int dim, bool causal>
FMHA_DEVICE void attention(const Call& call, const Maps& maps, const Work& work) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<dim>& smem = *reinterpret_cast<Smem<dim>*>(raw);
  smem.init(4 * kConsumers);
  const int32_t num_blocks = blocks_of<kQueries, kKeys, causal>(call, work.first_query);
  if (threadIdx.x / 128 == kConsumers) {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x % 128 == 0) smem.load(maps, call, work, num_blocks);
    return;
  }
  ptx::setmaxnreg_inc<240>();

  const int32_t group_row = threadIdx.x / 128 * 64, warp_row = threadIdx.x / 32 * 16;
  const int32_t first_row = work.first_query + warp_row;
  mma::Accumulator<dim> o;
  mma::Accumulator<kKeys> s;
  mma::RegisterTile<uint16_t, kKeys> p;
  RowSoftmax softmax;
  o.clear();
  ptx::mbarrier_wait_parity(smem.q_full, 0);
#pragma unroll 1
  for (int32_t block = 0; block < num_blocks; ++block) {
    const int32_t slot = block % kStages, phase = block / kStages & 1;
    ptx::mbarrier_wait_parity(smem.k_full[slot], phase);
    mma::sm90::start_product_abt<DType::Bf16, 1>(s, smem.q, group_row, smem.k[slot]);
    ptx::wgmma_wait_group<0>();
    ptx::written_here(s.elems);
    if (causal && (block + 1) * kKeys > first_row) softmax.hide(s, first_row, block * kKeys);
    softmax.step(s, o, call.scale_log2);
    p.template from<DType::Bf16>(s, 0);
    ptx::mbarrier_wait_parity(smem.v_full[slot], phase);
    mma::sm90::start_product_ab<DType::Bf16>(o, p, smem.v[slot]);
    ptx::wgmma_wait_group<0>();
    ptx::written_here(o.elems);
    ptx::mbarrier_arrive_if(smem.empty[slot], threadIdx.x % 32 == 0);
  }
  const Rows rows = rows_of_head<dim>(call, work.head);
  softmax.store(o, call.o + rows.first + int64_t(first_row) * rows.stride, rows.stride);
}

}  // namespace ladder::wgmma
