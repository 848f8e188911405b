// Scores of an indexer on mma.sync: I[i, j] = sum_h relu(q[i, h] . k[j]) w[i, h].
//
//   a warp      keys of its own, all their elements in registers as fragments of B
//   a step      one row i: 16 heads at a time are the rows of A, from shared memory, which every warp reads
//   the sum     over heads: a thread's own rows first, then over the eight lanes that share its keys
//
// A CTA reads its keys from memory once and walks over rows with them. The next row's q is loaded meanwhile.
//
// The order of elements in a product is free where A and B share it: lane c = l % 4 has the c-th quarter of a row, so
// that it reads k by whole 16 bytes, and q lies in shared memory as the lanes want it, 16 bytes each, without bank
// conflicts. Two steps of 16 elements share such a word.
//
// FP8 is widened to f16, or to the other operand's 16-bit type, which hold it exactly; products and sums are f32.
#pragma once
#include <fmha/choose.h>
#include <fmha/common/widen.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/matrix.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm80_index.h>

namespace fmha::sm80 {

template <IndexSpec spec, IndexTile tile>
struct IndexScores {
  static constexpr DType wide = !is_fp8(spec.dtype_q)   ? spec.dtype_q
                                : !is_fp8(spec.dtype_k) ? spec.dtype_k
                                                        : DType::F16;
  static constexpr int32_t threads = tile.num_threads, warps = threads / 32;
  static constexpr int32_t groups = tile.warp_keys / 8;        // of eight keys, columns of one product
  static constexpr int32_t block_n = warps * tile.warp_keys;   // keys of the CTA
  static constexpr int32_t m_tiles = ceil_div(spec.num_heads, 16), heads = 16 * m_tiles;
  static constexpr int32_t words = spec.head_dim / 32;         // of eight elements, in a lane's quarter of a row
  static constexpr int32_t quarter = spec.head_dim / 4;
  static_assert(spec.head_dim % 32 == 0, "a quarter of a row is whole words");
  static_assert(groups == 2 || groups == 4, "sums of a warp's keys are dealt to its lanes");

  struct Shared {
    // q of a row, in 16-byte words of eight elements: [word][16 heads][upper or lower eight][lane].
    alignas(16) uint32_t q[2][words * m_tiles * 2 * 32][4];
    float weights[2][heads];
  };

  const ChooseParams& p;
  Shared& shared;

  static constexpr int32_t num_words = heads * 4 * words, own_words = ceil_div(num_words, threads);

  // Whether registers hold the next row while the present one is multiplied. Small CTAs have too many elements a thread
  // for this.
  static constexpr bool fetches_ahead = !is_fp8(spec.dtype_q) || own_words <= 4;

  // A thread's part of the next row, on its way from memory: FP8 bytes of q, and a weight.
  struct Row {
    uint32_t bytes[is_fp8(spec.dtype_q) ? own_words : 1][2];
    float weight;
  };

  // Calls `use(n, element of q, whether the head exists, place in shared memory)` for each of the thread's words.
  // Neighbouring threads have neighbouring words of a row.
  template <class Use>
  FMHA_DEVICE void each_word(int32_t stage, int32_t row, Use use) const {
#pragma unroll
    for (int32_t n = 0; n < own_words; ++n) {
      const int32_t at = n * threads + int32_t(threadIdx.x);
      if (num_words % threads != 0 && at >= num_words) break;
      const int32_t head = at / (4 * words), word = at % (4 * words), t = word % words, c = word / words;
      const int64_t from = (int64_t(row) * spec.num_heads + min(head, spec.num_heads - 1)) * spec.head_dim + 8 * word;
      use(n, from, head < spec.num_heads, (t * m_tiles + head / 16) * 64 + head % 16 / 8 * 32 + head % 8 * 4 + c);
    }
  }

  // Starts the loads of a row's q and weights. Heads beyond the last become zeros.
  FMHA_DEVICE void fetch(Row& to, int32_t stage, int32_t row) const {
    each_word(stage, row, [&](int32_t n, int64_t from, bool there, int32_t place) {
      if constexpr (is_fp8(spec.dtype_q)) {
        ptx::ld_global_v2_b32_if(to.bytes[n], static_cast<const uint8_t*>(p.q) + from, there);
      } else {
        const uint32_t address = ptx::shared_address(&shared.q[stage][place]);
        ptx::cp_async<16>(address, static_cast<const uint16_t*>(p.q) + from, there ? 16 : 0);
      }
    });
    const int32_t h = threadIdx.x;
    to.weight = ptx::ld_global_f32_if(p.weights + int64_t(row) * spec.num_heads + min(h, spec.num_heads - 1),
                                      h < spec.num_heads);
    ptx::cp_async_commit_group();
  }

