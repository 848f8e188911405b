// The loss that trains an indexer, on mma.sync: scores of lists before `fmha/index_loss.h` makes losses and gradients
// of scores of them, and the gradients of q, k and weights behind it.
//
// A CTA has all heads of one query, and walks the query's list in blocks whose rows of k are gathered. Its warps share
// out each block's work:
//
//   S = Q K^T             fragments of 16 x 16. A score is the sum of relu(S) w over the heads: a thread's rows first,
//                         then the lanes that have the same column, then every 16 heads in their order
//   dw += relu(S) ds      ds: the gradient of an entry's score. In registers, a warp's heads
//   G = ds w [S > 0]      to shared memory, in 16 bits
//   dQ += G K             16 rows and a part of the columns to a warp, in registers
//   dK += G^T Q           16 keys and 32 columns at a time, added to f32 sums in memory, in no order
//
// Where sums are to have one order (`tile.range` > 0), such a CTA sums dQ and dw alone, and a launch of its own has
// CTAs of `range` keys each, to whose dK nothing else adds. A CTA of keys walks all queries in their order, and
// computes with the keys that a query's list names, once each: ds of a key that stands in it several times is the sum
// in their order.
#pragma once
#include <fmha/index_loss.h>
#include <fmha/sm80/bwd/lists.cuh>
#include <fmha/sm80_index_loss_host.h>

namespace fmha::sm80::index_loss {

namespace mma = fmha::mma::sm80;

using fmha::index_loss::key_at;
using fmha::index_loss::relu;
using lists::padded_dim;
using mma::SmemTile;

// Sums of scores over every 16 heads.
template <int rows, int columns>
using GroupSums = float[rows / 16][columns];
// Sums of weights' gradients over every warp's entries.
template <int warps>
using WarpSums = float[warps][16];

// Keys of a CTA's own range that a query's list names.
template <int range>
struct KeysOfRange {
  int32_t listed[range];         // how often the list names each key
  int32_t first[range];          // the first entry that names it
  int32_t named[range];          // those that it names, ascending
  int32_t of_group[range / 32];  // how many of them there are among every 32 keys
};

template <IndexLossSpec spec, int rows>
using Rows = SmemTile<uint16_t, rows, padded_dim(spec.head_dim)>;

}  // namespace fmha::sm80::index_loss

#include <fmha/sm80_index_loss_memory.h>  // SmemParts, of the list in src/sm80_index_loss.rs

namespace fmha::sm80::index_loss {

template <IndexLossSpec spec, IndexLossTile tile>
struct Smem : SmemParts<spec, tile> {};

template <IndexLossSpec spec, IndexLossTile tile>
struct Query {
  static constexpr int threads = 32 * tile.warps, row_groups = tile.rows / 16, key_groups = tile.columns / 16;
  static constexpr int dim = spec.head_dim, heads = spec.num_heads;
  // dQ: warps with equal rows divide its columns.
  static constexpr int parts = tile.warps / row_groups, groups = padded_dim(dim) / 16;
  static constexpr int groups_of_warp = ceil_div(groups, parts);
  static constexpr bool ordered = tile.range > 0;
  static_assert(tile.warps % row_groups == 0, "a warp has the same 16 heads in every fragment");
  static_assert(heads <= tile.rows && tile.columns <= threads, "a CTA has all heads, and a thread for each key");

  const IndexLossParams& p;
  Smem<spec, tile>& smem;
  const int64_t row;  // of the query
  const int32_t warp = threadIdx.x / 32;
  mma::Accumulator<16> dq[groups_of_warp];
  float dw[2];

  FMHA_DEVICE void load_heads() const {
    const uint16_t* data = static_cast<const uint16_t*>(static_cast<const void*>(p.q));
    copy_tile<16, threads>(
        smem.q, data,
        [&](int32_t h) -> const uint16_t* { return h < heads ? data + (row * heads + h) * dim : nullptr; },
        [](int32_t, int32_t column) { return elems_there<dim>(column); });
    for (int32_t h = threadIdx.x; h < tile.rows; h += threads)
      smem.weights[h] = h < heads ? p.weights[row * heads + h] : 0.f;
  }

  // Rows of the block's keys, which all threads of the CTA have written to shared memory.
  FMHA_DEVICE void load_keys() const {
    const uint16_t* data = static_cast<const uint16_t*>(static_cast<const void*>(p.k));
    copy_tile<16, threads>(
        smem.k, data,
        [&](int32_t n) -> const uint16_t* {
          const int32_t j = smem.keys[n];
          return j < 0 ? nullptr : data + fmha::index_loss::key_row(p, row, j) * dim;
        },
        [](int32_t, int32_t column) { return elems_there<dim>(column); });
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }

