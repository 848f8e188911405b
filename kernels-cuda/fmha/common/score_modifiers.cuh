// Score modifiers on a fragment of S: what the softmax takes, and in which units.
//
// Units are those that cost least. Raw: S as the product leaves it, the scale in the exponential's factor.
// Soft-capped alone, c tanh(y / c) = c - 2c / (1 + exp(2y / c)): the softmax takes -1 / (1 + exp(2y / c)), whose
// factor is 2c, and the constant c goes into the LSE alone. Anything else: natural scores.
#pragma once
#include <fmha/common/quads.cuh>
#include <fmha/common/work.cuh>
#include <fmha/mma/smem_tile.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/matrix.cuh>
#include <fmha/score.h>

namespace fmha {

template <FwdSpec spec, auto tile>
struct Modifiers {
  static constexpr bool alone = num_modifiers(spec) == 1;
  static constexpr bool only_alibi = Alibi::in(spec) && alone;
  static constexpr bool fast_softcap = tile.fast_softcap && SoftCap::in(spec) && alone;
  static constexpr bool adds_wide_elements = ElementBias::in(spec) && alone && size_bytes(spec.dtype_bias) == 2;
  // Two neighbouring 16-bit elements of the bias to a register. They are loaded while the product of S runs.
  static constexpr bool prefetches = adds_wide_elements && tile.bias_stages == 0 && tile.block_n % 32 == 0;

  const FwdParams& p;
  const float descale;  // of FP8 scores: the magnitude of the two descales' product, whose sign S has already; else 1

  FMHA_DEVICE float scale() const {
    const float scale = spec.negative_scale ? -p.softmax_scale : p.softmax_scale;
    return is_fp8(spec.dtype_qk) ? scale * descale : scale;
  }
  // A scale of 0 would turn the -inf of hidden scores into NaN: f32's smallest number scales every score to 0 too.
  // ALiBi's slope over it would be infinite: from 1e-30 down only bf16 has scores that are not 0, and the host
  // refuses those.
  FMHA_DEVICE float positive_scale() const { return fmaxf(fabsf(scale()), only_alibi ? 1e-30f : 1.4e-45f); }

  // Factor of the softmax's scores in an exponential.
  FMHA_DEVICE float scale_log2() const {
    if constexpr (fast_softcap) return 2.f * p.softcap * kLog2E;
    if constexpr (only_alibi || !modifies_score(spec)) return positive_scale() * kLog2E;
    return kLog2E;
  }
  // The constant part of every score, which only the LSE needs: the soft-cap's, where the fast form of the soft-cap is
  // used.
  FMHA_DEVICE float offset_log2() const {
    if constexpr (fast_softcap) return p.softcap * kLog2E;
    return 0.f;
  }

  // Offset of a row of the bias. Where a tile packs query heads, each row has its own head.
  FMHA_DEVICE int64_t bias_row(const Work& work, int32_t i, int32_t i_head) const {
    return work.i_batch * p.bias.batch + i_head * p.bias.head + int64_t(i) * p.bias.row;
  }
  FMHA_DEVICE int32_t head_of(const Work& work, int32_t row, int32_t i) const {
    return tile.pack_gqa ? work.i_head + row - i * p.gqa_ratio : work.i_head;
  }
  // Whether rows of the bias begin at 16 bytes, and all of a block's keys are inside the sequence.
  FMHA_DEVICE bool fetches_vectors(const Work& work, int32_t block) const {
    const uint64_t steps = p.bias.row | p.bias.head | p.bias.batch;
    const bool aligned = (uint64_t(p.bias.data) | steps * size_bytes(spec.dtype_bias)) % 16 == 0;
    return aligned && block >= 0 && (block + 1) * tile.block_n <= work.seqlen_k;
  }

  struct BiasWords {
    uint32_t of[2][prefetches ? tile.block_n / 8 : 1];  // of the thread's two rows, of each 8-column group
  };
  // Loads the thread's elements of a block of the bias 16 bytes at a time, where addresses allow it: the four lanes of
  // a row each load 8-column groups, 64 bytes of the row together, and then exchange columns.
  FMHA_DEVICE void fetch(BiasWords& words, const Work& work, int32_t row, int32_t block) const {
    if (!fetches_vectors(work, block)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t i = min(query_of<tile>(p, row + 8 * r), work.seqlen_q - 1);
      const int64_t at = bias_row(work, i, head_of(work, row + 8 * r, query_of<tile>(p, row + 8 * r)));
      const uint16_t* data = static_cast<const uint16_t*>(p.bias.data) + at + block * tile.block_n;
#pragma unroll
      for (int c = 0; c < tile.block_n / 8; c += 4) ptx::ld_global_v4(&words.of[r][c], data + 8 * (c + threadIdx.x % 4));
    }
  }

