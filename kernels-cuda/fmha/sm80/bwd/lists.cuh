// Backward over lists of keys on mma.sync. A CTA has up to 64 query heads of one token and kv head, and walks the
// token's list in blocks whose rows of K and V are gathered. Its warps share out each block's work:
//
//   S = Q K^T, dP = dO V^T    fragments of 16 x 16, of which P and dS go to shared memory
//   dQ += dS K                16 rows and a part of the columns to a warp, in registers
//   dK += dS^T Q, dV += P^T dO    16 keys and 64 columns at a time, added to sums in memory, in no order
//
// Five products, and each score is computed once. The sums are f32, a row for each key of the longest sequence; a
// launch that follows scales and rounds them. Absent keys come as zeros, their P and dS are 0, and nothing is added
// for them.
//
// Where sums are to have one order (`tile.range` > 0), such a CTA sums dQ alone, and a launch of its own has CTAs of
// `range` keys each, to whose dK and dV nothing else adds. A CTA of keys walks all tokens in their order. For each it
// counts how often the list names its keys, and computes with the keys that are named, once each, times their count.
// Scores are computed twice then.
#pragma once
#include <fmha/common/list_sums.cuh>
#include <fmha/common/score_pair.cuh>
#include <fmha/mma/sm80.cuh>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/simt/bwd.h>
#include <fmha/sm80/common/copy.cuh>
#include <fmha/sm80_lists_bwd_host.h>
#include <fmha/token_list.h>

namespace fmha::sm80::lists {

namespace mma = fmha::mma::sm80;

using mma::SmemTile;

// Columns that a warp adds to sums in memory at a time.
FMHA_DEVICE constexpr int columns_at_once(int dim) { return dim % 64 == 0 ? 64 : 16; }

// Keys of a CTA's own range that a token's list names, and how often.
template <int range>
struct KeysOfRange {
  int32_t listed[range];        // how often the list names each key
  int32_t named[range];         // those that it names, ascending
  int32_t of_group[range / 32]; // how many of them there are among every 32 keys
};

template <BwdSpec spec, int rows>
using ScoreTile = SmemTile<uint16_t, rows, padded_dim(spec.fwd.head_dim_qk)>;
template <BwdSpec spec, int rows>
using ValueTile = SmemTile<uint16_t, rows, padded_dim(spec.fwd.head_dim_v)>;

}  // namespace fmha::sm80::lists

#include <fmha/sm80_lists_bwd_memory.h>  // SmemParts, of the list in src/sm80_lists_bwd.rs

namespace fmha::sm80::lists {

template <BwdSpec spec, Sm80ListsBwdTile tile>
struct Smem : SmemParts<spec, tile> {
  static constexpr int dim_qk = padded_dim(spec.fwd.head_dim_qk), dim_v = padded_dim(spec.fwd.head_dim_v);
};

// Sums in memory of a key's row of dK or of dV.
template <BwdSpec spec>
using Sums = ListSums<padded_dim(spec.fwd.head_dim_qk), padded_dim(spec.fwd.head_dim_v)>;

// d = A B^T of sixteen rows of each.
template <DType dtype, class TileA, class TileB>
FMHA_DEVICE void product_of_sixteen(mma::Accumulator<16>& d, const TileA& a, int32_t a_row, const TileB& b,
                                    int32_t b_row) {
  static_assert(TileA::dim == TileB::dim, "A and B share their inner dimension");
  const mma::LanePlace a_place = mma::rows_first(), b_place = mma::depth_first();
  const mma::LaneAddress<TileA> a0(a, {a_row + a_place.row, a_place.word});
  const mma::LaneAddress<TileB> b0(b, {b_row + b_place.row, b_place.word});
  d.clear();
#pragma unroll 4
  for (int step = 0; step < TileA::dim / 16; ++step) {
    uint32_t a_words[4], b_words[4];
    ptx::ldmatrix_x4(a_words, a0.plus(0, step * 16));
    ptx::ldmatrix_x4(b_words, b0.plus(0, step * 16));
    const uint32_t first[2] = {b_words[0], b_words[1]}, second[2] = {b_words[2], b_words[3]};
    mma::multiply<dtype>(&d.elems[0], a_words, first);
    mma::multiply<dtype>(&d.elems[4], a_words, second);
  }
}

// Sixteen rows and columns of a fragment to a tile, in 16 bits.
template <DType dtype, class Tile>
FMHA_DEVICE void put(const Tile& tile, int32_t row, int32_t column, const mma::Accumulator<16>& x) {
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    const int32_t at_row = row + threadIdx.x % 32 / 4 + 8 * mma::Accumulator<16>::row(e), at_column = column + e / 4 * 8;
    const uint32_t to = tile.address() + fmha::mma::word_offset<Tile>(at_row, at_column) + threadIdx.x % 4 * 4;
    ptx::st_shared_b32(to, ptx::cvt_rn_x2<dtype>(x[e], x[e + 1]));
  }
}

