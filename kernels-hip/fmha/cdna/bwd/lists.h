// Backward over lists of keys on MFMA. Four waves of a workgroup share the columns of their rows: each multiplies its
// steps of a score, the four sums are added through LDS, and each sums its own blocks of a gradient's columns.
//
//   launch   lanes              registers          sums
//   dQ       32 heads of a      32 entries of the  dQ^T += K^T dS^T, over the token's list
//            token              token's list
//   keys     32 keys of a       32 heads of a      dV^T = dO^T P, dK^T = Q^T dS, added to f32 sums in memory
//            range              token
//
// In both, P and dS are the second product's operand as they lie. A workgroup of keys owns a range of them, to which
// nothing else adds, and walks all tokens in their order. For each it counts how often the token's list names its keys,
// packs those that are named, each once, and multiplies P and dS by the count. So every sum has one order: tokens, and
// within one its heads. Scores are computed twice. A last launch scales and rounds dK and dV.
//
// Rows are gathered straight to registers: 16 bytes a lane for products over columns, and element by element of 32 rows
// where a product runs over rows.
#pragma once
#include <fmha/cdna/bwd/lists_tile.h>
#include <fmha/cdna/bwd/main.h>
#include <fmha/cdna/decode/load.h>
#include <fmha/isa/atomic.h>
#include <fmha/simt/bwd.h>
#include <fmha/token_list.h>

namespace fmha::cdna::bwd::lists {

constexpr int kWaves = 4, kThreads = kWaves * kWaveSize;
constexpr int kRows = 32;  // heads, and keys or entries, of a block

template <BwdSpec spec>
struct Config {
  static constexpr DType dtype = spec.fwd.dtype_qk;
  static constexpr int dim_qk = spec.fwd.head_dim_qk, dim_v = spec.fwd.head_dim_v;
  // Steps of 16 columns, and blocks of 32, that a wave has: every fourth.
  static constexpr int score_steps = ceil_div(dim_qk, 16 * kWaves), value_steps = ceil_div(dim_v, 16 * kWaves);
  static constexpr int score_blocks = ceil_div(dim_qk, kEdge * kWaves), value_blocks = ceil_div(dim_v, kEdge * kWaves);
  // Elements of a key's row of sums.
  static constexpr int row_qk = score_blocks * kWaves * kEdge, row_v = value_blocks * kWaves * kEdge;
  // gfx90a's matrix unit flushes f16 subnormals to 0: P lies higher there.
  static constexpr float p_scale = dtype == DType::F16 && kArch == Arch::Gfx90a ? 4096.f : 1.f;
};

// Sums of scores and of dP over each wave's columns, four registers of a lane side by side.
struct WaveSums {
  Frag of[2][kWaves][4][kWaveSize];
};

FMHA_DEVICE int wave_idx() { return v_readfirstlane_b32(thread_idx() / kWaveSize); }
FMHA_DEVICE int32_t column_of(int block, int i_wave) { return (block * kWaves + i_wave) * kEdge; }

// Loads a lane's row: the wave's steps of it.
template <int dim, int steps>
FMHA_DEVICE void load_row(Array<Frag, steps>& to, const uint8_t* row, int i_wave) {
  const int half = lane_half();
#pragma unroll
  for (int s = 0; s < steps; ++s) {
    to[s] = decode::load_chunk<LoadPath::Chunks, kElemBytes, dim != steps * kWaves * 16>(
        row, (s * kWaves + i_wave) * 16 + half * 8, dim);
  }
}

// The 16 rows of a block of 32 that a lane has in a product over rows, with other rows in each
// half of the wave. `offset`: byte offset of the row whose number is the lane's within its half.
struct RowsOfLane {
  const uint8_t* at[2][8];

