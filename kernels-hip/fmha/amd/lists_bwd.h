// Backward over lists of keys on matrix units. The waves of a workgroup share the columns of their rows: each
// multiplies its steps of a score, the sums are added through LDS, and each sums its own blocks of a gradient's
// columns.
//
//   launch   lanes              registers          sums
//   dQ       heads of a token   32 entries of the  dQ^T += K^T dS^T, over the token's list
//                               token's list
//   keys     keys of a range    32 heads of a      dV^T = dO^T P, dK^T = Q^T dS, added to f32 sums in memory
//                               token
//
// In both, P and dS are the second product's operand as they lie. A workgroup of keys owns a range of them, to which
// nothing else adds, and walks all tokens in their order. For each it counts how often the token's list names its keys,
// packs those that are named, each once, and multiplies P and dS by the count. So every sum has one order: tokens, and
// within one its heads. Scores are computed twice. A last launch scales and rounds dK and dV.
//
// Rows are gathered straight to registers: 16 bytes a lane for products over columns, and element by element of 32 rows
// where a product runs over rows.
//
// `U` is the matrix unit (cdna/bwd/lists.h, rdna/bwd/lists.h): `edge` own rows, one a lane, against 32 walked ones
// along a lane's registers, whose numbers within the block the first 32 lanes have too.
#pragma once
#include <fmha/amd/lists_bwd_tile.h>
#include <fmha/amd/load_words.h>
#include <fmha/amd/score.h>
#include <fmha/cdna/bwd/job.h>
#include <fmha/isa/atomic.h>
#include <fmha/isa/sync.h>
#include <fmha/simt/bwd.h>
#include <fmha/token_list.h>

namespace fmha::cdna::bwd::lists {

constexpr int kRows = kBlockRows;  // walked rows of a block: heads, or entries of a list
constexpr int kStep = 16;          // columns of a row that a wave multiplies at a time, half of them in a lane
using Chunk = u32x4;               // eight elements of 16 bits

template <BwdSpec spec, class U>
struct Config {
  static constexpr DType dtype = spec.fwd.dtype_qk;
  static constexpr int dim_qk = spec.fwd.head_dim_qk, dim_v = spec.fwd.head_dim_v;
  static constexpr int waves = U::waves(dim_qk, dim_v), threads = waves * kWaveSize;
  // Steps of columns, and blocks of a gradient's, that a wave has.
  static constexpr int score_steps = ceil_div(dim_qk, kStep * waves), value_steps = ceil_div(dim_v, kStep * waves);
  static constexpr int score_blocks = ceil_div(dim_qk, U::edge * waves), value_blocks = ceil_div(dim_v, U::edge * waves);
  // Elements of a key's row of sums.
  static constexpr int row_qk = score_blocks * waves * U::edge, row_v = value_blocks * waves * U::edge;
  // gfx90a's matrix unit flushes f16 subnormals to 0: P lies higher there.
  static constexpr float p_scale = dtype == DType::F16 && kArch == Arch::Gfx90a ? 4096.f : 1.f;
};

// Sums of scores and of dP over each wave's columns, four registers of a lane side by side.
template <int waves>
struct WaveSums {
  u32x4 of[2][waves][4][kWaveSize];
};

FMHA_DEVICE int wave_idx() { return v_readfirstlane_b32(thread_idx() / kWaveSize); }
// The walked row whose number a lane has.
FMHA_DEVICE int lane_row() { return thread_idx() % kRows; }

// The first column of the wave's block.
template <class C, class U>
FMHA_DEVICE int32_t column_of(int block, int i_wave) {
  return (block * C::waves + i_wave) * U::edge;
}

// Loads the lane's half of the wave's step `s` of a row; columns behind the row's end are 0.
template <int dim, int steps, int waves>
FMHA_DEVICE Chunk load_chunk(const uint8_t* row, int s, int i_wave, int half) {
  const int32_t first = (s * waves + i_wave) * kStep + half * (kStep / 2);
  constexpr bool ends_early = dim != steps * waves * kStep;
  const Chunk chunk = load_global<OnDwords<4>>(row + (!ends_early || first < dim ? first : 0) * kElemBytes);
  if constexpr (!ends_early) return chunk;
  // The mask is opaque: selects that the compiler makes for a row's chunks would fill the scalar registers.
  uint32_t is_there = first < dim ? 0xffffffff : 0;
  opaque_in_vgpr(is_there);
  return chunk & is_there;
}

// The lane's half of the wave's steps of a row.
template <int dim, int steps, int waves>
FMHA_DEVICE void load_row(Array<Chunk, steps>& to, const uint8_t* row, int i_wave, int half) {
#pragma unroll
  for (int s = 0; s < steps; ++s) to[s] = load_chunk<dim, steps, waves>(row, s, i_wave, half);
}

// Offset, in bytes, that lane `lane` has.
FMHA_DEVICE int64_t offset_of_lane(int lane, int64_t offset) {
  const uint32_t low = uint32_t(ds_bpermute_b32(lane, int(uint32_t(offset))));
  const uint32_t high = uint32_t(ds_bpermute_b32(lane, int(uint32_t(uint64_t(offset) >> 32))));
  return int64_t(uint64_t(high) << 32 | low);
}

// The 16 rows of a block of 32 that a lane has in a product over rows, with other rows in each
// half of the wave. `offset`: byte offset of the row whose number is `lane_row()`.
template <class U>
struct RowsOfLane {
  const uint8_t* at[2][8];