template <BwdSpec spec, Sm80ListsBwdTile tile>
struct Token {
  using Shared = Smem<spec, tile>;
  static constexpr FwdSpec kFwd = spec.fwd;
  static constexpr int threads = 32 * tile.warps, row_groups = tile.rows / 16, key_groups = tile.columns / 16;
  // dQ: warps with equal rows divide its columns.
  static constexpr int parts = tile.warps / row_groups, groups = Shared::dim_qk / 16;
  static constexpr int groups_of_warp = ceil_div(groups, parts);
  static_assert(tile.warps % row_groups == 0, "sm80: all warps have sixteen rows of dQ");

  const BwdParams& p;
  Shared& smem;
  const TokenList list;
  const int32_t first_head, num_heads;  // of the CTA's rows, among the group's
  const int32_t warp = threadIdx.x / 32;
  mma::Accumulator<16> dq[groups_of_warp];

  FMHA_DEVICE const uint16_t* row_of_head(const View& view, int32_t row) const {
    const SeqSpan& span = list.span;
    const int64_t at = row_offset(view, span.storage_batch, list.token(),
                                  list.i_head_kv * p.fwd.gqa_ratio + first_head + row);
    return static_cast<const uint16_t*>(view.data) + at;
  }
  template <int dim, class Tile>
  FMHA_DEVICE void load_heads(const Tile& to, const View& view) const {
    copy_tile<tile.copy_bytes, threads>(
        to, view.data,
        [&](int32_t row) -> const uint16_t* { return row < num_heads ? row_of_head(view, row) : nullptr; },
        [](int32_t, int32_t column) { return elems_there<dim>(column); });
  }
  template <int dim, class Tile>
  FMHA_DEVICE void load_keys(const Tile& to, const View& view) const {
    const uint16_t* data = static_cast<const uint16_t*>(view.data);
    copy_tile<tile.copy_bytes, threads>(
        to, data,
        [&](int32_t row) -> const uint16_t* {
          const int32_t j = smem.keys[row];
          return j < 0 ? nullptr : data + row_offset(view, list.row_of(kFwd.kv_layout, j), list.i_head_kv);
        },
        [](int32_t, int32_t column) { return elems_there<dim>(column); });
  }

  FMHA_DEVICE void begin() {
    load_heads<kFwd.head_dim_qk>(smem.q, p.fwd.q);
    load_heads<kFwd.head_dim_v>(smem.dout, p.dout);
    ptx::cp_async_commit_group();
    for (int32_t row = threadIdx.x; row < tile.rows; row += threads) {
      const bool there = row < num_heads;
      const int32_t i_head = list.i_head_kv * p.fwd.gqa_ratio + first_head + (there ? row : 0);
      const int64_t at = stats_offset(p, list.span, i_head, list.i);
      smem.stats.lse_log2[row] = there ? p.lse_log2[at] : infinity();
      smem.stats.delta[row] = there ? p.delta[at] : 0.f;
      smem.stats.origin[row] = there ? p.score_origin[at] : 0.f;
    }
#pragma unroll
    for (int g = 0; g < groups_of_warp; ++g) dq[g].clear();
  }