  static FMHA_DEVICE RowsOfLane of(const void* data, int64_t offset) {
    const float low = float_of(uint32_t(offset)), high = float_of(uint32_t(offset >> 32));  // bits
    const int half = lane_half();
    RowsOfLane rows;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int from = acc_row(8 * s + j, 0) + half * kRun;
        const uint64_t there = uint64_t(bits_of(ds_bpermute_b32(from, high))) << 32 | bits_of(ds_bpermute_b32(from, low));
        rows.at[s][j] = static_cast<const uint8_t*>(data) + int64_t(there);
      }
    }
    return rows;
  }

  // Column `column` of the rows whose bit is set, and 0 for the others: two operands.
  FMHA_DEVICE Array<Frag, 2> column(int32_t column, uint32_t shown) const {
    const uint32_t of_half = shown >> (lane_half() * kRun);
    Array<Frag, 2> frags = {};
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t mask = 0u - (of_half >> acc_row(8 * s + j, 0) & 1);
        frags[s][j / 2] |= (decode::load_code<kElemBytes>(at[s][j] + column * kElemBytes) & mask) << (j % 2 * 16);
      }
    }
    return frags;
  }
};

// sums^T += rows^T x, of the wave's blocks of columns.
template <DType dtype, int dim, int blocks>
FMHA_DEVICE void add_rows(Array<Acc, blocks>& sums, const RowsOfLane& rows, uint32_t shown, const Acc& x, int i_wave) {
  const BlockFrags frags = block_frags<dtype>(x);
#pragma unroll
  for (int b = 0; b < blocks; ++b) {
    // Columns beyond the row's end repeat its last column; their sums are not stored.
    const Array<Frag, 2> columns = rows.column(min(column_of(b, i_wave) + lane_col(), dim - 1), shown);
#pragma unroll
    for (int s = 0; s < 2; ++s) sums[b] = mma_step<dtype>(columns[s], frags[s], sums[b]);
    sched_barrier();
  }
}

template <DType dtype, int steps>
FMHA_DEVICE Acc product(const Array<Frag, steps>& a, const Array<Frag, steps>& b) {
  Acc x = {};
#pragma unroll
  for (int s = 0; s < steps; ++s) x = mma_step<dtype>(a[s], b[s], x);
  return x;
}

