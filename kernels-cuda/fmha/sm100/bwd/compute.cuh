// The compute role: two warpgroups turn a block's S^T to P and its dP^T to dS. Each thread has a key, and each
// warpgroup half of the queries.
//
//   waits for S, loads it; P = exp2(S - LSE), stored over S for dV += P^T dO
//   waits for dP, loads it; dS = P (dP - delta), stored to shared memory for dQ and dK
//
// A CTA without dV stores no P; one of dV alone has the first line. Before all blocks they store K or V to tensor
// memory where it is an operand there.
//
// The mask hides from a key's row the queries before a first one and from a last one on: two numbers per thread and
// block.
#pragma once
#include <fmha/philox.h>
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/f32x2.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/ptx/tmem.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm100/bwd/work.cuh>
#include <fmha/sm100/common/shown_columns.cuh>

namespace fmha::sm100::bwd {

template <BwdSpec spec, Sm100BwdTile tile, Part part, class SeenKeys>
struct ComputeRole {
  using Shared = Smem<spec, tile, part>;
  using Stats = typename Shared::Stats;
  using Tmem = TmemPlan<spec, part>;
  using Pairs = ScorePair<spec, tile>;
  using Modifiers = BwdScore<spec, tile>;
  static constexpr FwdSpec kFwd = spec.fwd;
  static constexpr DType dtype = kFwd.dtype_qk;
  static constexpr bool has_slopes = num_maps(kFwd) > 0;
  static constexpr int kHalf = Shape<spec>::half, chunk = 32, num_chunks = kHalf / chunk;

  const BwdParams& p;
  Shared& smem;
  const Work& work;
  const SeenKeys& seen_keys;
  const uint32_t tmem;  // at the warp's lanes
  const int32_t half;   // of a block's queries
  const int32_t row = threadIdx.x % kBlock, key = work.keys.begin + row;
  const bool signals = threadIdx.x % 32 == 0;  // arrives for its warp
  const Pairs pairs = {p, work.span, {work.band, work.span.seqlen_k}};

  float probs[kHalf];
  // The slopes of a block's scores, two to a register.
  uint32_t slopes[has_slopes ? kHalf / 2 : 1];
  uint32_t kept[kFwd.dropout ? num_chunks : 1];  // what dropout keeps, a bit a query

  // Which queries of the warpgroup's half see the thread's key under the band.
  FMHA_DEVICE Range seen_of(int32_t first_query) const {
    const Range seen = pairs.mask.queries(key, first_query);
    const int32_t end = key < work.keys.end ? min(seen.end, work.span.seqlen_q - first_query) : 0;
    return {max(seen.begin, 0), end};
  }
  // Which queries of the half see the thread's key under masks, one bit each; in a kernel without lists, the band's
  // range of queries.
  FMHA_DEVICE auto shown_of(const QueryBlock& block, int32_t first_query, Range seen, bool is_cut) const {
    if constexpr (!SeenKeys::has_tile_list) {
      return seen;
    } else {
      auto shown = ShownColumns<kHalf>::all(false);
      shown.add(seen.begin, seen.end);
      if (is_cut) shown.leave(seen_keys.template columns<kHalf, true>(work.span, block.i_head, key, first_query));
      return shown;
    }
  }
  // Sets hidden elements of a chunk to 0, since 0 times a hidden NaN would be NaN.
  FMHA_DEVICE static void hide(float* x, int c, const ShownColumns<kHalf>& shown) {
#pragma unroll
    for (int e = 0; e < chunk; ++e) {
      if (!shown.has(c * chunk + e)) x[e] = 0.f;
    }
  }
  FMHA_DEVICE static void hide(float* x, int c, Range seen) {
#pragma unroll
    for (int e = 0; e < chunk; ++e) {
      if (c * chunk + e < seen.begin || c * chunk + e >= seen.end) x[e] = 0.f;
    }
  }

  // One call of the generator decides four keys of a query, held by four
  // lanes: each lane calls for every fourth query, then they exchange bits.
  FMHA_DEVICE void decide(int32_t i_head, int32_t first_query) {
    if constexpr (kFwd.dropout) {
      const int32_t batch_head = head_of_whole(p.fwd, work.span.i_batch, i_head), own = threadIdx.x % 4;
#pragma unroll
      for (int c = 0; c < num_chunks; ++c) {
        uint32_t called = 0;
#pragma unroll 1
        for (int32_t g = 0; g < chunk / 4; ++g) {
          const auto words = dropout_words(p.fwd, batch_head, first_query + c * chunk + 4 * g + own, key / 4);
#pragma unroll
          for (int k = 0; k < 4; ++k) called |= uint32_t(words[k] < p.fwd.dropout_threshold) << (4 * g + k);
        }
        kept[c] = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t other = __shfl_sync(ptx::kAllLanes, called, (threadIdx.x % 32 & ~3) + k);
          kept[c] |= (other >> own & 0x11111111u) << k;
        }
      }
    }
  }

