// The consume role: two warpgroups, 64 rows together. Of O each has half of the columns; of the blocks warpgroup 0
// has the even ones and warpgroup 1 the odd ones, counted as the tile walks them: it computes their scores and
// probabilities, once, multiplies them by its half of V, and leaves them in shared memory for the other half.
//
//   warpgroup 0   S0  softmax 0  P0 Vl                     P1 Vl  S2  softmax 2  P2 Vl
//   warpgroup 1                  P0 Vr  S1  softmax 1      P1 Vr                 P2 Vr  S3
//
// Running maxima go from block to block, and so from one warpgroup to the other with the probabilities; O and the
// sums of both follow them, so that the result is that of one warpgroup that walks all blocks.
#pragma once
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/cluster.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm90/mla/products.cuh>
#include <fmha/sm90/mla/work.cuh>

namespace fmha::mla {

template <FwdSpec spec, Sm90MlaTile tile, int group>
struct Consumer {
  static constexpr DType dtype = spec.dtype_qk;
  static constexpr int other = 1 - group, sign = spec.negative_scale ? -1 : 1;
  using P = Plan<spec, tile>;
  using Chunk = typename P::Chunk;
  using RowSoftmax = Softmax<shared(tile), p_offset_log2(spec, tile)>;
  using Output = mma::Accumulator<P::columns_half>;

  const FwdParams& p;
  const Work& work;
  Smem<spec, tile>& smem;
  const Modifiers<spec, shared(tile)> modifiers{p, 1.f};
  const float scale_log2 = modifiers.scale_log2();
  const int32_t tile_row = mma::fragment_row();  // the thread's first of two, 8 apart

  Output o;
  Scores s;
  Probs probs;
  RowSoftmax softmax;

  FMHA_DEVICE int32_t key_of(int32_t i) const { return (work.last_block - i) * kKeys; }

  // Waits until the load role's data has arrived and the tensor cores may read it.
  FMHA_DEVICE static void wait_full(ptx::Barrier& full, uint32_t phase) {
    ptx::mbarrier_wait_parity(full, phase);
    if constexpr (gathers(tile)) ptx::fence_proxy_async();
  }
  FMHA_DEVICE void wait_for_q() const {
    ptx::mbarrier_wait_parity(smem.q_full, counts_turns(tile) ? work.turns.tile() : 0);
    if constexpr (counts_q(tile)) ptx::fence_proxy_async();
  }

  // Starts the product S of the tile's i-th block, which is this warpgroup's, and does not wait.
  FMHA_DEVICE void start_scores(int32_t i) {
    const uint32_t phase = phase_of<spec, tile>(work, i);
    if constexpr (P::v_in_k) {
      constexpr int half = P::chunks_half;
      const Chunk* k = smem.k[group];
      wait_full(smem.full[P::part_of(group, 0)], phase);
      ptx::wgmma_fence();
      issue_abt<dtype, sign, half>(s, smem.q, k, false);
      wait_full(smem.full[P::part_of(group, 1)], phase);
      ptx::wgmma_fence();
      issue_abt<dtype, sign, half>(s, smem.q + half, k + half, true);
      if constexpr (P::has_tail) issue_abt<dtype, sign, 1>(s, smem.q + 2 * half, k + 2 * half, true);
    } else {
      wait_full(smem.full[0], phase);
      ptx::wgmma_fence();
      issue_abt<dtype, sign, P::chunks_k>(s, smem.q, smem.k[0], false);
    }
    ptx::wgmma_commit_group();
  }

  // Applies the score modifiers to a block's scores.
  FMHA_DEVICE void modify(int32_t i) {
    if constexpr (modifies_score(spec)) {
      fmha::Work tile_work;
      tile_work.i_batch = work.span.i_batch;
      tile_work.storage_batch = work.span.storage_batch;
      tile_work.q_row = work.span.q_row;
      tile_work.k_row = work.span.k_row;
      tile_work.seqlen_q = work.span.seqlen_q;
      tile_work.seqlen_k = work.span.seqlen_k;
      tile_work.i_head = work.i_head_kv * p.gqa_ratio;
      modifiers.apply(s, {}, tile_work, work.first_row + tile_row, work.last_block - i);
    }
  }

  // Writes -inf where the mask or the sequence's end hides a key of the i-th block, or the list has no key.
  FMHA_DEVICE void mask(int32_t i) {
    if constexpr (tile.listed) return hide_absent(i);
    const int32_t begin = key_of(i), end = begin + kKeys;
    const int32_t first_query = Work::query_of(p, work.first_row), last_query = Work::query_of(p, work.first_row + kRows - 1);
    const MaskOf<spec> mask = {work.band, work.span.seqlen_k};
    if (!mask.cuts(first_query, last_query, {begin, end})) return;
    const int32_t first_key = begin + mma::fragment_column(), row = work.first_row + tile_row;
    s.hide(mask.columns(Work::query_of(p, row), first_key), mask.columns(Work::query_of(p, row + 8), first_key));
  }

