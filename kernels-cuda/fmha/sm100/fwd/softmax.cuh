// The softmax role: a warpgroup turns a query tile's scores into P, a thread a row.
//
//   waits for S, loads it whole
//   modifiers, mask, maximum
//   tells the correct role by what O is to be multiplied
//   P = exp2(S - maximum), stored over S; handed over in two parts, so that O += P V starts early
//   sums P
//
// A row is one thread's, so maxima and sums need no exchange, and a row's bits depend on its own scores alone.
#pragma once
#include <fmha/online_softmax.h>
#include <fmha/philox.h>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/f32x2.cuh>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/num.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/ptx/tmem.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/range.h>
#include <fmha/score.h>
#include <fmha/sm100/fwd/pair.cuh>

namespace fmha::sm100 {

using ptx::F32x2;

// exp2 of two numbers on the multiply-add pipe, for the share of a tile that the special-function unit has no time
// for. Rounds x down to n + r by adding 1.5 * 2^23 rounding down, then a polynomial in r, and n into the exponent
// (Cody and Waite, 1980). Of fifth degree: its relative error, 9e-8, is that unit's own, so that LSE is as exact with
// it; a cubic's 9e-5 would do for P but not for the sums.
FMHA_DEVICE F32x2 exp2_polynomial(F32x2 x) {
  constexpr float magic = 12582912.f;
  const auto both = [](float c) { return F32x2{c, c}; };
  x = {fmaxf(x.low, -127.f), fmaxf(x.high, -127.f)};
  const F32x2 shifted = ptx::add_rm_f32x2(x, both(magic));
  const F32x2 whole = ptx::add_f32x2(shifted, both(-magic));
  const F32x2 r = ptx::fma_f32x2(whole, both(-1.f), x);
  F32x2 y = ptx::fma_f32x2(r, both(0.00186713f), both(0.00901703f));
  y = ptx::fma_f32x2(r, y, both(0.05579991f));
  y = ptx::fma_f32x2(r, y, both(0.24016445f));
  y = ptx::fma_f32x2(r, y, both(0.69315131f));
  y = ptx::fma_f32x2(r, y, both(1.f));
  return {float_of((bits_of(shifted.low) << 23) + bits_of(y.low)),
          float_of((bits_of(shifted.high) << 23) + bits_of(y.high))};
}

template <FwdSpec spec, Sm100Tile tile, class SeenKeys>
struct SoftmaxRole {
  using Shared = Smem<spec, tile>;
  using Tmem = TmemPlan<spec, tile>;
  static constexpr int n = tile.block_n, chunk = 32, num_chunks = n / chunk;
  static constexpr int p_words = chunk * size_bytes(spec.dtype_v) / (has_pairs(tile) ? 8 : 4);  // of a chunk
  static constexpr int early_chunks = first_part<spec, tile>() / chunk;
  static constexpr bool loads_maxima = tile.load_max && !modifies_score(spec);
  static constexpr bool has_lo = spec.mask == MaskKind::Band;

  const FwdParams& p;
  Shared& smem;
  const SeenKeys& seen;  // which keys queries see
  const uint32_t tmem;   // at the warp's lanes
  const int32_t q_tile;  // of the CTA's
  const int32_t row_in_tile = threadIdx.x % kRows;
  const bool signals = threadIdx.x % 32 == 0;  // arrives for its warp

  ScoreSlot<Shared::q_tiles> slot = {Shared::q_tiles == 2 ? q_tile : 0};
  Slot<kWorkSlots> work_slot;
  uint32_t stats_phase = 1;
  float scale_log2;        // of what the softmax takes: S, or the modified score
  float row_max, row_sum;  // before the scale; of exp2((S - row_max) * scale_log2), times P's scale
  bool negates = false;    // descales below 0: the maximum is of -S
  int32_t row, query, i_head;
  Range inside;  // the keys that all of the warp's rows see

  FMHA_DEVICE const Work& work() const { return smem.work[work_slot.index]; }