  // Stores to shared memory the data that were loaded to registers and not by an asynchronous copy.
  FMHA_DEVICE void put(const Row& from, int32_t stage, int32_t row) const {
    if constexpr (is_fp8(spec.dtype_q)) {
      each_word(stage, row, [&](int32_t n, int64_t, bool, int32_t place) {
        uint32_t packed[4];
        widen_word<spec.dtype_q, wide, tile.converts_fp8, true>(from.bytes[n], 1.f, packed);
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) shared.q[stage][place][i] = packed[i];
      });
    }
    static_assert(heads <= threads, "a thread has one weight");
    if (threadIdx.x < heads) shared.weights[stage][threadIdx.x] = from.weight;
  }

  // Fragments of B for each group of eight keys and each word. A word has the fragments of two steps.
  struct Keys {
    uint32_t elems[words][groups][4];
    float scale[groups][2];
  };

  FMHA_DEVICE void load_keys(Keys& keys, int32_t i_batch, int32_t first, int32_t length) const {
    const int32_t lane = threadIdx.x % 32, c = lane % 4;
#pragma unroll
    for (int32_t g = 0; g < groups; ++g) {
      const int32_t j = first + 8 * g + lane / 4;
      const bool there = j < length;
      const choose::KeyPlace place = choose::place_of<spec.paged>(p, i_batch, there ? j : max(length - 1, 0));
      const int64_t from = place.outer * p.k_outer + place.inner * p.k_key + c * quarter;
#pragma unroll
      for (int32_t t = 0; t < words; ++t) {
        if constexpr (is_fp8(spec.dtype_k)) {
          uint32_t bytes[2];
          ptx::ld_global_v2_b32_if(bytes, static_cast<const uint8_t*>(p.k) + from + 8 * t, there);
          widen_word<spec.dtype_k, wide, tile.converts_fp8, true>(bytes, 1.f, keys.elems[t][g]);
        } else {
          ptx::ld_global_v4_b32_if(keys.elems[t][g], static_cast<const uint16_t*>(p.k) + from + 8 * t, there);
        }
      }
#pragma unroll
      for (int32_t e = 0; e < 2; ++e) {
        keys.scale[g][e] = 1.f;
        if constexpr (spec.k_scale) {
          // Key of the thread's column.
          const int32_t column = min(first + 8 * g + 2 * c + e, max(length - 1, 0));
          const choose::KeyPlace at = choose::place_of<spec.paged>(p, i_batch, column);
          keys.scale[g][e] = length > 0 ? p.k_scale[at.outer * p.scale_outer + at.inner * p.scale_key] : 1.f;
        }
      }
    }
  }