  // Writes -inf where the list has no key at a place of the i-th block. Each word describes the rows that one warp of
  // the load role copies: bit n is row 4 * warp + n % 4 + 16 * (n / 4), or over FP8 caches bit 4 n + k row 16 * warp +
  // n + 8 * k.
  FMHA_DEVICE void hide_absent(int32_t i) {
    if constexpr (tile.listed) {
      ptx::mbarrier_wait_parity(smem.list.told[group], (work.turns.of_parity(group) + i / 2) % 2);
      uint32_t words[4];
      ptx::ld_shared_v4_b32(words, ptx::shared_address(smem.list.present[group]));
      constexpr bool by_sixteens = is_fp8(tile.stored);
      constexpr int32_t every = by_sixteens ? 0x33333333 : 0xffff;
      if (ptx::uniform(int32_t(words[0] & words[1] & words[2] & words[3])) == every) return;
      const int32_t quad_lane = threadIdx.x % 4;
      if constexpr (by_sixteens) {
#pragma unroll
        for (int e = 0; e < Scores::num_elems; ++e) {
          const int eight = e / 4;
          if (!(words[eight / 2] >> 8 * quad_lane >> ((e & 1) * 4 + eight % 2) & 1)) s[e] = -infinity();
        }
      } else {
        // Columns 2 * quad_lane and the next of the even eights of columns, and of the odd ones.
        const uint32_t of_lane[2] = {(quad_lane < 2 ? words[0] : words[1]) >> quad_lane % 2 * 2,
                                     (quad_lane < 2 ? words[2] : words[3]) >> quad_lane % 2 * 2};
#pragma unroll
        for (int e = 0; e < Scores::num_elems; ++e) {
          const int eight = e / 4;
          if (!(of_lane[eight % 2] >> (eight / 2 * 4 + (e & 1)) & 1)) s[e] = -infinity();
        }
      }
    }
  }

  FMHA_DEVICE void wait_for_scores() {
    ptx::wgmma_wait_group<0>();
    ptx::written_here(s.elems);
  }

  // Raises the running maxima to a block's scores, and returns the factor for O and the sums so far, as Softmax::step
  // does.
  FMHA_DEVICE void raise_maxima(float (&shift)[2]) {
    float new_max[2] = {softmax.rows[0].row_max, softmax.rows[1].row_max};
    softmax.raise(new_max, s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      RowStats& row = softmax.rows[r];
      new_max[r] = quad_reduce(new_max[r], [](float a, float b) { return fmaxf(a, b); });
      if constexpr (tile.lazy_rescale_log2 > 0) {
        if (row.row_max != -infinity() && (new_max[r] - row.row_max) * scale_log2 <= float(tile.lazy_rescale_log2))
          new_max[r] = row.row_max;
      }
      follow(r, new_max[r], shift[r]);
    }
  }
  // Rescales a row's sum to another running maximum.
  FMHA_DEVICE void follow(int r, float row_max, float& shift) {
    RowStats& row = softmax.rows[r];
    shift = RowSoftmax::shift_of(finite_or_zero(row_max), scale_log2);
    softmax.correction[r] = ptx::ex2_approx_ftz(RowSoftmax::shift_of(row.row_max, scale_log2) - shift);
    row.row_max = row_max;
    row.row_sum *= softmax.correction[r];
  }
  // Computes P of half of a block's keys, in registers.
  FMHA_DEVICE void exponentiate(int half, const float (&shift)[2]) {
    constexpr int elems = Scores::num_elems / 2;
#pragma unroll
    for (int at = 0; at < elems; ++at) {
      const int e = half * elems + at, r = Scores::row(e);
      s[e] = ptx::ex2_approx_ftz(fmaf(s[e], scale_log2, -shift[r]));
      softmax.rows[r].row_sum += s[e];
    }
#pragma unroll
    for (int at = 0; at < elems / 2; ++at) {
      const int word = half * (elems / 2) + at;
      probs.elems[word / 4][word % 4] = ptx::cvt_rn_x2<spec.dtype_v>(s[2 * word], s[2 * word + 1]);
    }
  }
  // Stores P to shared memory, and hands it with the running maxima to the other warpgroup.
  FMHA_DEVICE void hand_over() {
    // All warps have read the memory that takes P: the tail, by products of scores, where V is in K; otherwise the
    // chunk, by products with the other warpgroup's P.
    ptx::bar_sync<kWarpgroup>(kScoresRead + group);
    store_probs(smem.probs_of(group), probs);
    if (threadIdx.x % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) smem.row_max[group][tile_row + 8 * r] = softmax.rows[r].row_max;
    }
    ptx::fence_proxy_async();
    ptx::bar_arrive<kBothGroups>(group == 0 ? kProbsOfEven : kProbsOfOdd);
  }