  FMHA_DEVICE void begin_tile() {
    const Work& w = work();
    const int32_t first_row = first_row_of<tile>(w, q_tile), warp_row = first_row + row_in_tile / 32 * 32;
    row = first_row + row_in_tile;
    query = query_of<tile>(p, row);
    i_head = tile.pack_gqa ? w.i_head + row - query * p.gqa_ratio : w.i_head;
    const int32_t first = query_of<tile>(p, warp_row), last = query_of<tile>(p, warp_row + 31);
    inside = mask_of<spec>(w, w.seqlen_k).whole(first, last);
    if constexpr (requires { SeenKeys::of_last_keys; }) inside.end = min(inside.end, w.seqlen_k - w.seqlen_q);
    scale_log2 = softmax_scale_log2<spec>(p, w);
    if constexpr (is_fp8(spec.dtype_qk)) negates = descale_qk<spec>(p, w) < 0.f;
    row_max = -infinity();
    row_sum = 0.f;
  }
  // Whether the mask hides a key of a block from some row of this warp. A tile without keys has block -1.
  FMHA_DEVICE bool is_edge(int32_t block) const {
    return (block + 1) * n > inside.end || (has_lo && block * n < inside.begin) || block < 0;
  }

  // Loads a row's scores. Returns the largest one on devices whose load instruction finds it.
  FMHA_DEVICE float load(float (&s)[n], int32_t slot_index) const {
    uint32_t words[num_chunks][chunk];
    float top[num_chunks];
#pragma unroll
    for (int c = 0; c < num_chunks; ++c) {
      const uint32_t address = tmem + Tmem::s(slot_index) + c * chunk;
      if constexpr (loads_maxima) {
        ptx::tcgen05_ld_max(words[c], top[c], address);
      } else {
        ptx::tcgen05_ld(words[c], address);
      }
    }
    ptx::tcgen05_wait_ld();
#pragma unroll
    for (int c = 0; c < num_chunks; ++c) {
      ptx::tcgen05_loaded(words[c]);
#pragma unroll
      for (int e = 0; e < chunk; ++e) s[c * chunk + e] = float_of(words[c][e]);
    }
    float largest = -infinity();
    if constexpr (loads_maxima) {
#pragma unroll
      for (int c = 0; c < num_chunks; ++c) {
        ptx::tcgen05_loaded(top[c]);
        largest = fmaxf(largest, top[c]);
      }
    }
    return largest;
  }

  // A row's scores of a block.
  struct Fragment {
    static constexpr int count = n, rows = 1;
    float (&s)[n];
    const Work& work;
    int32_t query, block;

    FMHA_DEVICE static int row(int) { return 0; }
    FMHA_DEVICE float at(int e) const { return s[e]; }
    FMHA_DEVICE void set(int e, float x) { s[e] = x; }
    FMHA_DEVICE Pair pair(int e) const { return {query, block * n, 0, e}; }
    FMHA_DEVICE bool there(int e) const { return query < work.seqlen_q && pair(e).j() < work.seqlen_k && block >= 0; }
  };

  FMHA_DEVICE void modify(float (&s)[n], int32_t block) const {
    if constexpr (modifies_score(spec)) {
      const Work& w = work();
      apply(Fragment{s, w, query, block}, [&](int) {
        const SeqSpan span = {w.i_batch, w.storage_batch, w.q_row, w.seqlen_q, w.k_row, w.seqlen_k};
        // The sign of the scale is already in the product.
        const float scale = (spec.negative_scale ? -1.f : 1.f) * p.softmax_scale * descale_qk<spec>(p, w);
        return Score<spec>::of(p, span, query < w.seqlen_q ? i_head : 0, scale);
      });
    }
  }

