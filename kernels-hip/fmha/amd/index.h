// Scores of an indexer on AMD's matrix units: I[i, j] = sum_h relu(q[i, h] . k[j]) w[i, h].
//
//   a wave      keys of its own, all their elements in registers: columns of B
//   a step      one row i: a block of its heads is A, read from LDS by all waves
//   the sum     over heads: a lane's own rows first, then those of the lane in the wave's other half
//
// k is read from memory once, and a workgroup walks over rows with it. The next row's q is loaded to registers
// meanwhile. There is one barrier a row: a row is written to LDS while the row before it is multiplied.
//
// The order of elements in a product is free where A and B share it. So both are cut into chunks of 16 bytes, and a
// lane's chunks come from memory whole.
//
// `Unit` is the matrix unit (cdna/index.h, rdna/index.h): the edge of a product, and which lanes have which chunks and
// rows. FP8 is multiplied directly if the unit supports the type, otherwise widened to 16 bits, which hold it exactly.
// Sums are f32.
#pragma once
#include <fmha/amd/index_tile.h>
#include <fmha/amd/widen_e4m3.h>
#include <fmha/choose.h>
#include <fmha/isa/sched.h>
#include <fmha/isa/sync.h>

namespace fmha::index {

template <class Unit, IndexSpec spec, IndexTile tile>
struct IndexScores {
  using Acc = typename Unit::Acc;
  static constexpr int32_t threads = tile.num_threads, groups = tile.groups, edge = Unit::edge;
  static constexpr int32_t wave_keys = groups * edge, block_n = threads / kWaveSize * wave_keys;
  static constexpr int32_t m_tiles = ceil_div(spec.num_heads, edge), heads = m_tiles * edge;
  static constexpr bool has_rest = heads != spec.num_heads;  // rows of the last block without a head
  // Number of chunks of 16 bytes, in the type that is multiplied: of a row, and of the part of a row that a lane has.
  static constexpr int32_t elems = 16 / size_bytes(tile.dtype), row_chunks = spec.head_dim / elems;
  static constexpr int32_t chunks = row_chunks / Unit::operand_halves;
  static constexpr int32_t at_once = Unit::template chunks_at_once<tile.dtype>(chunks);
  static constexpr int32_t num_chunks = heads * row_chunks, own_chunks = ceil_div(num_chunks, threads);
  static_assert(chunks * elems * Unit::operand_halves == spec.head_dim, "a row is whole steps of a product");
  static_assert(chunks % at_once == 0, "an instruction has its chunks");
  static_assert(heads <= threads, "a thread has one weight");

  struct Lds {
    // q of a row's heads: [block][chunk of a lane][lane].
    u32x4 q[2][m_tiles * chunks * Unit::operand_halves * edge];
    alignas(16) float weights[2][heads];  // in the order of a lane's sums
  };

  const ChooseParams& p;
  Lds& lds;

  template <DType stored>
  using Stored = Vec<uint32_t, 4 * size_bytes(stored) / size_bytes(tile.dtype)>;

  // Loads a chunk as it is stored; rows begin on dwords.
  template <DType stored>
  static FMHA_DEVICE Stored<stored> load(const void* data, int64_t elem) {
    using Words __attribute__((aligned(4))) = Stored<stored>;
    return *(const FMHA_GLOBAL Words*)((const FMHA_GLOBAL uint8_t*)data + elem * size_bytes(stored));
  }

  template <DType stored>
  static FMHA_DEVICE u32x4 widened(const Stored<stored>& chunk) {
    if constexpr (stored == tile.dtype) return chunk;
    else return widen_e4m3<tile.dtype>(chunk);
  }

  // A thread's part of the next row, on its way to LDS.
  struct Row {
    Stored<spec.dtype_q> chunks[own_chunks];
    float weight;
  };

  // Calls `use(n, head, chunk)` for each of a thread's chunks. Eight neighbouring lanes have the same chunk of eight
  // heads, so that they write contiguous bytes of LDS; the wave reads 64 bytes or more of each head.
  template <class Use>
  static FMHA_DEVICE void each_chunk(Use use) {
#pragma unroll
    for (int32_t n = 0; n < own_chunks; ++n) {
      const int32_t at = n * threads + thread_idx();
      use(n, at / (8 * row_chunks) * 8 + at % 8, at / 8 % row_chunks);
    }
  }

