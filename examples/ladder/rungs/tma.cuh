// 7. TMA: a warp of its own loads, by one instruction a box.
//
// Changes   four warps compute and a fifth has one thread that asks TMA for boxes of 64 rows and 128 bytes. TMA computes the
//           addresses and writes them swizzled. Barriers in shared memory say when a block is there (bytes that TMA
//           counts) and when all warps have read it, so that no warp waits for another's reading.
// Why       of the rung before each thread issues 16 cp.async and their addresses a block at D 128, beside some 200 products,
//           and __syncthreads twice a block makes the fastest warp as slow as the slowest.
// On paper  10 % of the instructions that are issued; more where warps drift apart. Tensor cores bound it as before.
// Measured  321, 1.02 times the step before. The library's sm80, without TMA, has 344: 32 rows to a warp, so that a
//           fragment serves four products, are worth more.
#pragma once
#include <fmha/mma/sm80.cuh>
#include <fmha/ptx/tma.cuh>
#include <ladder/order.cuh>

namespace ladder {

constexpr int kQueries = 64, kKeys = 64, kConsumers = 4, kStages = 2;

// Tensor maps: axes dim, query or key, head, batch; boxes of 64 elements and 64 rows.
struct Maps {
  ptx::TensorMap q, k, v;
};
constexpr int kBoxRows = 64;

template <class Tile>
FMHA_DEVICE void load_tile(const Tile& to, const ptx::TensorMap& map, ptx::Barrier& full, const Call& call, int32_t head,
                           int32_t row) {
#pragma unroll
  for (int chunk = 0; chunk < Tile::num_chunks; ++chunk)
#pragma unroll
    for (int r = 0; r < Tile::rows; r += kBoxRows)
      ptx::cp_async_bulk_tensor_4d(to.address() + chunk * Tile::chunk_bytes + r * Tile::span_bytes, map, full,
                                   chunk * Tile::span, row + r, head % call.heads, head / call.heads,
                                   ptx::CacheHint::EvictLast);
}

template <int dim, int queries, int keys, int stages>
struct TmaSmem {
  mma::SmemTile<uint16_t, queries, dim> q;
  mma::SmemTile<uint16_t, keys, dim> k[stages], v[stages];
  ptx::Barrier q_full, k_full[stages], v_full[stages];  // TMA's bytes, and the loading thread's arrival
  ptx::Barrier empty[stages];                           // one arrival a computing warp

  FMHA_DEVICE void init(int32_t warps) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(q_full, 1);
#pragma unroll
      for (int i = 0; i < stages; ++i) {
        ptx::mbarrier_init(k_full[i], 1);
        ptx::mbarrier_init(v_full[i], 1);
        ptx::mbarrier_init(empty[i], warps);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }

  // Loop of the loading thread. The first wait for a slot returns at once: the phase before the first counts as
  // complete.
  FMHA_DEVICE void load(const Maps& maps, const Call& call, const Work& work, int32_t num_blocks) {
    ptx::mbarrier_arrive_expect_tx(q_full, q.tile_bytes);
    load_tile(q, maps.q, q_full, call, work.head, work.first_query);
#pragma unroll 1
    for (int32_t block = 0; block < num_blocks; ++block) {
      const int32_t slot = block % stages;
      ptx::mbarrier_wait_parity(empty[slot], (block / stages & 1) ^ 1);
      ptx::mbarrier_arrive_expect_tx(k_full[slot], k[0].tile_bytes);
      load_tile(k[slot], maps.k, k_full[slot], call, work.head, block * keys);
      ptx::mbarrier_arrive_expect_tx(v_full[slot], v[0].tile_bytes);
      load_tile(v[slot], maps.v, v_full[slot], call, work.head, block * keys);
    }
  }
};

template <int dim>
using Smem = TmaSmem<dim, kQueries, kKeys, kStages>;

template <int dim, bool causal>
FMHA_DEVICE void attention(const Call& call, const Maps& maps, const Work& work) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<dim>& smem = *reinterpret_cast<Smem<dim>*>(raw);
  smem.init(kConsumers);
  const int32_t num_blocks = blocks_of<kQueries, kKeys, causal>(call, work.first_query);
  if (threadIdx.x / 32 == kConsumers) {
    if (threadIdx.x % 32 == 0) smem.load(maps, call, work, num_blocks);
    return;
  }

  const int32_t warp_row = threadIdx.x / 32 * 16, first_row = work.first_query + warp_row;
  mma::Accumulator<dim> o[1];
  mma::RegisterTile<uint16_t, kKeys> p[1];
  RowSoftmax softmax;
  o[0].clear();
  ptx::mbarrier_wait_parity(smem.q_full, 0);
#pragma unroll 1
  for (int32_t block = 0; block < num_blocks; ++block) {
    const int32_t slot = block % kStages, phase = block / kStages & 1;
    mma::Accumulator<kKeys> s[1];
    ptx::mbarrier_wait_parity(smem.k_full[slot], phase);
    mma::sm80::product_abt<DType::Bf16, 1>(s, smem.q, warp_row, smem.k[slot]);
    if (causal && (block + 1) * kKeys > first_row) softmax.hide(s[0], first_row, block * kKeys);
    softmax.step(s[0], o[0], call.scale_log2);
    p[0].template from<DType::Bf16>(s[0], 0);
    ptx::mbarrier_wait_parity(smem.v_full[slot], phase);
    mma::sm80::product_ab<DType::Bf16, 1, false>(o, p, smem.v[slot]);
    __syncwarp();  // one lane arrives for its warp
    ptx::mbarrier_arrive_if(smem.empty[slot], threadIdx.x % 32 == 0);
  }
  const Rows rows = rows_of_head<dim>(call, work.head);
  softmax.store(o[0], call.o + rows.first + int64_t(first_row) * rows.stride, rows.stride);
}

}  // namespace ladder