  // Sums a row's scores over the heads that the thread has, for two columns of each group.
  FMHA_DEVICE void score_row(float (&score)[2 * groups], const Keys& keys, int32_t stage) const {
    const int32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int32_t i = 0; i < 2 * groups; ++i) score[i] = 0.f;
#pragma unroll 1
    for (int32_t m = 0; m < m_tiles; ++m) {
      float sums[groups][4] = {};
#pragma unroll
      for (int32_t t = 0; t < words; ++t) {
        const uint32_t (&upper)[4] = shared.q[stage][(t * m_tiles + m) * 64 + lane];
        const uint32_t (&lower)[4] = shared.q[stage][(t * m_tiles + m) * 64 + 32 + lane];
        uint32_t up[4], low[4];
        ptx::ld_shared_v4_b32(up, ptx::shared_address(&upper));
        ptx::ld_shared_v4_b32(low, ptx::shared_address(&lower));
#pragma unroll
        for (int32_t step = 0; step < 2; ++step) {
          const uint32_t a[4] = {up[2 * step], low[2 * step], up[2 * step + 1], low[2 * step + 1]};
#pragma unroll
          for (int32_t g = 0; g < groups; ++g) {
            const uint32_t b[2] = {keys.elems[t][g][2 * step], keys.elems[t][g][2 * step + 1]};
            ptx::mma_m16n8k16<wide>(sums[g], a, b);
          }
        }
      }
      // Heads beyond the last are left out: their q = 0 times an infinite key would be NaN.
      const int32_t head = 16 * m + lane / 4;
      const float w[2] = {shared.weights[stage][head], shared.weights[stage][head + 8]};
      const bool there[2] = {head < spec.num_heads, head + 8 < spec.num_heads};
#pragma unroll
      for (int32_t g = 0; g < groups; ++g) {
#pragma unroll
        for (int32_t e = 0; e < 4; ++e) {
          const float product = spec.k_scale ? sums[g][e] * keys.scale[g][e % 2] : sums[g][e];
          const float added = score[2 * g + e % 2] + choose::relu(product) * w[e / 2];
          if (spec.num_heads % 16 == 0 || there[e / 2]) score[2 * g + e % 2] = added;
        }
      }
    }
  }

  // The sum over the eight lanes of a column; each lane ends with one key, `at` of the warp's, the half of them where
  // there are sixteen.
  FMHA_DEVICE float sum_lanes(float (&score)[2 * groups], int32_t& at) const {
    const int32_t lane = threadIdx.x % 32;
    int32_t place = 0;
#pragma unroll
    for (int32_t half = groups, mask = 16; mask >= 4; half /= 2, mask /= 2) {
      if (half > 0) {
        const bool is_upper = lane & mask;
        place = 2 * place + (is_upper ? 1 : 0);
#pragma unroll
        for (int32_t i = 0; i < half; ++i) {
          const float kept = is_upper ? score[half + i] : score[i], sent = is_upper ? score[i] : score[half + i];
          score[i] = kept + ptx::shfl_xor(sent, mask);
        }
      } else {
        score[0] += ptx::shfl_xor(score[0], mask);
      }
    }
    at = 8 * (place / 2) + 2 * (lane % 4) + place % 2;
    return score[0];
  }

  FMHA_DEVICE void run() const {
    // Order of the grid: groups of rows one after another, and for each group all blocks of keys, so that neighbouring
    // CTAs read the same rows of q.
    const int32_t blocks = ceil_div(p.seqlen_k, block_n), row_groups = int32_t(gridDim.x) / blocks;
    const int32_t of_group = ceil_div(p.row_end - p.row_begin, row_groups);
    const int32_t group = int32_t(blockIdx.x) / blocks, block = int32_t(blockIdx.x) % blocks;
    const int64_t begin = p.row_begin + int64_t(group) * of_group;
    const int32_t end = int32_t(min<int64_t>(begin + of_group, p.row_end)), first = block * block_n;
    const int32_t own = first + int32_t(threadIdx.x) / 32 * tile.warp_keys;
    const auto sees = [&](int32_t row) {
      const Range keys = choose::keys_of(p, row);
      return keys.begin < min(first + block_n, p.seqlen_k) && keys.end > first && keys.begin < keys.end;
    };
    const auto next = [&](int32_t row) {
      while (row < end && !sees(row)) {
        if (p.fills) fill(row, first);
        ++row;
      }
      return row;
    };
    if (begin >= end) return;
    int32_t row = next(int32_t(begin)), stage = 0, loaded = -1;
    Row coming;
    if (row < end) {
      fetch(coming, stage, row);
      put(coming, stage, row);
    }
    Keys keys;
#pragma unroll 1
    while (row < end) {
      const int32_t i_batch = row / p.seqlen_q;
      if (i_batch != loaded) load_keys(keys, i_batch, own, choose::length_of(p, i_batch));
      loaded = i_batch;
      const int32_t following = next(row + 1);
      ptx::cp_async_wait_group<0>();
      __syncthreads();
      if (following < end) {
        fetch(coming, stage ^ 1, following);
        if constexpr (!fetches_ahead) put(coming, stage ^ 1, following);
      }
      float score[2 * groups];
      score_row(score, keys, stage);
      if (fetches_ahead && following < end) put(coming, stage ^ 1, following);
      int32_t at;
      const float sum = sum_lanes(score, at);
      const Range seen = choose::keys_of(p, row);
      const int32_t j = own + at;
      const bool is_seen = j >= seen.begin && j < seen.end;
      const bool stores = j < p.seqlen_k && (is_seen || p.fills) && (groups == 4 || threadIdx.x % 8 < 4);
      if (stores) p.key_scores[int64_t(row - p.row_begin) * p.seqlen_k + j] = is_seen ? sum : -infinity();
      stage ^= 1;
      row = following;
    }
  }

  // Writes -inf for the CTA's keys, none of which the row sees.
  FMHA_DEVICE void fill(int32_t row, int32_t first) const {
    float* to = p.key_scores + int64_t(row - p.row_begin) * p.seqlen_k;
    const int32_t end = min(first + block_n, p.seqlen_k);
    for (int32_t j = first + int32_t(threadIdx.x); j < end; j += threads) to[j] = -infinity();
  }
};

template <IndexSpec spec, IndexTile tile>
FMHA_DEVICE void index_scores(const ChooseParams& p) {
  using Scores = IndexScores<spec, tile>;
  __shared__ typename Scores::Shared shared;
  Scores{p, shared}.run();
}

}  // namespace fmha::sm80