  // P and dS of a block, to shared memory.
  FMHA_DEVICE void score() const {
    const float scale = p.fwd.softmax_scale;
    const BwdScore<spec, tile> modifiers = BwdScore<spec, tile>::of(p.fwd, list.span, list.i_head_kv * p.fwd.gqa_ratio,
                                                                    scale);
#pragma unroll 1
    for (int32_t fragment = warp; fragment < row_groups * key_groups; fragment += tile.warps) {
      const int32_t first_row = fragment % row_groups * 16, first_key = fragment / row_groups * 16;
      mma::Accumulator<16> s, dp;
      product_of_sixteen<kFwd.dtype_qk>(s, smem.q, first_row, smem.k, first_key);
      product_of_sixteen<kFwd.dtype_v>(dp, smem.dout, first_row, smem.v, first_key);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int32_t row = first_row + threadIdx.x % 32 / 4 + 8 * s.row(e);
        const int32_t n = first_key + fmha::mma::fragment_column() + s.column(e);
        const Pair at = {list.i, 0};
        const float lse_log2 = smem.stats.lse_log2[row], origin = smem.stats.origin[row];
        float slope, prob;
        if (origin == 0.f) {
          const Scored x = modifiers.log2(at, s[e], -lse_log2, [] { return 0.f; }, true);
          slope = x.slope;
          prob = ptx::ex2_approx_ftz(x.score);
        } else {
          const Scored x = modifiers.natural(at, s[e], [] { return 0.f; });
          slope = x.slope;
          prob = probability(x.score - origin, lse_log2);
        }
        const bool seen = smem.keys[n] >= 0 && row < num_heads;
        const float times = smem.times[n];
        s[e] = seen ? prob * times : 0.f;
        dp[e] = seen ? prob * times * (dp[e] - smem.stats.delta[row]) * slope : 0.f;
      }
      put<kFwd.dtype_v>(smem.probs, first_row, first_key, s);
      put<kFwd.dtype_qk>(smem.ds, first_row, first_key, dp);
    }
  }

  // dQ += dS K.
  FMHA_DEVICE void add_dq() {
    const int32_t first_row = warp % row_groups * 16, first_group = warp / row_groups * groups_of_warp;
    const mma::LanePlace a_place = mma::rows_first(), b_place = mma::rows_first();
    const mma::LaneAddress<decltype(smem.ds)> a0(smem.ds, {first_row + a_place.row, a_place.word});
#pragma unroll 1
    for (int step = 0; step < key_groups; ++step) {
      uint32_t a_words[4];
      ptx::ldmatrix_x4(a_words, a0.plus(0, step * 16));
#pragma unroll
      for (int g = 0; g < groups_of_warp; ++g) {
        if (first_group + g >= groups) break;
        using K = decltype(smem.k);
        const int32_t column = (first_group + g) * 16;
        const uint32_t from = smem.k.address() + fmha::mma::word_offset<K>(step * 16 + b_place.row,
                                                                           column + b_place.word * 8);
        uint32_t b_words[4];
        ptx::ldmatrix_x4_trans(b_words, from);
        const uint32_t first[2] = {b_words[0], b_words[1]}, second[2] = {b_words[2], b_words[3]};
        mma::multiply<kFwd.dtype_qk>(&dq[g].elems[0], a_words, first);
        mma::multiply<kFwd.dtype_qk>(&dq[g].elems[4], a_words, second);
      }
    }
  }

  // Adds A^T B of a block to sums in memory, with `ordered` to those of the CTA's own: A [heads, keys], B [heads,
  // dim]. `sums_of(row)` is where a key's row of sums begins.
  static constexpr bool ordered = tile.range > 0;
  template <DType dtype, class TileA, class TileB, class SumsOf>
  FMHA_DEVICE void add_to_keys(const TileA& a, const TileB& b, SumsOf sums_of) const {
    constexpr int n = columns_at_once(TileB::dim), chunks = TileB::dim / n;
#pragma unroll 1
    for (int32_t item = warp; item < key_groups * chunks; item += tile.warps) {
      const int32_t first_key = item % key_groups * 16, column = item / key_groups * n;
      mma::Accumulator<n> sum;
      sum.clear();
      mma::product_atb<dtype, 1>(sum, a, first_key, b, column);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t j = smem.keys[first_key + threadIdx.x % 32 / 4 + 8 * r];
        if (j < 0) continue;
        float* to = sums_of(j) + column + fmha::mma::fragment_column();
#pragma unroll
        for (int e = 0; e < sum.num_elems; ++e) {
          if (sum.row(e) != r) continue;
          if constexpr (ordered) to[sum.column(e)] += sum[e];
          else ptx::red_global_add_f32(to + sum.column(e), sum[e]);
        }
      }
    }
  }

  // P and dS of the block whose keys all threads of the CTA have written to shared memory.
  FMHA_DEVICE void compute_block() const {
    load_keys<kFwd.head_dim_qk>(smem.k, p.fwd.k);
    load_keys<kFwd.head_dim_v>(smem.v, p.fwd.v);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    score();
    __syncthreads();
  }
  // Adds dK and dV of that block to their sums in memory.
  FMHA_DEVICE void add_block() const {
    const Sums<spec> sums{p};
    const auto row = [&](int32_t j) { return sums.row(list.span.i_batch, list.i_head_kv, j); };
    add_to_keys<kFwd.dtype_qk>(smem.ds, smem.q, [&](int32_t j) { return sums.dk(row(j)); });
    add_to_keys<kFwd.dtype_v>(smem.probs, smem.dout, [&](int32_t j) { return sums.dv(row(j)); });
  }

  // dQ of the token's heads and, if sums have no order, its contributions to dK and dV.
  FMHA_DEVICE void run() {
    begin();
    const int32_t count = list.count();
#pragma unroll 1
    for (int32_t block = 0; block < count; block += tile.columns) {
      bool some = false;
      for (int32_t n = threadIdx.x; n < tile.columns; n += threads) {
        const int32_t key = block + n < count ? list.key(block + n) : -1;
        smem.keys[n] = key;
        smem.times[n] = 1.f;
        some |= key >= 0;
      }
      // The block before has been read, and the keys are there.
      if (!__syncthreads_or(some)) continue;
      compute_block();
      add_dq();
      if constexpr (!ordered) add_block();
      // Keys are read to the end.
      __syncthreads();
    }
    ptx::cp_async_wait_group<0>();
    store_dq();
  }

  // Terms of the token's heads for dK and dV of the `num` keys from `first_key` on, which `named` counts from there.
  FMHA_DEVICE void run_keys(int32_t first_key, int32_t num) {
    begin();
#pragma unroll 1
    for (int32_t block = 0; block < num; block += tile.columns) {
      for (int32_t n = threadIdx.x; n < tile.columns; n += threads) {
        const bool there = block + n < num;
        const int32_t at = there ? smem.range.named[block + n] : 0;
        smem.keys[n] = there ? first_key + at : -1;
        smem.times[n] = there ? float(smem.range.listed[at]) : 0.f;
      }
      __syncthreads();
      compute_block();
      add_block();
      __syncthreads();
    }
  }

  FMHA_DEVICE void store_dq() const {
    const int32_t first_row = warp % row_groups * 16 + threadIdx.x % 32 / 4, first_group = warp / row_groups * groups_of_warp;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t row = first_row + 8 * r;
      if (row >= num_heads) continue;
      const int32_t i_head = list.i_head_kv * p.fwd.gqa_ratio + first_head + row;
      const int64_t to = row_offset(p.dq, list.span.storage_batch, list.token(), i_head);
#pragma unroll
      for (int g = 0; g < groups_of_warp; ++g) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int32_t column = (first_group + g) * 16 + fmha::mma::fragment_column() + dq[g].column(e);
          if (dq[g].row(e) == r && column < kFwd.head_dim_qk)
            store_elem<spec.dtype_grad>(const_cast<void*>(static_cast<const void*>(p.dq.data)), to + column,
                                        dq[g][e] * p.fwd.softmax_scale);
        }
      }
    }
  }
};