  // Loads a chunk of S or dP from tensor memory; the chunk begins at `column`.
  FMHA_DEVICE void load(float (&x)[chunk], int column, int c) const {
    uint32_t words[chunk];
    ptx::tcgen05_ld(words, tmem + column + half * kHalf + c * chunk);
    ptx::tcgen05_wait_ld();
    ptx::tcgen05_loaded(words);
#pragma unroll
    for (int e = 0; e < chunk; ++e) x[e] = float_of(words[e]);
  }

  // Computes P of a chunk whose scores are in `x`.
  template <bool any_far>
  FMHA_DEVICE void exponentiate(const float (&x)[chunk], int c, const Modifiers& modifiers,
                                const Stats& stats, int32_t first_query) {
    const int first = half * kHalf + c * chunk;
    float* const to = probs + c * chunk;
    if constexpr (!any_far && !Modifiers::modifies) {
      const ptx::F32x2 scale = {pairs.scale_log2, pairs.scale_log2};
#pragma unroll
      for (int e = 0; e < chunk; e += 2) {
        const ptx::F32x2 y = ptx::fma_f32x2({x[e], x[e + 1]}, scale, {-stats.lse_log2[first + e], -stats.lse_log2[first + e + 1]});
        to[e] = ptx::ex2_approx_ftz(y.low);
        to[e + 1] = ptx::ex2_approx_ftz(y.high);
      }
    } else {
#pragma unroll
      for (int e = 0; e < chunk; e += 2) {
        float slope[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const Pair at = {first_query, key, c * chunk + e + k, 0};
          const float lse = stats.lse_log2[first + e + k];
          if constexpr (any_far) {
            to[e + k] = pairs.prob_from(stats.origin[first + e + k], x[e + k], modifiers, lse, at, slope[k]);
          } else {
            to[e + k] = pairs.prob(x[e + k], modifiers, lse, at, slope[k]);
          }
        }
        if constexpr (has_slopes) {
          slopes[(c * chunk + e) / 2] =
              ptx::cvt_rn_x2<slope_dtype(kFwd)>(kept_slope<kFwd>(slope[0]), kept_slope<kFwd>(slope[1]));
        }
      }
    }
  }

  // Stores P of a chunk for dV, after dropout.
  FMHA_DEVICE void store_probs(int slot, int c) const {
    uint32_t words[chunk / 2];
#pragma unroll
    for (int w = 0; w < chunk / 2; ++w) {
      float two[2] = {probs[c * chunk + 2 * w], probs[c * chunk + 2 * w + 1]};
      if constexpr (kFwd.dropout) {
#pragma unroll
        for (int k = 0; k < 2; ++k) two[k] = kept[c] >> (2 * w + k) & 1 ? two[k] * p.fwd.dropout_scale : 0.f;
      }
      words[w] = ptx::cvt_rn_x2<dtype>(two[0], two[1]);
    }
    ptx::tcgen05_st(tmem + Tmem::p(slot, half) + c * (chunk / 2), words);
  }

