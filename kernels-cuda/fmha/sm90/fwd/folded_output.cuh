// O of a warpgroup's rows over the parts of the keys that are done, where a CTA walks all parts of its rows and folds
// them (common/fold.cuh): no part of another CTA is to be merged.
//
// The tensor cores sum a part from nothing, and registers have no room for a second O. So the fold lies in shared
// memory where that has room, else in the workspace, a place for each CTA, which alone writes it and reads it back:
// 64 KB at D 128. A thread's elements lie 16 bytes at a time, a warp's side by side. A part is added when the next one
// begins, under the other warpgroup's products; the last one is added in registers, and a tile of one part touches no
// memory.
#pragma once
#include <fmha/common/fold.cuh>
#include <fmha/common/output_row.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/sm90/fwd/config.cuh>

namespace fmha::sm90 {

template <FwdSpec spec, Sm90Tile tile>
struct FoldedOutput {
  using Output = mma::Accumulator<product_dim(spec.head_dim_v, spec.dtype_v)>;
  static constexpr int num_chunks = Output::num_elems / 4, threads = mma::kWarpgroup * num_consumers(tile);
  static constexpr int blocks_of_part = max(tile.fold_keys / tile.block_n, 1);
  static constexpr bool in_shared = tile.fold_in_shared;
  // Number of 16-byte chunks in flight, four registers each: all of them where registers are free, since each wait for
  // the L2 takes long.
  static constexpr bool is_crowded = Output::columns > 128 || num_consumers(tile) > 2;
  static constexpr int free_chunks = Output::columns > 192 ? 4 : is_crowded ? 8 : 16;
  static constexpr int at_once = min(num_chunks, in_shared ? 4 : free_chunks);

  FMHA_DEVICE static uint32_t thread() { return threadIdx.x - mma::kWarpgroup; }
  // Loads or stores the n-th four numbers of a thread's fold: those of O, and behind them the maxima and sums of its
  // two rows.
  FMHA_DEVICE static void load(const FwdParams& p, int n, uint32_t of, float (&four)[4]) {
    if constexpr (in_shared) {
      ptx::ld_shared_v4_f32(four, shared_place(n, of));
    } else {
      ptx::ld_global_v4_f32(four, place(p, n, of));
    }
  }
  FMHA_DEVICE static void store(const FwdParams& p, int n, uint32_t of, const float (&four)[4]) {
    if constexpr (in_shared) {
      ptx::st_shared_v4_f32(shared_place(n, of), four[0], four[1], four[2], four[3]);
    } else {
      ptx::st_global_v4_f32(place(p, n, of), four[0], four[1], four[2], four[3]);
    }
  }
  FMHA_DEVICE static uint32_t shared_place(int n, uint32_t of) {
    extern __shared__ __align__(1024) unsigned char raw[];
    return ptx::shared_address(raw) + (n * threads + of) * 16;
  }
  FMHA_DEVICE static float* place(const FwdParams& p, int n, uint32_t of) {
    const uint64_t begin = (uint64_t(p.workspace) + 4 * kSharesAt + kFoldAlign - 1) / kFoldAlign * kFoldAlign;
    return reinterpret_cast<float*>(begin) + ((uint64_t(blockIdx.x) * (num_chunks + 1) + n) * threads + of) * 4;
  }

  // Highest block that a tile's rows walk; blocks that only the cluster's other CTA sees lie above it. A tile without
  // keys has block -1.
  FMHA_DEVICE static int32_t highest_block(const Work& work) {
    return max(work.last_block - (can_hide_blocks<spec, tile>() ? work.num_hidden : 0), 0);
  }
  // Whether a block lies in the part of the keys that a tile begins with.
  FMHA_DEVICE static bool is_in_first_part(const Work& work, int32_t block) {
    return block / blocks_of_part == highest_block(work) / blocks_of_part;
  }
  FMHA_DEVICE static bool has_several_parts(const Work& work) {
    return !is_in_first_part(work, max(work.last_block - work.num_blocks + 1, 0));
  }

  // Adds a part of the keys to the parts above it; a tile's first part has none above. The result stays in `o` and in
  // the row ends if the part is the tile's last, otherwise it goes to memory.
  template <bool last>
  FMHA_DEVICE static void add(const FwdParams& p, bool first, PartEnd (&ends)[2], Output& o) {
    float state[4] = {-infinity(), 0.f, -infinity(), 0.f};
    const int quad_lane = threadIdx.x % 4, first_of_quad = threadIdx.x % 32 - quad_lane;
    if (!first) load(p, num_chunks, thread() / 4, state);
    FoldWeights weights[2];
    const bool seen[2] = {ends[0].result.lse != -infinity(), ends[1].result.lse != -infinity()};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      FoldedRow row = {state[2 * r], state[2 * r + 1]};
      // The sum of a row that must be recomputed is set to -1, and stays -1. Any of the row's four threads may have
      // found that it must.
      const bool found = ptx::vote_ballot(ends[r].again) >> first_of_quad & 15;
      const bool again = found || row.sum < 0.f;
      weights[r] = row.take(ends[r].result.lse);
      state[2 * r] = row.top;
      state[2 * r + 1] = again ? -1.f : row.sum;
      if constexpr (last) ends[r].again = again;
    }
    if constexpr (!last) {
      __syncwarp();
      if (quad_lane == 0) store(p, num_chunks, thread() / 4, state);
      __syncwarp();
    }
#pragma unroll
    for (int begin = 0; begin < num_chunks; begin += at_once) {
      float old[at_once][4];
#pragma unroll
      for (int c = 0; c < at_once; ++c) {
        // O before the first part is -0, the neutral element of addition.
        old[c][0] = old[c][1] = old[c][2] = old[c][3] = -0.f;
      }
      if (!first) {
#pragma unroll
        for (int c = 0; c < at_once; ++c) {
          if (begin + c < num_chunks) load(p, begin + c, thread(), old[c]);
        }
      }
#pragma unroll
      for (int c = 0; c < at_once; ++c) {
        if (begin + c >= num_chunks) continue;
        float next[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = 4 * (begin + c) + e, r = Output::row(at);
          next[e] = fold(old[c][e], element_of_part(__fmul_rn(o[at], ends[r].result.factor), seen[r]), weights[r]);
          // A row that sees no key gets +0 in place of the -0 of an empty fold: the launch that folds parts gives +0
          // too.
          if constexpr (last) o[at] = state[2 * r + 1] == 0.f ? 0.f : next[e];
        }
        if constexpr (!last) store(p, begin + c, thread(), next);
      }
    }
    if constexpr (last) {
      // A row that sees no key has the sum 0, and O of an empty fold.
#pragma unroll
      for (int r = 0; r < 2; ++r)
        ends[r].result = {state[2 * r + 1] == 0.f ? 0.f : 1.f, FoldedRow{state[2 * r], state[2 * r + 1]}.lse()};
    }
  }
};

}  // namespace fmha::sm90