  static FMHA_DEVICE RowsOfLane of(const void* data, int64_t offset) {
    const int half = U::lane_half();
    RowsOfLane rows;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int from = U::walked_row(8 * s + j, 0) + U::walked_row(0, half);
        rows.at[s][j] = static_cast<const uint8_t*>(data) + offset_of_lane(from, offset);
      }
    }
    return rows;
  }

  // Column `column` of the rows whose bit is set, and 0 for the others: two operands.
  FMHA_DEVICE Array<Chunk, 2> column(int32_t column, uint32_t shown) const {
    const uint32_t of_half = shown >> U::walked_row(0, U::lane_half());
    Array<Chunk, 2> chunks = {};
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t mask = 0u - (of_half >> U::walked_row(8 * s + j, 0) & 1);
        chunks[s][j / 2] |= (load_code<kElemBytes>(at[s][j] + column * kElemBytes) & mask) << (j % 2 * 16);
      }
    }
    return chunks;
  }
};

// sums^T += rows^T x, of the wave's blocks of columns.
template <class C, class U, int dim, int blocks>
FMHA_DEVICE void add_rows(Array<typename U::Acc, blocks>& sums, const RowsOfLane<U>& rows, uint32_t shown,
                          const PairValues& x, int i_wave) {
  const auto operands = U::template packed<C::dtype>(x);
#pragma unroll
  for (int b = 0; b < blocks; ++b) {
    // Columns beyond the row's end repeat its last column; their sums are not stored.
    const Array<Chunk, 2> columns = rows.column(min(column_of<C, U>(b, i_wave) + U::lane_col(), dim - 1), shown);
#pragma unroll
    for (int s = 0; s < 2; ++s) sums[b] = U::template multiply<C::dtype>(columns[s], operands[s], sums[b]);
    sched_barrier();
  }
}

// Adds the other waves' sums of scores and of dP: pairs of waves, then pairs of pairs, so that all waves get equal
// bits.
template <int waves>
FMHA_DEVICE void add_others(WaveSums<waves>& lds, PairValues& s, PairValues& dp, int i_wave) {
  const int lane = thread_idx() % kWaveSize;
  s_barrier_of_lds();  // all waves have read the block before
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const auto four = [&](const PairValues& x) __attribute__((always_inline)) {
      return u32x4{bits_of(x[4 * r]), bits_of(x[4 * r + 1]), bits_of(x[4 * r + 2]), bits_of(x[4 * r + 3])};
    };
    lds.of[0][i_wave][r][lane] = four(s);
    lds.of[1][i_wave][r][lane] = four(dp);
  }
  s_barrier_of_lds();
  const auto add = [&](PairValues& x, int which) __attribute__((always_inline)) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      u32x4 of[waves];
#pragma unroll
      for (int w = 1; w < waves; ++w) of[w] = lds.of[which][i_wave ^ w][r][lane];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto pair = [&](int w) __attribute__((always_inline)) { return float_of(of[w][i]) + float_of(of[w + 1][i]); };
        float sum = (x[4 * r + i] + float_of(of[1][i])) + pair(2);
        if constexpr (waves == 8) sum += pair(4) + pair(6);
        x[4 * r + i] = sum;
      }
      // Keeps the compiler from reading all waves' sums ahead: eight waves' would fill the registers.
      if constexpr (waves == 8) sched_barrier();
    }
  };
  static_assert(waves == 4 || waves == 8, "pairs of pairs of waves");
  add(s, 0);
  add(dp, 1);
}