  // Computes dS of a chunk whose dP is in `x`.
  FMHA_DEVICE void differentiate(float (&x)[chunk], int c, const Stats& stats) const {
    const int first = half * kHalf + c * chunk;
#pragma unroll
    for (int e = 0; e < chunk; e += 2) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float d = x[e + k];
        if constexpr (kFwd.dropout) d = kept[c] >> (e + k) & 1 ? d * p.fwd.dropout_scale : 0.f;
        x[e + k] = probs[c * chunk + e + k] * (d - stats.delta[first + e + k]);
      }
      if constexpr (has_slopes) {
        float low, high;
        ptx::unpack_x2<slope_dtype(kFwd)>(slopes[(c * chunk + e) / 2], low, high);
        x[e] *= low;
        x[e + 1] *= high;
      }
    }
  }
  FMHA_DEVICE void store_ds(const float (&x)[chunk], int c) const {
#pragma unroll
    for (int e = 0; e < chunk; e += 8) {
      float words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = float_of(ptx::cvt_rn_x2<dtype>(x[e + 2 * w], x[e + 2 * w + 1]));
      const uint32_t at = fmha::mma::word_offset<typename Shared::DsTile>(row, half * kHalf + c * chunk + e);
      ptx::st_shared_v4_f32(smem.ds.address() + at, words[0], words[1], words[2], words[3]);
    }
  }

  template <bool any_far>
  FMHA_DEVICE void make_probs(const Modifiers& modifiers, const Stats& stats, int32_t first_query, const auto& seen,
                              bool edge, int slot) {
#pragma unroll
    for (int c = 0; c < num_chunks; ++c) {
      float x[chunk];
      load(x, Tmem::s(slot), c);
      exponentiate<any_far>(x, c, modifiers, stats, first_query);
      if (edge) hide(probs + c * chunk, c, seen);
      if constexpr (has_dv(part)) store_probs(slot, c);
    }
  }

  // Computes P and dS of one block. `is_cut`: the masks hide a pair of the block.
  FMHA_DEVICE void step(const QueryBlock& block, bool is_cut, const Slot<tile.stages_q>& slot, int32_t i) {
    const uint32_t phase = i & 1;
    const int32_t s = i % Tmem::s_slots;  // of S
    const int32_t first_query = block.first + half * kHalf;
    const Range by_band = seen_of(first_query);
    const bool edge = is_cut || __any_sync(ptx::kAllLanes, by_band.begin > 0 || by_band.end < kHalf);
    const auto seen = shown_of(block, first_query, by_band, is_cut);
    const Modifiers modifiers = pairs.modifiers(block.i_head);
    decide(block.i_head, first_query);
    ptx::mbarrier_wait_parity(smem.q_full[slot.index], slot.phase);
    const Stats& stats = smem.stats[slot.index];
    bool far = false;
#pragma unroll
    for (int c = 0; c < num_chunks; ++c) far |= stats.origin[half * kHalf + c * chunk + threadIdx.x % 32] != 0.f;
    const bool any_far = __any_sync(ptx::kAllLanes, far);

    ptx::mbarrier_wait_parity(smem.s_full[s], i / Tmem::s_slots & 1);
    ptx::tcgen05_fence_after_thread_sync();
    if (any_far) {
      make_probs<true>(modifiers, stats, first_query, seen, edge, s);
    } else {
      make_probs<false>(modifiers, stats, first_query, seen, edge, s);
    }
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    ptx::mbarrier_arrive_if(smem.p_full[s], signals);

    if constexpr (has_dk(part)) {
      ptx::mbarrier_wait_parity(smem.dp_full, phase);
      ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
      for (int c = 0; c < num_chunks; ++c) {
        float x[chunk];
        load(x, Tmem::dp, c);
        differentiate(x, c, stats);
        if (edge) hide(x, c, seen);
        store_ds(x, c);
      }
      ptx::tcgen05_fence_before_thread_sync();
      ptx::fence_proxy_async();
      __syncwarp();
      ptx::mbarrier_arrive_if(smem.ds_full, signals);
    }
    ptx::mbarrier_arrive_if(smem.q_empty[slot.index], signals);
  }

  // Copies K or V of the thread's key to tensor memory from column `to` on, two elements a column; each warpgroup
  // copies every second chunk. Elements beyond the sequence and the head are zeros.
  template <int head_dim, bool in_columns>
  FMHA_DEVICE void store_operand(const View& view, int to) const {
    constexpr int elems = 8;  // of 16 bytes
    const bool there = key < work.keys.end;
    const auto place = kv_row(p.fwd, kFwd.kv_layout, work.span, there ? key : work.keys.begin);
    const uint16_t* const from = static_cast<const uint16_t*>(view.data) + row_offset(view, place, work.i_head_kv);
    const auto element = [&](int32_t d) {
      return ptx::ld_global_u16_if(from + d * (in_columns ? view.dim : 1), there && d < head_dim);
    };
#pragma unroll 1
    for (int32_t c = half * chunk; c < product_dim(head_dim); c += 2 * chunk) {
      uint32_t words[chunk / 2];
#pragma unroll
      for (int e = 0; e < chunk; e += elems) {
        uint32_t(&four)[4] = *reinterpret_cast<uint32_t(*)[4]>(words + e / 2);
        if (!in_columns && c + e + elems <= head_dim) {
          ptx::ld_global_v4_b32_if(four, from + c + e, there);
        } else {
#pragma unroll
          for (int w = 0; w < 4; ++w) four[w] = element(c + e + 2 * w) | element(c + e + 2 * w + 1) << 16;
        }
      }
      ptx::tcgen05_st(tmem + to + c / 2, words);
    }
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    ptx::mbarrier_arrive_if(smem.operand_full, signals);
  }

  FMHA_DEVICE void run() {
    Slot<tile.stages_q> slot;
    QuerySteps<Shared::queries, SeenKeys> blocks{work, seen_keys};
    if constexpr (Tmem::has_k) {
      if (work.num_steps > 0) store_operand<kFwd.head_dim_qk, false>(p.fwd.k, Tmem::k);
    } else if constexpr (Tmem::has_v) {
      if (work.num_steps > 0) store_operand<kFwd.head_dim_v, kColumnMajor<spec>>(p.fwd.v, Tmem::v);
    }
#pragma unroll 1
    for (int32_t i = 0; i < work.num_steps; ++i) {
      const QueryBlock block = blocks.next();
      step(block, blocks.is_cut, slot, i);
      slot.advance();
    }
  }
};

}  // namespace fmha::sm100::bwd