  // Converts raw scores of a block to the softmax's input. `row` is the thread's first row.
  template <int n>
  FMHA_DEVICE void apply(mma::Accumulator<n>& s, const BiasWords& words, const Work& work, int32_t row, int32_t block) const {
    if constexpr (fast_softcap) {
      const float factor = 2.f * kLog2E * scale() / p.softcap;
#pragma unroll
      for (int e = 0; e < s.num_elems; ++e) s[e] = -ptx::rcp_approx_ftz(1.f + ptx::ex2_approx_ftz(s[e] * factor));
    } else if constexpr (only_alibi) {
      add_alibi(s, work, row, block);
    } else if constexpr (modifies_score(spec)) {
      if constexpr (prefetches) {
        if (fetches_vectors(work, block)) return add_words(s, words);
      }
      apply_one_by_one(s, work, row, block);
    }
  }

  template <int n>
  FMHA_DEVICE void add_alibi(mma::Accumulator<n>& s, const Work& work, int32_t row, int32_t block) const {
    const int32_t diag = alibi_diagonal(p, work.seqlen_q, work.seqlen_k);
    const int32_t first_key = block * tile.block_n + mma::fragment_column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t i = query_of<tile>(p, row + 8 * r);
      // Rows beyond the sequence have no head of their own where heads are packed. They take the last head's number,
      // and are not stored.
      const int32_t i_head = min(head_of(work, row + 8 * r, i), p.num_heads_q - 1);
      const float slope = scalar_of(p.alibi_slopes, work.i_batch, i_head, 0.f) / positive_scale();
      const float distance = float(i + diag - first_key);
#pragma unroll
      for (int e = 0; e < s.num_elems; ++e) {
        if (s.row(e) == r) s[e] = fmaf(-slope, fabsf(distance - float(s.column(e))), s[e]);
      }
    }
  }

  template <int n>
  FMHA_DEVICE void add_words(mma::Accumulator<n>& s, const BiasWords& words) const {
    const float factor = scale();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < n / 8; c += 4) {
        uint32_t group[4] = {words.of[r][c], words.of[r][c + 1], words.of[r][c + 2], words.of[r][c + 3]};
        quad_transpose(group);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          if (c + g >= n / 8) continue;  // of a first block that is computed in part
          add_pair(s, 4 * (c + g) + 2 * r, factor, group[g]);
        }
      }
    }
  }

  // Adds the bias from a tile in shared memory, which holds 16 rows for each of Tile::rows / 16 neighbouring warps.
  template <int n, class Tile>
  FMHA_DEVICE void add_tile(mma::Accumulator<n>& s, const Tile& tile_of_bias) const {
    const float factor = scale();
    const int32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % (Tile::rows / 16) * 16 + lane % 16;
#pragma unroll
    for (int c = 0; c < n / 8; c += 2) {
      uint32_t words[4];  // of both rows in group c, then in the next
      ptx::ldmatrix_x4(words, tile_of_bias.address() + fmha::mma::word_offset<Tile>(row, 8 * (c + lane / 16)));
#pragma unroll
      for (int i = 0; i < 4; ++i) add_pair(s, 4 * c + 2 * i, factor, words[i]);
    }
  }
  template <int n>
  FMHA_DEVICE static void add_pair(mma::Accumulator<n>& s, int e, float factor, uint32_t word) {
    float low, high;
    ptx::unpack_x2<spec.dtype_bias>(word, low, high);
    s[e] = fmaf(s[e], factor, low);
    s[e + 1] = fmaf(s[e + 1], factor, high);
  }

  // A thread's scores of a block, which lie in two rows.
  template <int n>
  struct Fragment {
    static constexpr int count = n / 2, rows = 2;
    mma::Accumulator<n>& s;
    int32_t query[2], first_key;
    int32_t columns[2];  // before the sequence's end; a tile without keys has block -1

    FMHA_DEVICE static constexpr int row(int e) { return mma::Accumulator<n>::row(e); }
    FMHA_DEVICE float at(int e) const { return s[e]; }
    FMHA_DEVICE void set(int e, float x) { s[e] = x; }
    FMHA_DEVICE Pair pair(int e) const { return {query[row(e)], first_key, 0, s.column(e)}; }
    FMHA_DEVICE bool there(int e) const { return s.column(e) < columns[row(e)]; }
  };
  template <int n>
  FMHA_DEVICE void apply_one_by_one(mma::Accumulator<n>& s, const Work& work, int32_t row, int32_t block) const {
    const int32_t first_key = block * tile.block_n + mma::fragment_column();
    Fragment<n> fragment = {s, {query_of<tile>(p, row), query_of<tile>(p, row + 8)}, first_key, {}};
#pragma unroll
    for (int r = 0; r < 2; ++r)
      fragment.columns[r] = fragment.query[r] < work.seqlen_q && block >= 0 ? work.seqlen_k - first_key : 0;
    fmha::apply(fragment, [&](int r) {
      const SeqSpan span = {work.i_batch, work.storage_batch, work.q_row, work.seqlen_q, work.k_row, work.seqlen_k};
      return Score<spec>::of(p, span, head_of(work, row + 8 * r, fragment.query[r]), scale());
    });
  }
};

}  // namespace fmha