// Numbers of a query row.
struct QueryNumbers {
  float lse_log2, origin, delta;

  static FMHA_DEVICE QueryNumbers of(const BwdParams& p, const SeqSpan& span, int32_t i_head, int32_t i) {
    const int64_t at = stats_offset(p, span, i_head, i);
    return {p.lse_log2[at], p.score_origin[at], p.delta[at]};
  }
};

// P and dS of a pair from its raw score and dP. They are 0 for an absent pair, whatever its operands hold.
template <class Modifiers>
FMHA_DEVICE void pair(float& s, float& dp, const Modifiers& modifiers, int32_t i, const QueryNumbers& row, float times,
                      bool there) {
  const Scored score = modifiers.natural({i, 0}, s, [] { return 0.f; });
  const float prob = probability(score.score - row.origin, row.lse_log2) * times;
  const float ds = prob * (dp - row.delta) * score.slope;
  s = there ? prob : 0.f;
  dp = there ? ds : 0.f;
}

template <BwdSpec spec>
FMHA_DEVICE TokenList list_of(const ListsBwdParams& params, const SeqSpan& span, int32_t i, int32_t i_head_kv) {
  const FwdParams& p = params.bwd.fwd;
  return {p, params.lists, span, resolve_band(p.mask, span.seqlen_q, span.seqlen_k), i, i_head_kv};
}

template <BwdSpec spec>
FMHA_DEVICE int64_t key_offset(const FwdParams& p, const View& view, const SeqSpan& span, int32_t i_head_kv, int32_t j) {
  return row_offset(view, kv_row(p, spec.fwd.kv_layout, span, j), i_head_kv) * kElemBytes;
}

// Offset of a token's row, of head `row` of a kv head's group, in bytes.
FMHA_DEVICE int64_t head_offset(const View& view, const SeqSpan& span, int32_t i, int32_t i_head) {
  return row_offset(view, span.storage_batch, int64_t(span.q_row) + i, i_head) * kElemBytes;
}

// dQ. Workgroups are blocks of a token's heads, for every token, kv head and sequence.
template <BwdSpec spec, class U>
FMHA_DEVICE void dq(const ListsBwdParams& params) {
  using C = Config<spec, U>;
  __shared__ WaveSums<C::waves> lds;
  const BwdParams& p = params.bwd;
  const int32_t blocks = ceil_div(p.fwd.gqa_ratio, U::edge), first_head = workgroup_idx() % blocks * U::edge;
  const int32_t i = workgroup_idx() / blocks % p.fwd.seqlen_q, head = workgroup_idx() / blocks / p.fwd.seqlen_q;
  const int32_t i_head_kv = head % p.fwd.num_heads_kv, i_wave = wave_idx();
  const SeqSpan span = span_of(p.fwd, head / p.fwd.num_heads_kv);
  if (i >= span.seqlen_q) return;
  const TokenList list = list_of<spec>(params, span, i, i_head_kv);
  // Lanes beyond the last head repeat it, and store nothing.
  const int32_t row = min(first_head + U::lane_col(), p.fwd.gqa_ratio - 1), i_head = i_head_kv * p.fwd.gqa_ratio + row;
  typename U::template Own<C, C::dim_qk, C::score_steps> q;
  typename U::template Own<C, C::dim_v, C::value_steps> dout;
  q.load(p.fwd.q.data, head_offset(p.fwd.q, span, i, i_head), i_wave);
  dout.load(p.dout.data, head_offset(p.dout, span, i, i_head), i_wave);
  const QueryNumbers numbers = QueryNumbers::of(p, span, i_head, i);
  const auto modifiers = Score<spec.fwd, typename U::Tanh>::of(p.fwd, span, i_head, p.fwd.softmax_scale);
  Array<typename U::Acc, C::score_blocks> sums;
#pragma unroll
  for (int b = 0; b < C::score_blocks; ++b) sums[b] = typename U::Acc{};
  const int32_t count = span.seqlen_k > 0 ? v_readfirstlane_b32(list.count()) : 0;
#pragma nounroll
  for (int32_t first = 0; first < count; first += kRows) {
    const int32_t at = first + lane_row(), named = list.key(min(at, count - 1)), key = at < count ? named : -1;
    const uint32_t shown = uint32_t(v_cmp_ballot(key >= 0));
    if (shown == 0) continue;
    // An entry that names no key has the row of one that does. The lane is read before the choice: inside it clang 22
    // knows that the lane's own key is below 0, and takes the other's for that too.
    const int32_t other = v_readlane_b32(key, __builtin_ctz(shown)), j = key >= 0 ? key : other;
    const int64_t k_at = key_offset<spec>(p.fwd, p.fwd.k, span, i_head_kv, j);
    typename U::template Walked<C, C::dim_qk, C::score_steps> k;
    typename U::template Walked<C, C::dim_v, C::value_steps> v;
    k.load(p.fwd.k.data, k_at, i_wave);
    v.load(p.fwd.v.data, key_offset<spec>(p.fwd, p.fwd.v, span, i_head_kv, j), i_wave);
    PairValues s = k.product(q), dp = v.product(dout);
    add_others(lds, s, dp, i_wave);
    const uint32_t of_half = shown >> U::walked_row(0, U::lane_half());
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      float score = s[e], ds = dp[e];
      pair(score, ds, modifiers, i, numbers, 1.f, (of_half >> U::walked_row(e, 0) & 1) != 0);
      dp[e] = ds;
    }
    add_rows<C, U, C::dim_qk>(sums, RowsOfLane<U>::of(p.fwd.k.data, k_at), shown, dp, i_wave);
  }
  if (first_head + U::lane_col() >= p.fwd.gqa_ratio) return;
  const int64_t to = row_offset(p.dq, span.storage_batch, list.token(), i_head);