  // Calls `use(first head, first key, S)` for the warp's fragments of the block.
  template <class Use>
  FMHA_DEVICE void each_fragment(Use use) const {
#pragma unroll 1
    for (int32_t fragment = warp; fragment < row_groups * key_groups; fragment += tile.warps) {
      const int32_t first_row = fragment % row_groups * 16, first_key = fragment / row_groups * 16;
      mma::Accumulator<16> s;
      lists::product_of_sixteen<spec.dtype_q>(s, smem.q, first_row, smem.k, first_key);
      use(first_row, first_key, s);
    }
  }
  static FMHA_DEVICE int32_t row_of(int32_t first_row, int e) {
    return first_row + threadIdx.x % 32 / 4 + 8 * mma::Accumulator<16>::row(e);
  }

  // Scores of the list's entries.
  FMHA_DEVICE void run_scores() const {
    load_heads();
#pragma unroll 1
    for (int32_t block = 0; block < p.topk; block += tile.columns) {
      const int32_t n = threadIdx.x, entry = block + n;
      const bool own = n < tile.columns && entry < p.topk;
      const int32_t key = own ? key_at(p, row, entry) : -1;
      if (n < tile.columns) smem.keys[n] = key;
      // The block before has been read, and the keys are there.
      if (!__syncthreads_or(key >= 0)) {
        if (own) p.scores[row * p.topk + entry] = -infinity();
        continue;
      }
      load_keys();
      each_fragment([&](int32_t first_row, int32_t first_key, const mma::Accumulator<16>& s) {
        float sums[4] = {};  // of columns 0, 1, 8 and 9 from the thread's first on
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int32_t h = row_of(first_row, e);
          // A row without a head is zeros, which an infinite key makes NaN.
          if (heads == tile.rows || h < heads) sums[e / 4 * 2 + e % 2] += relu(s[e]) * smem.weights[h];
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
          for (int step = 4; step < 32; step *= 2) sums[c] += ptx::shfl_idx(sums[c], threadIdx.x % 32 ^ step);
        }
        if (threadIdx.x % 32 < 4) {
#pragma unroll
          for (int c = 0; c < 4; ++c)
            smem.of_groups[first_row / 16][first_key + fmha::mma::fragment_column() + c / 2 * 8 + c % 2] = sums[c];
        }
      });
      __syncthreads();
      if (own) {
        float score = 0.f;
#pragma unroll
        for (int g = 0; g < row_groups; ++g) score += smem.of_groups[g][n];
        p.scores[row * p.topk + entry] = key >= 0 ? score : -infinity();
      }
    }
    ptx::cp_async_wait_group<0>();
  }