  // Hides the keys of a block that the row does not see.
  FMHA_DEVICE void mask(float (&s)[n], int32_t block) const {
    const Work& w = work();
    const auto columns = mask_of<spec>(w, block < 0 ? -n : w.seqlen_k).columns(query, block * n);
#pragma unroll
    for (int e = 0; e < n; ++e) {
      if (!columns.has(e)) s[e] = -infinity();
    }
    if constexpr (!SeenKeys::all) {
      const SeqSpan span = {w.i_batch, w.storage_batch, w.q_row, w.seqlen_q, w.k_row, w.seqlen_k};
      if (block >= 0) seen.hide(s, span, i_head, query, block * n);
    }
  }

  // The largest of S and of the maximum so far; NaN, if one of them is, since the polynomial would turn a NaN into a
  // number. Four independent chains of two numbers a step are used: a single chain would wait for its own results.
  FMHA_DEVICE float largest(const float (&s)[n]) const {
    float top[4] = {ptx::max3_nan(row_max, s[0], s[1]), ptx::max_nan(s[2], s[3]), ptx::max_nan(s[4], s[5]),
                    ptx::max_nan(s[6], s[7])};
#pragma unroll
    for (int e = 8; e < n; e += 2) top[e / 2 % 4] = ptx::max3_nan(top[e / 2 % 4], s[e], s[e + 1]);
    return ptx::max_nan(ptx::max3_nan(top[0], top[1], top[2]), top[3]);
  }

  // Hands a row's factor, or at the tile's end its sum and maximum, to the thread of the correction warps that has the
  // row.
  FMHA_DEVICE void tell(float first, float second, bool both) {
    ptx::mbarrier_wait_parity(smem.stats_empty[q_tile], stats_phase);
    stats_phase ^= 1;
    smem.stats[q_tile][0][row_in_tile] = first;
    if (both) smem.stats[q_tile][1][row_in_tile] = second;
    __syncwarp();
    ptx::mbarrier_arrive_if(smem.stats_full[q_tile], signals);
  }

  // Returns `before` plus the sum of P, in four independent chains of pairs.
  FMHA_DEVICE static float sum(const float (&s)[n], float before) {
    F32x2 chains[4] = {{before, 0.f}};
#pragma unroll
    for (int e = 0; e < n; e += 2) chains[e / 2 % 4] = ptx::add_f32x2(chains[e / 2 % 4], {s[e], s[e + 1]});
    const F32x2 total = ptx::add_f32x2(ptx::add_f32x2(chains[0], chains[1]), ptx::add_f32x2(chains[2], chains[3]));
    return total.low + total.high;
  }

  // Sets the elements of a chunk of P that dropout drops to zero. One call of the generator decides four keys; the
  // calls are a loop with one bit a key as result, since unrolled they would take P's registers.
  FMHA_DEVICE void drop(float (&s)[n], int first, int32_t block) const {
    const int32_t batch_head = head_of_whole(p, work().i_batch, i_head), first_quad = (block * n + first) / 4;
    uint32_t kept = 0;
#pragma unroll 1
    for (int quad = 0; quad < chunk / 4; ++quad) {
      const Array<uint32_t, 4> words = dropout_words(p, batch_head, query, first_quad + quad);
      uint32_t bits = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) bits |= uint32_t(words[k] < p.dropout_threshold) << k;
      kept |= bits << 4 * quad;
    }
#pragma unroll
    for (int e = 0; e < chunk; ++e) {
      if (!(kept >> e & 1)) s[first + e] = 0.f;
    }
  }

  // Whether a pair of a chunk goes to the multiply-add pipe: the last `tile.exp2_polynomial_pairs` of each 16 pairs,
  // spread evenly.
  FMHA_DEVICE static constexpr bool on_fma_pipe(int pair) {
    constexpr int pairs = tile.exp2_polynomial_pairs;
    return (pair + 1) * pairs / 16 != pair * pairs / 16;
  }