// Adds the other waves' sums of scores and of dP: pairs of waves first, so that all four waves get equal bits.
FMHA_DEVICE void add_others(WaveSums& lds, Acc& s, Acc& dp, int i_wave) {
  const int lane = thread_idx() % kWaveSize;
  s_barrier_of_lds();  // all waves have read the block before
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const auto four = [&](const Acc& x) __attribute__((always_inline)) {
      return Frag{bits_of(x[4 * r]), bits_of(x[4 * r + 1]), bits_of(x[4 * r + 2]), bits_of(x[4 * r + 3])};
    };
    lds.of[0][i_wave][r][lane] = four(s);
    lds.of[1][i_wave][r][lane] = four(dp);
  }
  s_barrier_of_lds();
  const auto add = [&](Acc& x, int which) __attribute__((always_inline)) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const Frag mate = lds.of[which][i_wave ^ 1][r][lane], first = lds.of[which][i_wave ^ 2][r][lane],
                 second = lds.of[which][i_wave ^ 3][r][lane];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[4 * r + i] = (x[4 * r + i] + float_of(mate[i])) + (float_of(first[i]) + float_of(second[i]));
      }
    }
  };
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
template <BwdSpec spec>
FMHA_DEVICE void dq(const ListsBwdParams& params) {
  using C = Config<spec>;
  __shared__ WaveSums lds;
  const BwdParams& p = params.bwd;
  const int32_t blocks = ceil_div(p.fwd.gqa_ratio, kRows), first_head = workgroup_idx() % blocks * kRows;
  const int32_t i = workgroup_idx() / blocks % p.fwd.seqlen_q, head = workgroup_idx() / blocks / p.fwd.seqlen_q;
  const int32_t i_head_kv = head % p.fwd.num_heads_kv, i_wave = wave_idx();
  const SeqSpan span = span_of(p.fwd, head / p.fwd.num_heads_kv);
  if (i >= span.seqlen_q) return;
  const TokenList list = list_of<spec>(params, span, i, i_head_kv);
  // Lanes beyond the last head repeat it, and store nothing.
  const int32_t row = min(first_head + lane_col(), p.fwd.gqa_ratio - 1), i_head = i_head_kv * p.fwd.gqa_ratio + row;
  Array<Frag, C::score_steps> q;
  Array<Frag, C::value_steps> dout;
  load_row<C::dim_qk>(q, static_cast<const uint8_t*>(p.fwd.q.data) + head_offset(p.fwd.q, span, i, i_head), i_wave);
  load_row<C::dim_v>(dout, static_cast<const uint8_t*>(p.dout.data) + head_offset(p.dout, span, i, i_head), i_wave);
  const QueryNumbers numbers = QueryNumbers::of(p, span, i_head, i);
  const auto modifiers = Score<spec.fwd, Tanh>::of(p.fwd, span, i_head, p.fwd.softmax_scale);
  Array<Acc, C::score_blocks> sums;
#pragma unroll
  for (int b = 0; b < C::score_blocks; ++b) sums[b] = Acc{};
  const int32_t count = span.seqlen_k > 0 ? v_readfirstlane_b32(list.count()) : 0;
#pragma nounroll
  for (int32_t first = 0; first < count; first += kRows) {
    const int32_t at = first + lane_col(), named = list.key(min(at, count - 1)), key = at < count ? named : -1;
    const uint32_t shown = uint32_t(v_cmp_ballot(key >= 0));
    if (shown == 0) continue;
    // An entry that names no key has the row of one that does.
    const int32_t j = key >= 0 ? key : v_readlane_b32(key, __builtin_ctz(shown));
    const int64_t k_at = key_offset<spec>(p.fwd, p.fwd.k, span, i_head_kv, j);
    Array<Frag, C::score_steps> k;
    Array<Frag, C::value_steps> v;
    load_row<C::dim_qk>(k, static_cast<const uint8_t*>(p.fwd.k.data) + k_at, i_wave);
    load_row<C::dim_v>(v, static_cast<const uint8_t*>(p.fwd.v.data) + key_offset<spec>(p.fwd, p.fwd.v, span, i_head_kv, j),
                       i_wave);
    Acc s = product<C::dtype>(k, q), dp = product<C::dtype>(v, dout);
    add_others(lds, s, dp, i_wave);
    const uint32_t of_half = shown >> acc_row(0, lane_half());
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      float score = s[e], ds = dp[e];
      pair(score, ds, modifiers, i, numbers, 1.f, (of_half >> acc_row(e, 0) & 1) != 0);
      dp[e] = ds;
    }
    add_rows<C::dtype, C::dim_qk>(sums, RowsOfLane::of(p.fwd.k.data, k_at), shown, dp, i_wave);
  }
  if (first_head + lane_col() >= p.fwd.gqa_ratio) return;
  const int64_t to = row_offset(p.dq, span.storage_batch, list.token(), i_head);
#pragma unroll
  for (int b = 0; b < C::score_blocks; ++b) {
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const int32_t column = column_of(b, i_wave) + acc_row(e, lane_half());
      if (column < C::dim_qk) {
        store_elem<spec.dtype_grad>(p.dq.data, to + column, sums[b][e] * p.fwd.softmax_scale);
      }
    }
  }
}

// Keys of a workgroup's own range that a token's list names, and how often.
template <int range>
struct KeysOfRange {
  int32_t listed[range];          // how often the list names each key
  int32_t named[range];           // those that it names, ascending
  int32_t of_group[range / kRows];  // how many of them there are among every 32 keys