  // G of a block to shared memory, and what its entries have for the weights.
  FMHA_DEVICE void score() {
    each_fragment([&](int32_t first_row, int32_t first_key, mma::Accumulator<16>& s) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int32_t h = row_of(first_row, e);
        const int32_t n = first_key + fmha::mma::fragment_column() + s.column(e);
        const bool there = smem.keys[n] >= 0 && h < heads;
        const float ds = smem.ds[n], x = s[e];
        if (there) dw[s.row(e)] += ds * relu(x);
        s[e] = there && x > 0.f ? ds * smem.weights[h] : 0.f;
      }
      lists::put<spec.dtype_q>(smem.factors, first_row, first_key, s);
    });
  }

  // dQ += G K.
  FMHA_DEVICE void add_dq() {
    const int32_t first_row = warp % row_groups * 16, first_group = warp / row_groups * groups_of_warp;
    const mma::LanePlace place = mma::rows_first();
    const mma::LaneAddress<decltype(smem.factors)> a0(smem.factors, {first_row + place.row, place.word});
#pragma unroll 1
    for (int step = 0; step < key_groups; ++step) {
      uint32_t a_words[4];
      ptx::ldmatrix_x4(a_words, a0.plus(0, step * 16));
#pragma unroll
      for (int g = 0; g < groups_of_warp; ++g) {
        if (first_group + g >= groups) break;
        using K = decltype(smem.k);
        const int32_t column = (first_group + g) * 16;
        uint32_t b_words[4];
        ptx::ldmatrix_x4_trans(
            b_words, smem.k.address() + fmha::mma::word_offset<K>(step * 16 + place.row, column + place.word * 8));
        const uint32_t first[2] = {b_words[0], b_words[1]}, second[2] = {b_words[2], b_words[3]};
        mma::multiply<spec.dtype_q>(&dq[g].elems[0], a_words, first);
        mma::multiply<spec.dtype_q>(&dq[g].elems[4], a_words, second);
      }
    }
  }

  // dK += G^T Q, in memory.
  FMHA_DEVICE void add_dk() const {
    // With sums of more columns a multiprocessor would have registers for two CTAs alone.
    constexpr int n = padded_dim(dim) % 32 == 0 ? 32 : 16, chunks = padded_dim(dim) / n;
#pragma unroll 1
    for (int32_t item = warp; item < key_groups * chunks; item += tile.warps) {
      const int32_t first_key = item % key_groups * 16, first_column = item / key_groups * n;
      mma::Accumulator<n> sum;
      sum.clear();
      mma::product_atb<spec.dtype_q, 1>(sum, smem.factors, first_key, smem.q, first_column);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t j = smem.keys[first_key + threadIdx.x % 32 / 4 + 8 * r];
        if (j < 0) continue;
        float* to = p.dk + fmha::index_loss::key_row(p, row, j) * dim;
#pragma unroll
        for (int e = 0; e < sum.num_elems; ++e) {
          const int32_t column = first_column + fmha::mma::fragment_column() + sum.column(e);
          if (sum.row(e) != r || (dim % 16 != 0 && column >= dim)) continue;
          if constexpr (ordered) to[column] += sum[e];
          else ptx::red_global_add_f32(to + column, sum[e]);
        }
      }
    }
  }

  // dQ and dw of the query and, if sums have no order, its contributions to dK.
  template <bool adds_dk>
  FMHA_DEVICE void run_gradients() {
    load_heads();
#pragma unroll
    for (int g = 0; g < groups_of_warp; ++g) dq[g].clear();
    dw[0] = dw[1] = 0.f;
#pragma unroll 1
    for (int32_t block = 0; block < p.topk; block += tile.columns) {
      const int32_t n = threadIdx.x, entry = block + n;
      const int32_t key = n < tile.columns && entry < p.topk ? key_at(p, row, entry) : -1;
      if (n < tile.columns) {
        smem.keys[n] = key;
        smem.ds[n] = key >= 0 ? p.scores[row * p.topk + entry] : 0.f;
      }
      // The block before has been read, and the keys are there.
      if (!__syncthreads_or(key >= 0)) continue;
      load_keys();
      score();
      __syncthreads();
      if (p.dq) add_dq();
      if (adds_dk && p.dk) add_dk();
      // Keys are read to the end.
      __syncthreads();
    }
    ptx::cp_async_wait_group<0>();
    if (p.dq) store_dq();
    if (p.dweights) store_dw();
  }

  // Terms of the query for dK of the `num` keys from `first_key` on that the range's `named` lists.
  FMHA_DEVICE void run_keys(int32_t first_key, int32_t num) {
    load_heads();
    dw[0] = dw[1] = 0.f;
#pragma unroll 1
    for (int32_t block = 0; block < num; block += tile.columns) {
      const int32_t n = threadIdx.x;
      if (n < tile.columns) {
        const bool there = block + n < num;
        const int32_t at = there ? smem.range.named[block + n] : 0;
        smem.keys[n] = there ? first_key + at : -1;
        smem.ds[n] = there ? ds_of_key(first_key + at, smem.range.first[at], smem.range.listed[at]) : 0.f;
      }
      __syncthreads();
      load_keys();
      score();
      __syncthreads();
      add_dk();
      __syncthreads();
    }
  }
  // The gradients of a key's entries, added up in their order.
  FMHA_DEVICE float ds_of_key(int32_t j, int32_t first, int32_t times) const {
    float sum = p.scores[row * p.topk + first];
    for (int32_t entry = first + 1; times > 1; ++entry) {
      if (key_at(p, row, entry) != j) continue;
      sum += p.scores[row * p.topk + entry];
      --times;
    }
    return sum;
  }

  FMHA_DEVICE void store_dq() const {
    const int32_t first_row = warp % row_groups * 16, first_group = warp / row_groups * groups_of_warp;
#pragma unroll
    for (int g = 0; g < groups_of_warp; ++g) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int32_t h = row_of(first_row, e);
        const int32_t column = (first_group + g) * 16 + fmha::mma::fragment_column() + dq[g].column(e);
        if (h < heads && column < dim) p.dq[(row * heads + h) * dim + column] = dq[g][e];
      }
    }
  }

  // Four lanes have a row's columns, and warps with equal rows other entries.
  FMHA_DEVICE void store_dw() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) dw[r] += ptx::shfl_idx(dw[r], threadIdx.x % 32 ^ step);
      if (threadIdx.x % 4 == 0) smem.of_warps[warp][threadIdx.x % 32 / 4 + 8 * r] = dw[r];
    }
    __syncthreads();
    for (int32_t h = threadIdx.x; h < heads; h += threads) {
      float sum = 0.f;
#pragma unroll
      for (int part = 0; part < parts; ++part) sum += smem.of_warps[part * row_groups + h / 16][h % 16];
      p.dweights[row * heads + h] = sum;
    }
  }
};