  FMHA_DEVICE void exponentiate(float (&s)[n], float shift) const {
#pragma unroll
    for (int e = 0; e < n; e += 2) {
      const F32x2 x =
          ptx::fma_f32x2({s[e], s[e + 1]}, {scale_log2, scale_log2}, {-shift, -shift});
      const F32x2 y = on_fma_pipe(e / 2 % 16) ? exp2_polynomial(x)
                                              : F32x2{ptx::ex2_approx_ftz(x.low), ptx::ex2_approx_ftz(x.high)};
      s[e] = y.low;
      s[e + 1] = y.high;
    }
  }
  // Scales two groups of 16 keys' numbers to E2M1's range, and returns their scales in E4M3: the largest number / 6 of
  // each group.
  FMHA_DEVICE static uint32_t to_pairs(const float* s, float (&x)[chunk]) {
    float scales[2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      float most = 0.f;
#pragma unroll
      for (int e = 0; e < 16; ++e) most = fmaxf(most, s[16 * b + e]);
      scales[b] = most * (1.f / 6.f);
    }
    const uint32_t codes = ptx::cvt_rn_satfinite_x4<DType::E4m3Fn>(scales[0], scales[1], 0.f, 0.f);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      // Converts a scale's exponent and mantissa to f32, whose exponent's bias is 120 larger.
      const uint32_t code = codes >> 8 * b & 0xff;
      const float factor = code == 0 ? 0.f : ptx::rcp_approx_ftz(float_of(code << 20) * float_of(247u << 23));
#pragma unroll
      for (int e = 0; e < 16; ++e) x[16 * b + e] = s[16 * b + e] * factor;
    }
    return codes;
  }
  // Stores half a word of P's scales, those of a chunk's 32 keys.
  FMHA_DEVICE void store_scales(int c, int32_t slot_index, uint32_t codes) const {
    const mma::sm100::ScaleTile& to = smem.p_scales[slot_index][c / 2];
    ptx::st_shared_u16(to.line(row_in_tile % 32) + row_in_tile / 32 * 4 + c % 2 * 2, uint16_t(codes));
  }
  FMHA_DEVICE void store(const float (&s)[n], int c, int32_t slot_index) const {
    uint32_t words[p_words];
    if constexpr (has_pairs(tile)) {
      float x[chunk];
      store_scales(c, slot_index, to_pairs(&s[c * chunk], x));
#pragma unroll
      for (int w = 0; w < p_words; ++w) words[w] = ptx::cvt_rn_satfinite_e2m1_x8(&x[8 * w]);
    } else {
#pragma unroll
      for (int w = 0; w < p_words; ++w) {
        const float* x = &s[c * chunk + w * chunk / p_words];
        if constexpr (is_fp8(spec.dtype_v)) {
          words[w] = ptx::cvt_rn_satfinite_x4<spec.dtype_v>(x[0], x[1], x[2], x[3]);
        } else {
          words[w] = ptx::cvt_rn_x2<spec.dtype_v>(x[0], x[1]);
        }
      }
    }
    ptx::tcgen05_st(tmem + Tmem::p(slot_index) + c * p_words, words);
  }
  FMHA_DEVICE void hand_over(Barrier& barrier) const {
    ptx::tcgen05_wait_st();
    if constexpr (has_pairs(tile)) {
      // One lane arrives for all lanes of its warp, after a fence for what they have written.
      ptx::fence_proxy_async();
      __syncwarp();
    }
    ptx::tcgen05_fence_before_thread_sync();
    arrive_at_leader_if<tile>(barrier, signals);
  }

  // Number of the tile's i-th block.
  FMHA_DEVICE int32_t block_of(int32_t i) const {
    if constexpr (SeenKeys::has_tile_list) return seen.block_at(work(), i);
    else return block_at(work(), i);
  }

  // Processes the i-th block of the tile. `first`: it is the tile's first one.
  FMHA_DEVICE void step(int32_t i, int32_t slot_index, bool first) {
    const int32_t block = block_of(i);
    float s[n];
    ptx::mbarrier_wait_parity(smem.s_full[slot_index], slot.phase);
    ptx::tcgen05_fence_after_thread_sync();
    const float loaded_max = load(s, slot_index);
    if constexpr (is_fp8(spec.dtype_qk) && !modifies_score(spec)) {
      if (negates) {
#pragma unroll
        for (int e = 0; e < n; ++e) s[e] = -s[e];
      }
    }
    modify(s, block);
    const bool edge = SeenKeys::has_tile_list ? i < work().num_band_blocks : is_edge(block);
    if (edge) mask(s, block);

    float new_max;
    if (loads_maxima && !edge && !negates) {
      new_max = fmaxf(row_max, loaded_max);
    } else {
      new_max = largest(s);
    }
    // A maximum that grew little is kept: P may then exceed 1, up to 2^lazy_rescale_log2, which f32 sums and 16-bit P
    // hold as well, and O needs no correction. The row decides for itself.
    if (row_max != -infinity() && (new_max - row_max) * scale_log2 <= float(tile.lazy_rescale_log2)) new_max = row_max;
    const float reference = finite_or_zero(new_max);
    const float correction = ptx::ex2_approx_ftz((row_max - reference) * scale_log2);
    row_max = new_max;
    if (!first) tell(correction, 0.f, false);

    constexpr float p_offset_log2 = log2_scale_of_p<spec, tile>();
    float shift = reference * scale_log2 - p_offset_log2;
    if (fabsf(reference * scale_log2) >= kLargestShift) {
      shift = -p_offset_log2;
#pragma unroll
      for (int e = 0; e < n; ++e) s[e] -= reference;
    }
    exponentiate(s, shift);
    // With dropout the row sums take all of P before any of it is dropped. Without dropout they follow the hand-over
    // of P, which the products wait for.
    if constexpr (spec.dropout) row_sum = sum(s, row_sum * correction);
#pragma unroll
    for (int c = 0; c < num_chunks; ++c) {
      if constexpr (spec.dropout) drop(s, c * chunk, block);
      store(s, c, slot_index);
      if (c + 1 == early_chunks) hand_over(smem.p_full[slot_index]);
    }
    hand_over(smem.p_last[slot_index]);
    if constexpr (!spec.dropout) row_sum = sum(s, row_sum * correction);
    slot.advance();
  }

  FMHA_DEVICE void run() {
    if constexpr (is_scaled(tile) && !has_pairs(tile)) {
      // P's scales are 1, as a power of two in one byte. They are announced with the first hand-over of P.
      constexpr uint32_t one = 0x7f7f7f7f;
      const uint32_t ones[] = {one, one, one, one};
      ptx::tcgen05_st(tmem + Tmem::p_scales(q_tile), ones);
    }
    while (true) {
      ptx::mbarrier_wait_parity(smem.work_full[work_slot.index], work_slot.phase);
      const int32_t num_blocks = ptx::uniform(work().num_blocks);
      if (num_blocks == 0) return;
      begin_tile();
      const BlockRange blocks = blocks_of<spec, tile, SeenKeys>(p, work(), q_tile);
      const int32_t end = ptx::uniform(blocks.end);
#pragma unroll 1
      for (int32_t i = ptx::uniform(blocks.begin); i < end; ++i)
        step(i, Shared::q_tiles == 2 ? q_tile : slot.index, i == blocks.begin);
      tell(row_sum, row_max, true);
      ptx::mbarrier_arrive_if(smem.work_empty[work_slot.index], signals);
      work_slot.advance();
    }
  }
};

template <FwdSpec spec, Sm100Tile tile, class SeenKeys>
FMHA_DEVICE void softmax(const FwdParams& p, Smem<spec, tile>& smem, const SeenKeys& seen, uint32_t tmem,
                         int32_t q_tile) {
  ptx::setmaxnreg_inc<regs(tile).softmax>();
  SoftmaxRole<spec, tile, SeenKeys> role{p, smem, seen, tmem, q_tile};
  role.run();
}

}  // namespace fmha::sm100