// CTAs are parts of a token's heads, for every token, kv head and sequence.
template <BwdSpec spec, Sm80ListsBwdTile tile>
FMHA_DEVICE void bwd(const BwdParams& p, const ListParams& lists) {
  static_assert(!spec.fwd.dropout && spec.fwd.bias == BiasKind::None, "sm80: a place in a list is not a position");
  const int32_t parts = ceil_div(p.fwd.gqa_ratio, tile.rows), part = blockIdx.x % parts;
  const int32_t i = blockIdx.x / parts % p.fwd.seqlen_q, head = blockIdx.x / parts / p.fwd.seqlen_q;
  const int32_t i_batch = head / p.fwd.num_heads_kv, i_head_kv = head % p.fwd.num_heads_kv;
  if (i_batch >= p.fwd.batch) return;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  if (i >= span.seqlen_q) return;
  extern __shared__ __align__(1024) unsigned char raw[];
  const MaskBand band = resolve_band(p.fwd.mask, span.seqlen_q, span.seqlen_k);
  const int32_t first_head = part * tile.rows;
  Token<spec, tile> token{p, *reinterpret_cast<Smem<spec, tile>*>(raw), {p.fwd, lists, span, band, i, i_head_kv},
                          first_head, min(tile.rows, p.fwd.gqa_ratio - first_head)};
  token.run();
}