template <IndexLossSpec spec, IndexLossTile tile>
FMHA_DEVICE Smem<spec, tile>& shared_memory() {
  extern __shared__ __align__(1024) unsigned char raw[];
  return *reinterpret_cast<Smem<spec, tile>*>(raw);
}

// CTAs are queries.
template <IndexLossSpec spec, IndexLossTile tile>
FMHA_DEVICE void scores(const IndexLossParams& p) {
  Query<spec, tile>{p, shared_memory<spec, tile>(), int64_t(blockIdx.x)}.run_scores();
}

template <IndexLossSpec spec, IndexLossTile tile>
FMHA_DEVICE void gradients(const IndexLossParams& p) {
  Query<spec, tile>{p, shared_memory<spec, tile>(), int64_t(blockIdx.x)}.template run_gradients<true>();
}

// dQ and dw alone.
template <IndexLossSpec spec, IndexLossTile tile>
FMHA_DEVICE void query_gradients(const IndexLossParams& p) {
  Query<spec, tile>{p, shared_memory<spec, tile>(), int64_t(blockIdx.x)}.template run_gradients<false>();
}

// Which keys of [first_key, first_key + range) a query's list names, and how often: their number. All threads
// together.
template <int threads, int range>
FMHA_DEVICE int32_t keys_named(KeysOfRange<range>& keys, const IndexLossParams& p, int64_t row, int32_t first_key) {
  constexpr int groups = range / 32, warps = threads / 32;
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int32_t at = threadIdx.x; at < range; at += threads) {
    keys.listed[at] = 0;
    keys.first[at] = p.topk;
  }
  __syncthreads();
  for (int32_t entry = threadIdx.x; entry < p.topk; entry += threads) {
    const int32_t j = key_at(p, row, entry), at = j - first_key;
    if (j < 0 || at < 0 || at >= range) continue;
    atomicAdd(&keys.listed[at], 1);
    atomicMin(&keys.first[at], entry);
  }
  __syncthreads();
  for (int32_t group = warp; group < groups; group += warps) {
    const uint32_t named = ptx::vote_ballot(keys.listed[group * 32 + lane] > 0);
    if (lane == 0) keys.of_group[group] = __popc(named);
  }
  __syncthreads();
  int32_t all = 0;
  for (int32_t group = 0; group < groups; ++group) {
    if (group % warps == warp) {
      const bool is_named = keys.listed[group * 32 + lane] > 0;
      const uint32_t named = ptx::vote_ballot(is_named);
      if (is_named) keys.named[all + __popc(named & ((1u << lane) - 1))] = group * 32 + lane;
    }
    all += keys.of_group[group];
  }
  __syncthreads();
  return all;
}

// dK in a fixed order. CTAs are ranges of keys, of every sequence.
template <IndexLossSpec spec, IndexLossTile tile>
FMHA_DEVICE void keys(const IndexLossParams& p) {
  constexpr int threads = 32 * tile.warps;
  const int32_t ranges = ceil_div(p.seqlen_k, tile.range), i_batch = blockIdx.x / ranges;
  const int32_t first_key = (blockIdx.x - i_batch * ranges) * tile.range;
  Smem<spec, tile>& smem = shared_memory<spec, tile>();
  const int64_t own = int64_t(i_batch) * p.seqlen_k + first_key;
  const int32_t elems = min(tile.range, p.seqlen_k - first_key) * spec.head_dim;
  for (int32_t at = threadIdx.x; at < elems; at += threads) p.dk[own * spec.head_dim + at] = 0.f;
#pragma unroll 1
  for (int32_t i = 0; i < p.seqlen_q; ++i) {
    const int64_t row = int64_t(i_batch) * p.seqlen_q + i;
    const int32_t num = keys_named<threads, tile.range>(smem.range, p, row, first_key);
    if (num > 0) Query<spec, tile>{p, smem, row}.run_keys(first_key, num);
    // Named keys have been read.
    __syncthreads();
  }
}

}  // namespace fmha::sm80::index_loss