  // Waits for P of the other warpgroup's block, and takes over the running maxima that it is relative to.
  FMHA_DEVICE void adopt_maxima() {
    ptx::bar_sync<kBothGroups>(other == 0 ? kProbsOfEven : kProbsOfOdd);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float shift;
      follow(r, smem.row_max[other][tile_row + 8 * r], shift);
    }
  }

  // Rescales O to the running maxima, if any of the warp's upper or lower eight rows needs it.
  FMHA_DEVICE void rescale() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!softmax.corrects(r)) continue;
#pragma unroll
      for (int e = 0; e < Output::num_elems; ++e) {
        if (Output::row(e) == r) o[e] *= softmax.correction[r];
      }
    }
  }

  // Waits for the products with this warpgroup's half of a block's V, and releases that half.
  FMHA_DEVICE void finish_and_release(int32_t slot) {
    ptx::wgmma_wait_group<0>();
    ptx::written_here(o.elems);
    release(P::part_of(slot, group));
  }
  // Releases a part of a slot: one arrival for the warp, in each CTA whose loads fill the part.
  FMHA_DEVICE void release(int part) {
    if constexpr (tile.cluster > 1) {
      const uint32_t rank = threadIdx.x % 32;
      ptx::mbarrier_arrive_at_if(smem.empty[part], rank, rank < uint32_t(tile.cluster));
    } else {
      ptx::mbarrier_arrive_if(smem.empty[part], threadIdx.x % 32 == 0);
    }
  }
  // Waits for this warpgroup's half of V where V is apart from K.
  FMHA_DEVICE void wait_for_values(int32_t i) {
    if constexpr (!P::v_in_k) wait_full(smem.full[P::part_of(0, group)], phase_of<spec, tile>(work, i));
  }

  // Releases Q after the warpgroup's last scores of the tile, so that the next tile's Q may be loaded.
  FMHA_DEVICE void release_q() { ptx::mbarrier_arrive_if(smem.q_empty(), threadIdx.x % 32 == 0); }

  // Processes this warpgroup's own block i of the tile: scores, probabilities, products with its half of V.
  FMHA_DEVICE void do_own(int32_t i, int32_t num_blocks) {
    start_scores(i);
    wait_for_scores();
    if constexpr (!P::v_in_k) release(0);
    if constexpr (counts_turns(tile)) {
      if (i + 2 >= num_blocks) release_q();
    }
    modify(i);
    mask(i);
    float shift[2];
    raise_maxima(shift);
    rescale();
    wait_for_values(i);
    // The products with the first half of P run beneath the exponentials of the second.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      exponentiate(half, shift);
      mla::start_own<dtype>(o, probs, smem.half_of_v(group, group), half);
    }
    hand_over();
    finish_and_release(group);
  }
  // Multiplies the other warpgroup's P of a block by this one's half of V.
  FMHA_DEVICE void do_other(int32_t i) {
    adopt_maxima();
    rescale();
    wait_for_values(i);
    mla::start_other<dtype>(o, smem.probs_of(other), smem.half_of_v(other, group));
    finish_and_release(other);
  }

  // Number of the tile's blocks. Over a list, blocks that the load role leaves out are not counted.
  FMHA_DEVICE int32_t blocks_of_tile() const {
    if constexpr (tile.listed) {
      if constexpr (!walks_tiles(spec, tile)) ptx::bar_sync<kNumThreads>(kTileTold);
      return smem.list.num_blocks;
    } else {
      return work.num_blocks;
    }
  }

  // Walks the blocks in order. A slot is refilled while the other slot's block is computed; memory that the products
  // of a block have read is released before the scores of the next one are waited for.
  FMHA_DEVICE void run() {
    o.clear();
    softmax.reset();
    wait_for_q();
    const int32_t num_blocks = ptx::uniform(blocks_of_tile());
    if constexpr (counts_turns(tile)) {
      if (num_blocks <= group) release_q();
    }
    int32_t i = 0;
#pragma unroll 1
    for (; i + 1 < num_blocks; i += 2) {
      if constexpr (group == 0) do_own(i, num_blocks);
      do_other(group == 0 ? i + 1 : i);
      if constexpr (group == 1) do_own(i + 1, num_blocks);
    }
    if (i == num_blocks) return;
    if constexpr (group == 0) do_own(i, num_blocks);
    if constexpr (group == 1) do_other(i);
  }
};

}  // namespace fmha::mla