#pragma unroll
  for (int b = 0; b < C::score_blocks; ++b) {
#pragma unroll
    for (int e = 0; e < U::acc_elems; ++e) {
      const int32_t column = column_of<C, U>(b, i_wave) + U::acc_row(e, U::lane_half());
      if (column < C::dim_qk) {
        store_elem<spec.dtype_grad>(p.dq.data, to + column, sums[b][e] * p.fwd.softmax_scale);
      }
    }
  }
}

// Keys of a workgroup's own range that a token's list names, and how often.
template <int range, int threads>
struct KeysOfRange {
  int32_t listed[range];          // how often the list names each key
  int32_t named[range];           // those that it names, ascending
  int32_t of_group[range / kRows];  // how many of them there are among every 32 keys

  // Which keys of [first_key, first_key + range) a token's list names: their number. All threads together.
  FMHA_DEVICE int32_t find(const TokenList& list, int32_t first_key) {
    const int thread = thread_idx(), group_of_thread = thread / kRows, in_group = thread % kRows;
    for (int32_t at = thread; at < range; at += threads) listed[at] = 0;
    s_barrier_of_lds();
    const int32_t count = v_readfirstlane_b32(list.count());
    for (int32_t n = thread; n < count; n += threads) {
      const int32_t at = list.key(n) - first_key;
      if (at >= 0 && at < range) ds_add_u32((int32_t FMHA_LDS*)&listed[at], 1);
    }
    s_barrier_of_lds();
    // Groups of 32 keys have 32 lanes each.
    for (int32_t group = group_of_thread; group < range / kRows; group += threads / kRows) {
      const uint32_t bits = bits_of_group(listed[group * kRows + in_group] > 0);
      if (in_group == 0) of_group[group] = __builtin_popcount(bits);
    }
    s_barrier_of_lds();
    int32_t all = 0;
    for (int32_t group = 0; group < range / kRows; ++group) {
      if (group % (threads / kRows) == group_of_thread) {
        const bool is_named = listed[group * kRows + in_group] > 0;
        const uint32_t bits = bits_of_group(is_named);
        if (is_named) named[all + __builtin_popcount(bits & ((1u << in_group) - 1))] = group * kRows + in_group;
      }
      all += of_group[group];
    }
    s_barrier_of_lds();
    return v_readfirstlane_b32(all);
  }

 private:
  // Bits of these 32 lanes.
  static FMHA_DEVICE uint32_t bits_of_group(bool x) {
    const uint64_t bits = v_cmp_ballot(x);
    return kWaveSize > kRows && thread_idx() / kRows % 2 ? uint32_t(bits >> 32) : uint32_t(bits);
  }
};

