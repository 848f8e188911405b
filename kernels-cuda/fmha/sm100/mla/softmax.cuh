// The softmax role: a warpgroup turns a block's scores into P, in shared memory. Lane l of tensor memory has row
// l % 64, of the block's keys the first half or the last; the two threads of a row tell each other their maxima.
#pragma once
#include <fmha/online_softmax.h>
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/cluster.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/f32x2.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/ptx/tmem.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm100/mla/work.cuh>

namespace fmha::sm100::mla {

using ptx::F32x2;

template <FwdSpec spec, Sm100MlaTile tile>
struct SoftmaxRole {
  using Tmem = TmemPlan<spec>;
  static constexpr int n = kHalf, chunk = 32;

  const FwdParams& p;
  const Work& work;
  Smem<spec, tile.listed>& smem;
  const uint32_t tmem;  // at the warp's lanes
  const int32_t lane = lane_of_cta(), row_in_tile = row_of_lane(), half = half_of_lane();
  const bool signals = threadIdx.x % 32 == 0;  // arrives for its warp
  const float scale_log2 = scale_log2_of<spec>(p);
  const int32_t row = work.first_row + row_in_tile, query = Work::query_of(p, row);
  float row_max = -infinity(), row_sum = 0.f;  // of exp2((S - row_max) * scale_log2), of this half of the keys
  uint32_t stats_phase = 1;

  FMHA_DEVICE int32_t first_key(int32_t i) const { return (work.last_block - i) * kKeys + half * kHalf; }

  FMHA_DEVICE void load(float (&s)[n], int32_t slot) const {
    uint32_t words[n / chunk][chunk];
#pragma unroll
    for (int c = 0; c < n / chunk; ++c) ptx::tcgen05_ld(words[c], tmem + Tmem::s(slot) + c * chunk);
    ptx::tcgen05_wait_ld();
#pragma unroll
    for (int c = 0; c < n / chunk; ++c) {
      ptx::tcgen05_loaded(words[c]);
#pragma unroll
      for (int e = 0; e < chunk; ++e) s[c * chunk + e] = float_of(words[c][e]);
    }
  }

  // The row's scores of a half of a block.
  struct Fragment {
    static constexpr int count = n, rows = 1;
    float (&s)[n];
    const SeqSpan& span;
    int32_t query, key;

    FMHA_DEVICE static int row(int) { return 0; }
    FMHA_DEVICE float at(int e) const { return s[e]; }
    FMHA_DEVICE void set(int e, float x) { s[e] = x; }
    FMHA_DEVICE Pair pair(int e) const { return {query, key, 0, e}; }
    FMHA_DEVICE bool there(int e) const { return query < span.seqlen_q && pair(e).j() < span.seqlen_k; }
  };
  FMHA_DEVICE void modify(float (&s)[n], int32_t key) const {
    if constexpr (modifies_score(spec)) {
      apply(Fragment{s, work.span, query, key}, [&](int) {
        // The product has its sign already.
        const float scale = (spec.negative_scale ? -1.f : 1.f) * p.softmax_scale;
        return Score<spec>::of(p, work.span, query < work.span.seqlen_q ? work.head_of(p, row, query) : 0, scale);
      });
    }
  }
  // Hides keys of the i-th block that the list has not. Key 16 k + 4 w + n of a half is bit 4 k + n of warp w's bits of
  // that half.
  FMHA_DEVICE void hide_absent(float (&s)[n], int32_t i) const {
    if constexpr (tile.listed) {
      ptx::mbarrier_wait_parity(smem.list.told[i % kWords], i / kWords % 2);
      uint32_t words[kWarps];
      ptx::ld_shared_v4_b32(words, ptx::shared_address(smem.list.present[i % kWords]));
#pragma unroll
      for (uint32_t& word : words) word >>= 16 * half;
      if (ptx::uniform(int32_t(words[0] & words[1] & words[2] & words[3] & 0xffff)) == 0xffff) return;
#pragma unroll
      for (int e = 0; e < n; ++e) {
        if (!(words[e / 4 % kWarps] >> (e / 16 * 4 + e % 4) & 1)) s[e] = -infinity();
      }
    }
  }
  // Hides what the row does not see of the i-th block.
  FMHA_DEVICE void mask(float (&s)[n], int32_t key, int32_t i) const {
    if constexpr (tile.listed) {
      hide_absent(s, i);
    } else {
      const int32_t warp_row = work.first_row + row_in_tile / 32 * 32;
      const KnownMask<spec.mask, false> mask = {work.band, work.span.seqlen_k};
      if (!mask.cuts(Work::query_of(p, warp_row), Work::query_of(p, warp_row + 31), {key, key + n})) return;
      const auto columns = mask.columns(query, key);
#pragma unroll
      for (int e = 0; e < n; ++e) {
        if (!columns.has(e)) s[e] = -infinity();
      }
    }
  }

