// The loss that trains an indexer, on matrix units: scores of lists before `fmha/index_loss.h` makes losses and
// gradients of scores of them, and the gradients of q, k and weights behind it. A wave is on its own; there is no
// barrier.
//
//   launch    lanes               registers          a wave computes
//   scores    entries of a list   32 heads           I = sum of relu(S) w: a lane's heads, then those of the other half
//   queries   heads of a query    32 entries of its  dQ^T += K^T G^T, dw += relu(S) ds, over the list
//                                 list
//   keys      keys of a range     32 heads           dK^T = Q^T G, added to the keys' rows in memory
//
// S = q . k, ds is the gradient of a score, and G = ds w [S > 0] is the second product's operand as it lies. A wave of
// keys owns a range of them, to which nothing else adds, and walks all queries of their sequence in their order. So
// every sum has one order.
//
// `U` is the matrix unit of the backward over lists of keys (cdna/bwd/lists.h, rdna/bwd/lists.h).
#pragma once
#include <fmha/amd/lists_bwd.h>
#include <fmha/index_loss.h>
#include <fmha/simt/lanes.h>

namespace fmha::matrix_index_loss {

using namespace fmha::cdna::bwd::lists;
using fmha::cdna::bwd::PairValues;
using fmha::cdna::bwd::kElemBytes;
using fmha::index_loss::key_at;
using fmha::index_loss::key_row;
using fmha::index_loss::num_rows;
using fmha::index_loss::relu;

// Keys to which one wave adds.
constexpr int kRange = 128;

template <IndexLossSpec spec, class U>
struct Config {
  static constexpr DType dtype = spec.dtype_q;
  static constexpr int dim = spec.head_dim, heads = spec.num_heads;
  // A wave has all steps of columns, and all blocks of a gradient's.
  static constexpr int waves = 1, steps = ceil_div(dim, kStep), blocks = ceil_div(dim, U::edge);
  using Own = typename U::template Own<Config, dim, steps>;
  using Walked = typename U::template Walked<Config, dim, steps>;
  using Sums = Array<typename U::Acc, blocks>;
};

FMHA_DEVICE int lane_idx() { return thread_idx() % kWaveSize; }

// The sum of a lane's number and that of the lane with the same column in the wave's other half.
template <class U>
FMHA_DEVICE float both_halves(float x) {
  return x + ds_bpermute_b32(lane_idx() ^ U::edge, x);
}

template <class C, class U>
FMHA_DEVICE typename C::Sums zeros() {
  typename C::Sums sums;
#pragma unroll
  for (int b = 0; b < C::blocks; ++b) sums[b] = typename U::Acc{};
  return sums;
}

// WMMA needs all lanes (RDNA3 ISA 7.9). Without the asm the compiler moves the last product behind the branch of those
// lanes whose sums are stored (clang 22).
template <class Sums>
FMHA_DEVICE void made_by_all_lanes(Sums& sums) {
#pragma unroll
  for (auto& block : sums.elems) opaque_in_vgpr(block);
}

// Heads of a query in a block of 32 from `first` on: the lane's own, where it lies, and which of them there are.
template <class C>
struct Heads {
  int64_t head;
  uint32_t shown;

  // Rows behind the last head repeat it.
  static FMHA_DEVICE Heads of(int64_t row, int32_t first) {
    const int32_t left = C::heads - first;
    return {row * C::heads + min(first + lane_row(), C::heads - 1), left >= kRows ? ~0u : (1u << left) - 1};
  }
  FMHA_DEVICE int64_t offset() const { return head * C::dim * kElemBytes; }
};

// Calls `use(register, row of the block, is there)` for the walked rows of a lane.
template <class U, class Use>
FMHA_DEVICE void each_walked(uint32_t shown, Use use) {
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const int from = U::walked_row(e, U::lane_half());
    use(e, from, (shown >> from & 1) != 0);
  }
}