// Rows of the sums of dK and dV.
template <BwdSpec spec, class U>
struct Sums {
  using C = Config<spec, U>;
  const BwdParams& p;

  FMHA_DEVICE int64_t row(int32_t i_batch, int32_t i_head_kv, int32_t j) const {
    return (int64_t(i_batch) * p.fwd.seqlen_k + j) * p.fwd.num_heads_kv + i_head_kv;
  }
  FMHA_DEVICE float* dk(int64_t row) const { return reinterpret_cast<float*>(p.non_finite) + row * (C::row_qk + C::row_v); }
  FMHA_DEVICE float* dv(int64_t row) const { return dk(row) + C::row_qk; }
};

// Adds the wave's blocks to a key's row of sums, which lanes of this wave alone add to.
template <class C, class U, int blocks>
FMHA_DEVICE void add_to_memory(float* row, const Array<typename U::Acc, blocks>& sums, float factor, int i_wave) {
  const int half = U::lane_half();
#pragma unroll
  for (int b = 0; b < blocks; ++b) {
    const auto runs = U::in_runs(sums[b]);
#pragma unroll
    for (int e = 0; e < U::acc_elems; e += 4) {
      f32x4 FMHA_GLOBAL* const to = (f32x4 FMHA_GLOBAL*)(row + column_of<C, U>(b, i_wave) + U::row_of_run(e, half));
      *to += f32x4{runs[e], runs[e + 1], runs[e + 2], runs[e + 3]} * factor;
    }
    // Keeps the compiler from loading all blocks ahead, for which there are not enough registers.
    if constexpr (C::waves == 8) sched_barrier();
  }
}

template <int range, int waves>
struct KeysLds {
  WaveSums<waves> sums;
  KeysOfRange<range, waves * kWaveSize> keys;
};

// The share of token i in dK and dV of the `num` keys that `keys` has found.
template <BwdSpec spec, class U, class Lds>
FMHA_DEVICE void add_token(Lds& lds, const ListsBwdParams& params, const SeqSpan& span, int32_t i,
                           int32_t i_head_kv, int32_t first_key, int32_t num) {
  using C = Config<spec, U>;
  const BwdParams& p = params.bwd;
  const int32_t gqa = p.fwd.gqa_ratio, i_wave = wave_idx();
#pragma nounroll
  for (int32_t block = 0; block < num; block += U::edge) {
    // Lanes beyond the last key repeat it, and add nothing.
    const int32_t n = block + U::lane_col(), at = lds.keys.named[min(n, num - 1)], j = first_key + at;
    const float times = float(lds.keys.listed[at]);
    typename U::template Own<C, C::dim_qk, C::score_steps> k;
    typename U::template Own<C, C::dim_v, C::value_steps> v;
    k.load(p.fwd.k.data, key_offset<spec>(p.fwd, p.fwd.k, span, i_head_kv, j), i_wave);
    v.load(p.fwd.v.data, key_offset<spec>(p.fwd, p.fwd.v, span, i_head_kv, j), i_wave);
    Array<typename U::Acc, C::score_blocks> dk;
    Array<typename U::Acc, C::value_blocks> dv;
#pragma unroll
    for (int b = 0; b < C::score_blocks; ++b) dk[b] = typename U::Acc{};
#pragma unroll
    for (int b = 0; b < C::value_blocks; ++b) dv[b] = typename U::Acc{};
#pragma nounroll
    for (int32_t first_head = 0; first_head < gqa; first_head += kRows) {
      const int32_t i_head = i_head_kv * gqa + min(first_head + lane_row(), gqa - 1);
      const uint32_t heads = gqa - first_head >= kRows ? ~0u : (1u << (gqa - first_head)) - 1;
      const int64_t q_at = head_offset(p.fwd.q, span, i, i_head), dout_at = head_offset(p.dout, span, i, i_head);
      typename U::template Walked<C, C::dim_qk, C::score_steps> q;
      typename U::template Walked<C, C::dim_v, C::value_steps> dout;
      q.load(p.fwd.q.data, q_at, i_wave);
      dout.load(p.dout.data, dout_at, i_wave);
      const QueryNumbers of_lane = QueryNumbers::of(p, span, i_head, i);
      const auto modifiers = Score<spec.fwd, typename U::Tanh>::of(p.fwd, span, i_head, p.fwd.softmax_scale);
      PairValues s = q.product(k), dp = dout.product(v);
      add_others(lds.sums, s, dp, i_wave);
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        const int from = U::walked_row(e, U::lane_half());
        const QueryNumbers numbers = {ds_bpermute_b32(from, of_lane.lse_log2), ds_bpermute_b32(from, of_lane.origin),
                                      ds_bpermute_b32(from, of_lane.delta)};
        float prob = s[e], ds = dp[e];
        pair(prob, ds, modifiers, i, numbers, times, (heads >> from & 1) != 0);
        s[e] = prob * C::p_scale;
        dp[e] = ds;
      }
      add_rows<C, U, C::dim_qk>(dk, RowsOfLane<U>::of(p.fwd.q.data, q_at), heads, dp, i_wave);
      sched_barrier();
      add_rows<C, U, C::dim_v>(dv, RowsOfLane<U>::of(p.dout.data, dout_at), heads, s, i_wave);
    }
    if (n < num) {
      const Sums<spec, U> sums{p};
      const int64_t row = sums.row(span.i_batch, i_head_kv, j);
      add_to_memory<C, U>(sums.dk(row), dk, 1.f, i_wave);
      add_to_memory<C, U>(sums.dv(row), dv, 1.f / C::p_scale, i_wave);
    }
    // Another lane of the wave may add to the row for the next token.
    lds_in_order();
  }
}