  // Loads a row's q. Heads beyond the last one repeat it; their products are not added.
  FMHA_DEVICE void fetch(Row& to, int32_t row) const {
    each_chunk([&](int32_t n, int32_t head, int32_t chunk) __attribute__((always_inline)) {
      const int64_t at = int64_t(row) * spec.num_heads + min(head, spec.num_heads - 1);
      to.chunks[n] = load<spec.dtype_q>(p.q, at * spec.head_dim + chunk * elems);
    });
    to.weight = p.weights[int64_t(row) * spec.num_heads + min(thread_idx(), spec.num_heads - 1)];
  }

  FMHA_DEVICE void put(const Row& from, int32_t stage) const {
    each_chunk([&](int32_t n, int32_t head, int32_t chunk) __attribute__((always_inline)) {
      if (num_chunks % threads != 0 && head >= heads) return;
      const int32_t block = head / edge, half = chunk % Unit::operand_halves, of_lane = chunk / Unit::operand_halves;
      const int32_t lane = half * edge + head % edge;
      lds.q[stage][(block * chunks + of_lane) * Unit::operand_halves * edge + lane] =
          widened<spec.dtype_q>(from.chunks[n]);
    });
    const int32_t head = thread_idx(), row = head % edge;
    if (head < heads) lds.weights[stage][head - row + Unit::place_of_row(row)] = from.weight;
  }

  struct Keys {
    u32x4 chunks[groups][chunks];
    float scale[groups];
  };

  // Loads a wave's keys. Keys beyond the last one repeat it; their scores are not stored.
  FMHA_DEVICE void load_keys(Keys& keys, int32_t i_batch, int32_t first, int32_t length) const {
#pragma unroll
    for (int32_t g = 0; g < groups; ++g) {
      const int32_t j = min(first + g * edge + thread_idx() % edge, length - 1);
      const choose::KeyPlace place = choose::place_of<spec.paged>(p, i_batch, j);
      const int64_t from = place.outer * p.k_outer + place.inner * p.k_key;
#pragma unroll
      for (int32_t c = 0; c < chunks; ++c) {
        const int32_t chunk = c * Unit::operand_halves + Unit::operand_half();
        keys.chunks[g][c] = widened<spec.dtype_k>(load<spec.dtype_k>(p.k, from + chunk * elems));
      }
      keys.scale[g] = spec.k_scale ? p.k_scale[place.outer * p.scale_outer + place.inner * p.scale_key] : 1.f;
    }
  }

  // Sums a row's scores over the heads that a lane has, for a key of each group.
  FMHA_DEVICE void score_row(float (&score)[groups], const Keys& keys, int32_t stage) const {
    const int32_t half = Unit::acc_half(), lane = thread_idx() % (Unit::operand_halves * edge);
#pragma unroll
    for (int32_t g = 0; g < groups; ++g) score[g] = 0.f;
#pragma nounroll
    for (int32_t m = 0; m < m_tiles; ++m) {
      Acc sums[groups];
#pragma unroll
      for (int32_t g = 0; g < groups; ++g) sums[g] = Acc{};
#pragma unroll
      for (int32_t c = 0; c < chunks; c += at_once) {
        u32x4 q[at_once];
#pragma unroll
        for (int32_t i = 0; i < at_once; ++i) {
          q[i] = lds.q[stage][(m * chunks + c + i) * Unit::operand_halves * edge + lane];
        }
#pragma unroll
        for (int32_t g = 0; g < groups; ++g) {
          sums[g] = Unit::template multiply<tile.dtype, at_once>(q, &keys.chunks[g][c], sums[g]);
        }
      }
      // A product needs the operands of all lanes, and WMMA all lanes (RDNA3 ISA 7.9). Without the asm the compiler
      // moves the product into a branch that only lanes with a head take (clang 22).
      if constexpr (has_rest) {
#pragma unroll
        for (int32_t g = 0; g < groups; ++g) opaque_in_vgpr(sums[g]);
      }
      const float* const weights = &lds.weights[stage][m * edge + half * Unit::acc_elems];
#pragma unroll
      for (int32_t e = 0; e < Unit::acc_elems; ++e) {
        const bool there = !has_rest || m * edge + Unit::row_of(e, half) < spec.num_heads;
#pragma unroll
        for (int32_t g = 0; g < groups; ++g) {
          const float product = spec.k_scale ? sums[g][e] * keys.scale[g] : sums[g][e];
          const float added = score[g] + choose::relu(product) * weights[e];
          score[g] = there ? added : score[g];
        }
      }
    }
  }