  // The largest of the row's scores and of the maximum so far; NaN, if one of them is. Four chains of two numbers a
  // link.
  FMHA_DEVICE float largest(const float (&s)[n], int32_t i) {
    float top[4] = {ptx::max3_nan(row_max, s[0], s[1]), ptx::max_nan(s[2], s[3]), ptx::max_nan(s[4], s[5]),
                    ptx::max_nan(s[6], s[7])};
#pragma unroll
    for (int e = 8; e < n; e += 2) top[e / 2 % 4] = ptx::max3_nan(top[e / 2 % 4], s[e], s[e + 1]);
    const float own = ptx::max_nan(ptx::max3_nan(top[0], top[1], top[2]), top[3]);
    // The places of two blocks before are read no more, since all threads have met at the barrier of the block before.
    smem.row_max[i % 2][half][row_in_tile] = own;
    ptx::bar_sync<kLaneThreads>(kMaximaTold);
    return ptx::max_nan(own, smem.row_max[i % 2][1 - half][row_in_tile]);
  }

  // Hands the row's correction, or at the end its sum and maximum, to the correct role's thread of the lane.
  FMHA_DEVICE void tell(float first, float second) {
    ptx::mbarrier_wait_parity(smem.stats_empty, stats_phase);
    stats_phase ^= 1;
    smem.stats[0][lane] = first;
    smem.stats[1][lane] = second;
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.stats_full, signals);
  }

  FMHA_DEVICE static float sum(const float (&s)[n], float before) {
    F32x2 chains[4] = {{before, 0.f}};
#pragma unroll
    for (int e = 0; e < n; e += 2) chains[e / 2 % 4] = ptx::add_f32x2(chains[e / 2 % 4], {s[e], s[e + 1]});
    const F32x2 total = ptx::add_f32x2(ptx::add_f32x2(chains[0], chains[1]), ptx::add_f32x2(chains[2], chains[3]));
    return total.low + total.high;
  }

  FMHA_DEVICE void store(const float (&s)[n]) const {
    const uint32_t to = smem.p[half].address();
#pragma unroll
    for (int e = 0; e < n; e += 8) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = ptx::cvt_rn_x2<spec.dtype_v>(s[e + 2 * w], s[e + 2 * w + 1]);
      ptx::st_shared_v4(to + fmha::mma::word_offset<Chunk>(row_in_tile, e), words);
    }
  }

  FMHA_DEVICE void step(int32_t i) {
    const int32_t key = first_key(i);
    float s[n];
    ptx::mbarrier_wait_parity(smem.s_full[i % 2], i / 2 % 2);
    ptx::tcgen05_fence_after_thread_sync();
    load(s, i % 2);
    modify(s, key);
    mask(s, key, i);
    float new_max = largest(s, i);
    // A maximum that grew little is kept: P may then exceed 1, up to 2^lazy_rescale_log2.
    if (row_max != -infinity() && (new_max - row_max) * scale_log2 <= float(tile.lazy_rescale_log2)) new_max = row_max;
    const float reference = finite_or_zero(new_max);
    const float correction = ptx::ex2_approx_ftz((row_max - reference) * scale_log2);
    row_max = new_max;
    if (i > 0) tell(correction, 0.f);

    constexpr float offset_log2 = float(p_offset_log2(spec, tile));
    float shift = reference * scale_log2 - offset_log2;
    if (fabsf(reference * scale_log2) >= kLargestShift) {
      shift = -offset_log2;
#pragma unroll
      for (int e = 0; e < n; ++e) s[e] -= reference;
    }
#pragma unroll
    for (int e = 0; e < n; e += 2) {
      const F32x2 x = ptx::fma_f32x2({s[e], s[e + 1]}, {scale_log2, scale_log2}, {-shift, -shift});
      s[e] = ptx::ex2_approx_ftz(x.low);
      s[e + 1] = ptx::ex2_approx_ftz(x.high);
    }
    // The products with the block before have read P.
    if (i > 0) ptx::mbarrier_wait_parity(smem.o_full, (i - 1) % 2);
    store(s);
    ptx::fence_proxy_async();
    ptx::tcgen05_fence_before_thread_sync();
    __syncwarp();
    if (signals) ptx::mbarrier_arrive_release_at(smem.p_full, kLeader);
    __syncwarp();
    row_sum = sum(s, row_sum * correction);
  }

  FMHA_DEVICE void run() {
#pragma unroll 1
    for (int32_t i = 0; i < work.num_blocks; ++i) step(i);
    tell(row_sum, row_max);
  }
};

}  // namespace fmha::sm100::mla
