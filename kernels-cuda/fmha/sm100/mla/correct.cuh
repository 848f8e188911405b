// The correct role: a warpgroup multiplies O where a row's maximum has grown, and stores O and LSE; a thread has a row
// and half of its columns.
#pragma once
#include <fmha/common/output_row.cuh>
#include <fmha/common/recompute_row.cuh>
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/cluster.cuh>
#include <fmha/ptx/f32x2.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/ptx/tmem.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm100/common/store_columns.cuh>
#include <fmha/sm100/mla/work.cuh>

namespace fmha::sm100::mla {

template <FwdSpec spec, Sm100MlaTile tile, class Keys>
struct CorrectRole {
  using Tmem = TmemPlan<spec>;
  static constexpr int chunk = 32, own_columns = kGroup / 2;  // of a group

  const FwdParams& p;
  const Work& work;
  Smem<spec, tile.listed>& smem;
  const uint32_t tmem;  // at the warp's lanes
  const Keys keys;
  const int32_t lane = lane_of_cta(), row_in_tile = row_of_lane(), half = half_of_lane();
  const bool signals = threadIdx.x % 32 == 0;  // arrives for its warp
  uint32_t stats_phase = 0;

  FMHA_DEVICE void wait_stats() {
    ptx::mbarrier_wait_parity(smem.stats_full, stats_phase);
    stats_phase ^= 1;
  }
  FMHA_DEVICE void wait_output(int32_t i) const {
    ptx::mbarrier_wait_parity(smem.o_full, i % 2);
    ptx::tcgen05_fence_after_thread_sync();
  }
  FMHA_DEVICE void load(uint32_t (&words)[chunk], int32_t group, int32_t column) const {
    ptx::tcgen05_ld(words, tmem + Tmem::o(0) + group * own_columns + column);
    ptx::tcgen05_wait_ld();
    ptx::tcgen05_loaded(words);
  }

  // O before the i-th block's products. It is left alone where no row of the warp has another maximum.
  FMHA_DEVICE void rescale(int32_t i) {
    wait_stats();
    const float correction = smem.stats[0][lane];
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.stats_empty, signals);
    wait_output(i - 1);
    if (!__any_sync(ptx::kAllLanes, correction != 1.f)) return;
#pragma unroll 1
    for (int32_t c = 0; c < Plan<spec>::groups_v * own_columns; c += chunk) {
      uint32_t words[chunk];
      load(words, 0, c);
#pragma unroll
      for (int e = 0; e < chunk; e += 2) {
        const ptx::F32x2 x = ptx::mul_f32x2({float_of(words[e]), float_of(words[e + 1])}, {correction, correction});
        words[e] = bits_of(x.low);
        words[e + 1] = bits_of(x.high);
      }
      ptx::tcgen05_st(tmem + Tmem::o(0) + c, words);
    }
    ptx::tcgen05_wait_st();
  }

  FMHA_DEVICE void store() {
    constexpr bool in_parts = tile.split_keys > 0;
    wait_stats();
    const float row_sum = smem.stats[0][row_in_tile] + smem.stats[0][row_in_tile + kRows];
    const float row_max = smem.stats[1][lane], scale_log2 = scale_log2_of<spec>(p);
    if (work.num_blocks > 0) wait_output(work.num_blocks - 1);
    const int32_t packed_row = work.first_row + row_in_tile, i = Work::query_of(p, packed_row);
    const int32_t i_head = work.head_of(p, packed_row, i);
    const bool stored = i < work.end_query;
    // The parts of a split have batches of their own, one after another, of packed sequences too.
    const int32_t o_batch = in_parts ? work.part * p.batch + work.span.i_batch : work.span.storage_batch;
    const int32_t o_row = in_parts ? 0 : work.span.q_row;
    const OutputRow to = {o_batch, o_row + i, i_head};

    // P's scale is in the sum and in O.
    constexpr float of_p = power_of_two(-p_offset_log2(spec, tile));
    const RowMax max = {__fmul_rn(row_max, scale_log2), __fmul_rn(row_max, scale_log2 * kLn2)};
    RowResult result = finish_row_of<spec>(p, keys, max, row_sum * of_p, stored ? i_head : 0).row;
    result.factor *= of_p;
    const int64_t at = to.o(p);
    float zero = 0.f;  // NaN once a number is not finite
#pragma unroll 1
    for (int32_t group = 0; group < Plan<spec>::groups_v; ++group) {
#pragma unroll 1
      for (int32_t c = 0; c < own_columns; c += chunk) {
        const int32_t column = group * kGroup + half * own_columns + c;
        float x[chunk] = {};
        if (work.num_blocks > 0) {
          uint32_t words[chunk];
          load(words, group, c);
#pragma unroll
          for (int e = 0; e < chunk; ++e) x[e] = float_of(words[e]) * result.factor;
        }
#pragma unroll
        for (int e = 0; e < chunk; ++e) zero = fmaf(x[e], 0.f, zero);
        store_columns<spec.dtype_o, tile.vector_store>(p.o.data, at + column, x, spec.head_dim_v - column, stored);
      }
    }
    if constexpr (spec.write_lse) ptx::st_global_f32_if(to.lse(p), result.lse, stored && half == 0);
    if constexpr (may_be_non_finite(spec)) {
      // A row without a key is to be 0, and is none if hidden values have reached it.
      smem.suspect[lane] = stored && is_nan(zero) && result.lse < infinity();
      ptx::bar_sync<kLaneThreads>(kSuspectsTold);
      if (half > 0) return;
      const bool found = smem.suspect[row_in_tile] != 0 || smem.suspect[row_in_tile + kRows] != 0;
      recompute(ptx::vote_ballot(found), packed_row, o_batch, o_row);
    }
  }

  // Rows of the warp whose lanes are set, each by the whole warp, after both halves are stored.
  FMHA_DEVICE void recompute(uint32_t lanes, int32_t packed_row, int32_t o_batch, int32_t o_row) const {
#pragma unroll 1
    for (int32_t from = 0; from < 32; ++from) {
      if (!(lanes >> from & 1)) continue;
      const int32_t again_row = ptx::shfl_idx(packed_row, from), i = Work::query_of(p, again_row);
      SeqSpan span = work.span;
      // Keys of a token's list are numbered by their places in it.
      if constexpr (are_of_token<Keys>()) span.seqlen_k = keys.list.count();
      RecomputedRow<spec, tile.stored, Keys> again{
          p, span, work.head_of(p, again_row, i), i, o_batch, o_row + i, work.part_keys, keys};
      again.run();
    }
  }

  FMHA_DEVICE void run() {
#pragma unroll 1
    for (int32_t i = 0; i < work.num_blocks; ++i) {
      // The first product overwrites O.
      if (i > 0) rescale(i);
      ptx::tcgen05_fence_before_thread_sync();
      ptx::mbarrier_arrive_at_if(smem.p_full, kLeader, signals);
    }
    store();
  }
};

}  // namespace fmha::sm100::mla