  // Range of keys that a row may see. It is equal in all lanes, which the compiler does not know of loaded values: read
  // into scalar registers, it causes no branch per lane around a product.
  FMHA_DEVICE Range keys_of(int32_t row) const {
    const Range keys = choose::keys_of(p, row);
    return {v_readfirstlane_b32(keys.begin), v_readfirstlane_b32(keys.end)};
  }

  // Adds the sums of both halves of the wave, and stores them: a lane has one key of two groups.
  FMHA_DEVICE void store(const float (&score)[groups], int32_t row, int32_t first) const {
    const Range seen = keys_of(row);
    float* const to = p.key_scores + int64_t(row - p.row_begin) * p.seqlen_k;
    const bool is_upper = Unit::acc_half() != 0;
#pragma unroll
    for (int32_t g = 0; g < groups; g += 2) {
      constexpr bool is_pair = groups % 2 == 0;
      const float kept = is_pair && is_upper ? score[g + 1] : score[g];
      const float sent = is_pair && !is_upper ? score[g + 1] : score[g];
      const float sum = kept + Unit::other_half(sent);
      const int32_t j = first + (g + (is_upper ? 1 : 0)) * edge + thread_idx() % edge;
      const bool is_seen = j >= seen.begin && j < seen.end;
      const bool stores = j < p.seqlen_k && (is_seen || p.fills) && (is_pair || !is_upper);
      if (stores) to[j] = is_seen ? sum : -infinity();
    }
  }

  // Writes -inf for the workgroup's keys, none of which the row sees.
  FMHA_DEVICE void fill(int32_t row, int32_t first) const {
    float* const to = p.key_scores + int64_t(row - p.row_begin) * p.seqlen_k;
    const int32_t end = min(first + block_n, p.seqlen_k);
    for (int32_t j = first + thread_idx(); j < end; j += threads) to[j] = -infinity();
  }

  FMHA_DEVICE void run() const {
    // Order of the grid: groups of rows one after another, and for each group all blocks of keys, so that neighbouring
    // workgroups read the same rows of q.
    const int32_t blocks = ceil_div(p.seqlen_k, block_n), row_groups = num_workgroups() / blocks;
    const int32_t of_group = ceil_div(p.row_end - p.row_begin, row_groups);
    const int32_t group = workgroup_idx() / blocks, first = workgroup_idx() % blocks * block_n;
    const int64_t begin = p.row_begin + int64_t(group) * of_group;
    const int32_t end = int32_t(min<int64_t>(begin + of_group, p.row_end));
    const int32_t own = first + v_readfirstlane_b32(thread_idx() / kWaveSize) * wave_keys;
    if (begin >= end) return;
    const auto sees = [&](int32_t row) {
      const Range keys = keys_of(row);
      return keys.begin < min(first + block_n, p.seqlen_k) && keys.end > first && keys.begin < keys.end;
    };
    const auto next = [&](int32_t row) {
      while (row < end && !sees(row)) {
        if (p.fills) fill(row, first);
        ++row;
      }
      return row;
    };
    int32_t row = next(int32_t(begin)), stage = 0, loaded = -1;
    Row coming;
    if (row < end) {
      fetch(coming, row);
      put(coming, stage);
    }
    Keys keys;
#pragma nounroll
    while (row < end) {
      const int32_t i_batch = row / p.seqlen_q;
      if (i_batch != loaded) load_keys(keys, i_batch, own, v_readfirstlane_b32(choose::length_of(p, i_batch)));
      loaded = i_batch;
      const int32_t following = next(row + 1);
      // Waits until the row's q is in LDS and no wave reads the other row's place any more.
      s_barrier_of_lds();
      if (following < end) fetch(coming, following);
      float score[groups];
      score_row(score, keys, stage);
      if (following < end) put(coming, stage ^ 1);
      store(score, row, own);
      stage ^= 1;
      row = following;
    }
  }
};

template <class Unit, IndexSpec spec, IndexTile tile>
FMHA_DEVICE void scores(const ChooseParams& p) {
  using Scores = IndexScores<Unit, spec, tile>;
  __shared__ typename Scores::Lds lds;
  Scores{p, lds}.run();
}

}  // namespace fmha::index