// Which keys of [first_key, first_key + range) a token's list names, and how often: their number. All threads
// together.
template <int threads, int range>
FMHA_DEVICE int32_t keys_named(KeysOfRange<range>& keys, const TokenList& list, int32_t first_key) {
  constexpr int groups = range / 32, warps = threads / 32;
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int32_t at = threadIdx.x; at < range; at += threads) keys.listed[at] = 0;
  __syncthreads();
  const int32_t count = list.count();
  for (int32_t n = threadIdx.x; n < count; n += threads) {
    const int32_t at = list.key(n) - first_key;
    if (at >= 0 && at < range) atomicAdd(&keys.listed[at], 1);
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

// dK and dV in a fixed order. CTAs are ranges of keys, for every kv head and sequence.
template <BwdSpec spec, Sm80ListsBwdTile tile>
FMHA_DEVICE void bwd_keys(const BwdParams& p, const ListParams& lists) {
  const int32_t ranges = ceil_div(p.fwd.seqlen_k, tile.range), head = blockIdx.x / ranges;
  const int32_t i_batch = head / p.fwd.num_heads_kv, i_head_kv = head % p.fwd.num_heads_kv;
  if (i_batch >= p.fwd.batch) return;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const int32_t first_key = (blockIdx.x - head * ranges) * tile.range;
  if (first_key >= span.seqlen_k) return;
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<spec, tile>& smem = *reinterpret_cast<Smem<spec, tile>*>(raw);
  const MaskBand band = resolve_band(p.fwd.mask, span.seqlen_q, span.seqlen_k);
#pragma unroll 1
  for (int32_t i = 0; i < span.seqlen_q; ++i) {
    const TokenList list = {p.fwd, lists, span, band, i, i_head_kv};
    const int32_t num = keys_named<32 * tile.warps, tile.range>(smem.range, list, first_key);
    if (num == 0) continue;
#pragma unroll 1
    for (int32_t first_head = 0; first_head < p.fwd.gqa_ratio; first_head += tile.rows) {
      Token<spec, tile> token{p, smem, list, first_head, min(tile.rows, p.fwd.gqa_ratio - first_head)};
      token.run_keys(first_key, num);
    }
  }
}

// dK and dV from their sums: any grid of whole warps, each with a key's row at a time.
template <BwdSpec spec>
FMHA_DEVICE void finish(const BwdParams& p) {
  const Sums<spec> sums{p};
  simt::for_each_row(num_key_rows(p), [&](int64_t at) {
    const int32_t j = int32_t(at % p.fwd.seqlen_k), head = int32_t(at / p.fwd.seqlen_k);
    const int32_t i_batch = head / p.fwd.num_heads_kv, i_head_kv = head % p.fwd.num_heads_kv;
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
    if (j >= span.seqlen_k) return;
    const int64_t row = sums.row(i_batch, i_head_kv, j);
    const KvRow place = kv_row(p.fwd, spec.fwd.kv_layout, span, j);
    const auto store = [&](const View& view, const float* from, int32_t dim, float factor) {
      const int64_t to = row_offset(view, place, i_head_kv);
      for (int32_t d = threadIdx.x % 32; d < dim; d += 32)
        store_elem<spec.dtype_grad>(const_cast<void*>(static_cast<const void*>(view.data)), to + d, from[d] * factor);
    };
    store(p.dk, sums.dk(row), spec.fwd.head_dim_qk, p.fwd.softmax_scale);
    store(p.dv, sums.dv(row), spec.fwd.head_dim_v, 1.f);
  });
}

}  // namespace fmha::sm80::lists