  // Which keys of [first_key, first_key + range) a token's list names: their number. All threads together.
  FMHA_DEVICE int32_t find(const TokenList& list, int32_t first_key) {
    const int thread = thread_idx(), group_of_thread = thread / kRows, in_group = thread % kRows;
    for (int32_t at = thread; at < range; at += kThreads) listed[at] = 0;
    s_barrier_of_lds();
    const int32_t count = v_readfirstlane_b32(list.count());
    for (int32_t n = thread; n < count; n += kThreads) {
      const int32_t at = list.key(n) - first_key;
      if (at >= 0 && at < range) ds_add_u32((int32_t FMHA_LDS*)&listed[at], 1);
    }
    s_barrier_of_lds();
    // Groups of 32 keys have a half of a wave each.
    for (int32_t group = group_of_thread; group < range / kRows; group += kThreads / kRows) {
      const uint32_t bits = bits_of_half(listed[group * kRows + in_group] > 0);
      if (in_group == 0) of_group[group] = __builtin_popcount(bits);
    }
    s_barrier_of_lds();
    int32_t all = 0;
    for (int32_t group = 0; group < range / kRows; ++group) {
      if (group % (kThreads / kRows) == group_of_thread) {
        const bool is_named = listed[group * kRows + in_group] > 0;
        const uint32_t bits = bits_of_half(is_named);
        if (is_named) named[all + __builtin_popcount(bits & ((1u << in_group) - 1))] = group * kRows + in_group;
      }
      all += of_group[group];
    }
    s_barrier_of_lds();
    return v_readfirstlane_b32(all);
  }

 private:
  // Bits of the lanes of this half of the wave.
  static FMHA_DEVICE uint32_t bits_of_half(bool x) {
    const uint64_t bits = v_cmp_ballot(x);
    return thread_idx() / kRows % 2 ? uint32_t(bits >> 32) : uint32_t(bits);
  }
};

// Rows of the sums of dK and dV.
template <BwdSpec spec>
struct Sums {
  using C = Config<spec>;
  const BwdParams& p;

  FMHA_DEVICE int64_t row(int32_t i_batch, int32_t i_head_kv, int32_t j) const {
    return (int64_t(i_batch) * p.fwd.seqlen_k + j) * p.fwd.num_heads_kv + i_head_kv;
  }
  FMHA_DEVICE float* dk(int64_t row) const { return reinterpret_cast<float*>(p.non_finite) + row * (C::row_qk + C::row_v); }
  FMHA_DEVICE float* dv(int64_t row) const { return dk(row) + C::row_qk; }
};

// Adds the wave's blocks to a key's row of sums, which lanes of this wave alone add to.
template <int blocks>
FMHA_DEVICE void add_to_memory(float* row, const Array<Acc, blocks>& sums, float factor, int i_wave) {
  const int half = lane_half();
#pragma unroll
  for (int b = 0; b < blocks; ++b) {
#pragma unroll
    for (int e = 0; e < 16; e += kRun) {
      f32x4 FMHA_GLOBAL* const to = (f32x4 FMHA_GLOBAL*)(row + column_of(b, i_wave) + acc_row(e, half));
      *to += f32x4{sums[b][e], sums[b][e + 1], sums[b][e + 2], sums[b][e + 3]} * factor;
    }
  }
}

template <int range>
struct KeysLds {
  WaveSums sums;
  KeysOfRange<range> keys;
};