// Scores of a list's entries, an entry to a lane.
template <IndexLossSpec spec, class U>
FMHA_DEVICE void scores(const IndexLossParams& p) {
  using C = Config<spec, U>;
  const int32_t per_row = ceil_div(p.topk, U::edge);
  simt::for_each_row(num_rows(p) * per_row, [&](int64_t at) __attribute__((always_inline)) {
    const int64_t row = at / per_row;
    const int32_t entry = int32_t(at % per_row) * U::edge + U::lane_col();
    const int32_t key = entry < p.topk ? key_at(p, row, entry) : -1;
    const uint64_t named = v_cmp_ballot(key >= 0);
    float score = 0.f;
    if (named != 0) {
      // An entry that names no key has the row of one that does.
      const int32_t other = v_readlane_b32(key, __builtin_ctzll(named)), j = key >= 0 ? key : other;
      typename C::Own k;
      k.load(p.k, key_row(p, row, j) * C::dim * kElemBytes, 0);
#pragma nounroll
      for (int32_t first = 0; first < C::heads; first += kRows) {
        const Heads<C> heads = Heads<C>::of(row, first);
        typename C::Walked q;
        q.load(p.q, heads.offset(), 0);
        const float weight = p.weights[heads.head];
        const PairValues s = q.product(k);
        each_walked<U>(heads.shown, [&](int e, int from, bool there) __attribute__((always_inline)) {
          const float term = relu(s[e]) * ds_bpermute_b32(from, weight);
          score += there ? term : 0.f;
        });
      }
    }
    score = both_halves<U>(score);
    if (entry < p.topk && U::lane_half() == 0) p.scores[row * p.topk + entry] = key >= 0 ? score : -infinity();
  });
}

// dQ and dw of some heads of a query, a head to a lane.
template <IndexLossSpec spec, class U>
FMHA_DEVICE void queries(const IndexLossParams& p) {
  using C = Config<spec, U>;
  constexpr int32_t per_row = ceil_div(C::heads, U::edge);
  simt::for_each_row(num_rows(p) * per_row, [&](int64_t at) __attribute__((always_inline)) {
    const int64_t row = at / per_row;
    const int32_t h = int32_t(at % per_row) * U::edge + U::lane_col();
    // Lanes behind the last head repeat it, and store nothing.
    const int64_t head = row * C::heads + min(h, C::heads - 1);
    typename C::Own q;
    q.load(p.q, head * C::dim * kElemBytes, 0);
    const float weight = p.weights[head];
    float dw = 0.f;
    typename C::Sums dq = zeros<C, U>();
#pragma nounroll
    for (int32_t first = 0; first < p.topk; first += kRows) {
      const int32_t entry = first + lane_row(), key = entry < p.topk ? key_at(p, row, entry) : -1;
      const uint32_t shown = uint32_t(v_cmp_ballot(key >= 0));
      if (shown == 0) continue;
      const int32_t other = v_readlane_b32(key, __builtin_ctz(shown)), j = key >= 0 ? key : other;
      const float of_entry = key >= 0 ? p.scores[row * p.topk + entry] : 0.f;
      const int64_t k_at = key_row(p, row, j) * C::dim * kElemBytes;
      typename C::Walked k;
      k.load(p.k, k_at, 0);
      PairValues s = k.product(q);
      each_walked<U>(shown, [&](int e, int from, bool there) __attribute__((always_inline)) {
        const float ds = ds_bpermute_b32(from, of_entry), x = s[e], added = dw + ds * relu(x);
        dw = there ? added : dw;
        s[e] = there && x > 0.f ? ds * weight : 0.f;
      });
      if (p.dq) add_rows<C, U, C::dim>(dq, RowsOfLane<U>::of(p.k, k_at), shown, s, 0);
    }
    made_by_all_lanes(dq);
    dw = both_halves<U>(dw);
    if (h >= C::heads) return;
    if (p.dweights && U::lane_half() == 0) p.dweights[head] = dw;
    if (!p.dq) return;
#pragma unroll
    for (int b = 0; b < C::blocks; ++b) {
#pragma unroll
      for (int e = 0; e < U::acc_elems; ++e) {
        const int32_t column = column_of<C, U>(b, 0) + U::acc_row(e, U::lane_half());
        if (column < C::dim) p.dq[head * C::dim + column] = dq[b][e];
      }
    }
  });
}

// Keys of a wave's range that a query's list names.
struct KeysOfWave {
  int32_t entry[kRange];     // an entry that names each key; -1: none
  int32_t repeated[kRange];  // whether several do
  int32_t named[kRange];     // those that are named, ascending