// dK and dV. Workgroups are ranges of keys, for every kv head and sequence.
template <BwdSpec spec, class U, int range>
FMHA_DEVICE void keys(const ListsBwdParams& params) {
  __shared__ KeysLds<range, Config<spec, U>::waves> lds;
  const FwdParams& p = params.bwd.fwd;
  const int32_t ranges = ceil_div(p.seqlen_k, range), head = workgroup_idx() / ranges;
  const SeqSpan span = span_of(p, head / p.num_heads_kv);
  const int32_t i_head_kv = head % p.num_heads_kv, first_key = (workgroup_idx() - head * ranges) * range;
  if (first_key >= span.seqlen_k) return;
#pragma nounroll
  for (int32_t i = 0; i < span.seqlen_q; ++i) {
    const int32_t num = lds.keys.find(list_of<spec>(params, span, i, i_head_kv), first_key);
    if (num > 0) add_token<spec, U>(lds, params, span, i, i_head_kv, first_key, num);
    s_barrier_of_lds();  // all waves have read which keys are named
  }
}

// dK and dV from their sums, then dSink: any grid of whole waves, each with a row at a time.
template <BwdSpec spec, class U>
FMHA_DEVICE void finish(const ListsBwdParams& params) {
  const BwdParams& p = params.bwd;
  const Sums<spec, U> sums{p};
  simt::for_each_row(num_key_rows(p) + (spec.write_dsink ? p.fwd.num_heads_q : 0), [&](int64_t at) {
    if (at >= num_key_rows(p)) {
      if constexpr (spec.write_dsink) bwd_sink<spec, simt::Lanes>(p, int32_t(at - num_key_rows(p)));
      return;
    }
    const int32_t j = int32_t(at % p.fwd.seqlen_k), head = int32_t(at / p.fwd.seqlen_k);
    const int32_t i_batch = head / p.fwd.num_heads_kv, i_head_kv = head % p.fwd.num_heads_kv;
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
    if (j >= span.seqlen_k) return;
    const int64_t row = sums.row(i_batch, i_head_kv, j);
    const KvRow place = kv_row(p.fwd, spec.fwd.kv_layout, span, j);
    const auto store = [&](const View& view, const float* from, int32_t dim, float factor) {
      const int64_t to = row_offset(view, place, i_head_kv);
      for (int32_t d = simt::Lanes::index(); d < dim; d += simt::Lanes::count) {
        store_elem<spec.dtype_grad>(const_cast<void*>(static_cast<const void*>(view.data)), to + d, from[d] * factor);
      }
    };
    store(p.dk, sums.dk(row), spec.fwd.head_dim_qk, p.fwd.softmax_scale);
    store(p.dv, sums.dv(row), spec.fwd.head_dim_v, 1.f);
  });
}

}  // namespace fmha::cdna::bwd::lists