// The share of token i in dK and dV of the `num` keys that `keys` has found.
template <BwdSpec spec, int range>
FMHA_DEVICE void add_token(KeysLds<range>& lds, const ListsBwdParams& params, const SeqSpan& span, int32_t i,
                           int32_t i_head_kv, int32_t first_key, int32_t num) {
  using C = Config<spec>;
  const BwdParams& p = params.bwd;
  const int32_t gqa = p.fwd.gqa_ratio, i_wave = wave_idx();
#pragma nounroll
  for (int32_t block = 0; block < num; block += kRows) {
    // Lanes beyond the last key repeat it, and add nothing.
    const int32_t n = block + lane_col(), at = lds.keys.named[min(n, num - 1)], j = first_key + at;
    const float times = float(lds.keys.listed[at]);
    Array<Frag, C::score_steps> k;
    Array<Frag, C::value_steps> v;
    load_row<C::dim_qk>(k, static_cast<const uint8_t*>(p.fwd.k.data) + key_offset<spec>(p.fwd, p.fwd.k, span, i_head_kv, j),
                        i_wave);
    load_row<C::dim_v>(v, static_cast<const uint8_t*>(p.fwd.v.data) + key_offset<spec>(p.fwd, p.fwd.v, span, i_head_kv, j),
                       i_wave);
    Array<Acc, C::score_blocks> dk;
    Array<Acc, C::value_blocks> dv;
#pragma unroll
    for (int b = 0; b < C::score_blocks; ++b) dk[b] = Acc{};
#pragma unroll
    for (int b = 0; b < C::value_blocks; ++b) dv[b] = Acc{};
#pragma nounroll
    for (int32_t first_head = 0; first_head < gqa; first_head += kRows) {
      const int32_t i_head = i_head_kv * gqa + min(first_head + lane_col(), gqa - 1);
      const uint32_t heads = gqa - first_head >= kRows ? ~0u : (1u << (gqa - first_head)) - 1;
      const int64_t q_at = head_offset(p.fwd.q, span, i, i_head), dout_at = head_offset(p.dout, span, i, i_head);
      Array<Frag, C::score_steps> q;
      Array<Frag, C::value_steps> dout;
      load_row<C::dim_qk>(q, static_cast<const uint8_t*>(p.fwd.q.data) + q_at, i_wave);
      load_row<C::dim_v>(dout, static_cast<const uint8_t*>(p.dout.data) + dout_at, i_wave);
      const QueryNumbers of_lane = QueryNumbers::of(p, span, i_head, i);
      const auto modifiers = Score<spec.fwd, Tanh>::of(p.fwd, span, i_head, p.fwd.softmax_scale);
      Acc s = product<C::dtype>(q, k), dp = product<C::dtype>(dout, v);
      add_others(lds.sums, s, dp, i_wave);
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        const int from = acc_row(e, lane_half());
        const QueryNumbers numbers = {ds_bpermute_b32(from, of_lane.lse_log2), ds_bpermute_b32(from, of_lane.origin),
                                      ds_bpermute_b32(from, of_lane.delta)};
        float prob = s[e], ds = dp[e];
        pair(prob, ds, modifiers, i, numbers, times, (heads >> from & 1) != 0);
        s[e] = prob * C::p_scale;
        dp[e] = ds;
      }
      add_rows<C::dtype, C::dim_qk>(dk, RowsOfLane::of(p.fwd.q.data, q_at), heads, dp, i_wave);
      add_rows<C::dtype, C::dim_v>(dv, RowsOfLane::of(p.dout.data, dout_at), heads, s, i_wave);
    }
    if (n < num) {
      const Sums<spec> sums{p};
      const int64_t row = sums.row(span.i_batch, i_head_kv, j);
      add_to_memory(sums.dk(row), dk, 1.f, i_wave);
      add_to_memory(sums.dv(row), dv, 1.f / C::p_scale, i_wave);
    }
    // Another lane of the wave may add to the row for the next token.
    lds_in_order();
  }
}

// dK and dV. Workgroups are ranges of keys, for every kv head and sequence.
template <BwdSpec spec, int range>
FMHA_DEVICE void keys(const ListsBwdParams& params) {
  __shared__ KeysLds<range> lds;
  const FwdParams& p = params.bwd.fwd;
  const int32_t ranges = ceil_div(p.seqlen_k, range), head = workgroup_idx() / ranges;
  const SeqSpan span = span_of(p, head / p.num_heads_kv);
  const int32_t i_head_kv = head % p.num_heads_kv, first_key = (workgroup_idx() - head * ranges) * range;
  if (first_key >= span.seqlen_k) return;
#pragma nounroll
  for (int32_t i = 0; i < span.seqlen_q; ++i) {
    const int32_t num = lds.keys.find(list_of<spec>(params, span, i, i_head_kv), first_key);
    if (num > 0) add_token<spec>(lds, params, span, i, i_head_kv, first_key, num);
    s_barrier_of_lds();  // all waves have read which keys are named
  }
}

// dK and dV from their sums, then dSink: any grid of whole waves, each with a row at a time.
template <BwdSpec spec>
FMHA_DEVICE void finish(const ListsBwdParams& params) {
  const BwdParams& p = params.bwd;
  const Sums<spec> sums{p};
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