  // Looks them up: their number.
  FMHA_DEVICE int32_t find(const IndexLossParams& p, int64_t row, int32_t first_key) {
    for (int32_t at = lane_idx(); at < kRange; at += kWaveSize) {
      entry[at] = -1;
      repeated[at] = 0;
    }
    lds_in_order();
#pragma nounroll
    for (int32_t n = lane_idx(); n < p.topk; n += kWaveSize) {
      const int32_t j = key_at(p, row, n), at = j - first_key;
      if (j < 0 || at < 0 || at >= kRange) continue;
      if (entry[at] >= 0) repeated[at] = 1;
      lds_in_order();
      entry[at] = n;
      lds_in_order();
      // Another lane has named it at the same time.
      if (entry[at] != n) repeated[at] = 1;
    }
    lds_in_order();
    int32_t all = 0;
    for (int32_t first = 0; first < kRange; first += kWaveSize) {
      const bool is_named = entry[first + lane_idx()] >= 0;
      const uint64_t lanes = v_cmp_ballot(is_named);
      const int32_t before = __builtin_popcountll(lanes & ((uint64_t(1) << lane_idx()) - 1));
      if (is_named) named[all + before] = first + lane_idx();
      all += __builtin_popcountll(lanes);
    }
    lds_in_order();
    return v_readfirstlane_b32(all);
  }

  // The gradients of a key's entries, added up in their order.
  FMHA_DEVICE float ds(const IndexLossParams& p, int64_t row, int32_t first_key, int32_t at) const {
    if (!repeated[at]) return p.scores[row * p.topk + entry[at]];
    float sum = 0.f;
    for (int32_t n = 0; n < p.topk; ++n) sum += key_at(p, row, n) == first_key + at ? p.scores[row * p.topk + n] : 0.f;
    return sum;
  }
};

// Terms of a query for dK of the `num` keys that `keys` has found.
template <IndexLossSpec spec, class U>
FMHA_DEVICE void add_query(const IndexLossParams& p, const KeysOfWave& keys, int64_t row, int32_t first_key,
                           int32_t num) {
  using C = Config<spec, U>;
#pragma nounroll
  for (int32_t block = 0; block < num; block += U::edge) {
    // Lanes behind the last key repeat it, and add nothing.
    const int32_t n = block + U::lane_col(), at = keys.named[min(n, num - 1)];
    const float ds = keys.ds(p, row, first_key, at);
    const int64_t key = key_row(p, row, first_key + at);
    typename C::Own k;
    k.load(p.k, key * C::dim * kElemBytes, 0);
    typename C::Sums dk = zeros<C, U>();
#pragma nounroll
    for (int32_t first = 0; first < C::heads; first += kRows) {
      const Heads<C> heads = Heads<C>::of(row, first);
      typename C::Walked q;
      q.load(p.q, heads.offset(), 0);
      const float weight = p.weights[heads.head];
      PairValues s = q.product(k);
      each_walked<U>(heads.shown, [&](int e, int from, bool there) __attribute__((always_inline)) {
        const float of_head = ds_bpermute_b32(from, weight);
        s[e] = there && s[e] > 0.f ? ds * of_head : 0.f;
      });
      add_rows<C, U, C::dim>(dk, RowsOfLane<U>::of(p.q, heads.offset()), heads.shown, s, 0);
    }
    made_by_all_lanes(dk);
    if (n < num) {
#pragma unroll
      for (int b = 0; b < C::blocks; ++b) {
#pragma unroll
        for (int e = 0; e < U::acc_elems; ++e) {
          const int32_t column = column_of<C, U>(b, 0) + U::acc_row(e, U::lane_half());
          if (column < C::dim) p.dk[key * C::dim + column] += dk[b][e];
        }
      }
    }
    // Another lane of the wave may add to the row for the next query.
    lds_in_order();
  }
}

// dK of ranges of keys of every sequence.
template <IndexLossSpec spec, class U>
FMHA_DEVICE void keys(const IndexLossParams& p) {
  using C = Config<spec, U>;
  __shared__ KeysOfWave of_waves[simt::kWavesPerGroup];
  KeysOfWave& own = of_waves[wave_idx()];
  const int32_t ranges = ceil_div(p.seqlen_k, kRange);
  simt::for_each_row(int64_t(p.batch) * ranges, [&](int64_t at) __attribute__((always_inline)) {
    const int64_t i_batch = at / ranges;
    const int32_t first_key = int32_t(at % ranges) * kRange, end = min(kRange, p.seqlen_k - first_key);
    const int64_t first = (i_batch * p.seqlen_k + first_key) * C::dim;
    for (int32_t d = lane_idx(); d < end * C::dim; d += kWaveSize) p.dk[first + d] = 0.f;
    lds_in_order();
#pragma nounroll
    for (int32_t i = 0; i < p.seqlen_q; ++i) {
      const int64_t row = i_batch * p.seqlen_q + i;
      const int32_t num = own.find(p, row, first_key);
      if (num > 0) add_query<spec, U>(p, own, row, first_key, num);
    }
  });
}

}  // namespace fmha::matrix_index_loss
