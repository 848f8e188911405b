// Conversion of fragments of S^T and dP^T to P and dS: each row is a key, with queries along it.
#pragma once
#include <fmha/ptx/num.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/sm90/bwd/modifiers.cuh>
#include <fmha/common/exp2.cuh>
#include <fmha/listed_block.h>
#include <fmha/common/seen_keys.cuh>

namespace fmha::sm90::bwd {

// The queries of a step, or one consumer's share of them: the index of the first in the sequence, and in the block.
struct QueryTile {
  int32_t i_head, first_query, first_row;
};

// Stands for the result of masks as data in kernels that have none.
struct NothingShown {};

// Which of some blocks may be partly masked, by the mask or by the end of the keys: none, some or all.
enum class Edges { None, Some, All };

// Converts fragments of S^T and dP^T to P and dS. `Keys` says which keys queries see.
template <BwdSpec spec, Sm90BwdTile tile, class Keys = EveryKey>
struct Pairs {
  static constexpr int columns = num_columns(tile);
  using Scores = mma::Accumulator<columns>;
  using Modifier = Modifiers<spec, tile>;
  using Slopes = typename Modifier::Slopes;
  using Biases = typename Modifier::Biases;
  using Kept = KeptBits<spec.fwd.dropout ? columns : 8>;
  static constexpr bool modifies = modifies_score(spec.fwd);
  using Mask = KnownMask<spec.fwd.mask, spec.fwd.sink_columns>;

  static FMHA_DEVICE auto nothing_shown() {
    if constexpr (Keys::has_tile_list) return typename Keys::template Queries<columns>{};
    else return NothingShown{};
  }
  using Shown = decltype(nothing_shown());

  const BwdParams& p;
  const int32_t index;  // of the warpgroup among the consumers
  const float scale_log2;
  const Keys keys = {};

  // First key and first query of this warpgroup's share in a tile.
  FMHA_DEVICE int32_t own_key() const { return splits_dims(tile) ? 0 : index * mma::kRows; }
  FMHA_DEVICE int32_t own_query(int part = 0) const { return (splits_dims(tile) ? index : part) * columns; }
  FMHA_DEVICE int32_t first_key(const Work& work) const { return work.keys.begin + own_key(); }

  FMHA_DEVICE static Mask mask_of(const Work& work) { return {work.band, work.span.seqlen_k}; }
  // Reads which pairs of a partly masked block the lists' masks show. It is called before the block's products are in
  // flight, while registers are free.
  template <Edges edges, class Blocks>
  FMHA_DEVICE Shown shown(const Work& work, const QueryTile& at, const Blocks& blocks) const {
    if constexpr (Keys::has_tile_list && edges != Edges::None) {
      if (blocks.seen_by(index) == HalfSeen::Whole) return Shown::all();
      return keys.template queries_of<columns>(work.span, at.i_head, first_key(work) + mma::fragment_row(),
                                               at.first_query);
    } else {
      return {};
    }
  }

  // Sets masked elements of x to 0.
  FMHA_DEVICE void mask(Scores& x, const Work& work, const QueryTile& at, const Shown& shown = {}) const {
    const int32_t query = at.first_query + mma::fragment_column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t j = first_key(work) + mma::fragment_row() + 8 * r;
      Range seen = mask_of(work).queries(j, query);
      if (j >= work.keys.end) seen.begin = columns;
#pragma unroll
      for (int e = 2 * r; e < x.num_elems; e += 4) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int column = Scores::column(e + k);
          if (column < seen.begin || column >= seen.end) x[e + k] = 0.f;
        }
      }
    }
    if constexpr (Keys::has_tile_list) shown.zero_hidden(x);
  }

  FMHA_DEVICE bool is_edge(const Work& work, int32_t first_query) const {
    // Without a mask only the end of the keys matters, and that is in a register anyway.
    if constexpr (spec.fwd.mask == MaskKind::Full) return work.keys.end - work.keys.begin < tile.block_n;
    return first_query < work.uncut.begin || first_query >= work.uncut.end;
  }

  // Whether no query of a block sees any of the warpgroup's keys: under a causal mask this is true of the upper half of
  // a key block in its first block on the diagonal.
  FMHA_DEVICE bool sees_none(const Work& work, int32_t first_query) const {
    const int32_t first = first_key(work), last = min(first + mma::kRows, work.keys.end) - 1;
    return first > last || mask_of(work).skips(first_query, first_query + columns - 1, {first, last + 1});
  }

  FMHA_DEVICE Modifier modifier_of(const Work& work, const QueryTile& at) const {
    return Modifier::of(p, work, at.i_head, first_key(work), at.first_query);
  }
  FMHA_DEVICE Biases biases(const Work& work, const QueryTile& at) const { return modifier_of(work, at).biases(); }

  // Computes the exponents of P, and the slopes of scores that are mapped.
  FMHA_DEVICE Scores exponents(const Scores& s, const float (&lse_log2)[tile.block_m], const Work& work,
                               const QueryTile& at, const Biases& biases, Slopes& slopes) const {
    Scores x;
    const Modifier modifier = modifier_of(work, at);
    const uint32_t lses = ptx::shared_address(&lse_log2[at.first_row + mma::fragment_column()]);
    const auto for_each_four = [&](auto of_four) {
#pragma unroll
      for (int e = 0; e < s.num_elems; e += 4) {
        float lse[2];
        ptx::ld_shared_v2_f32(lse, lses + Scores::column(e) * sizeof(float));
        of_four(e, lse);
      }
    };
    if constexpr (modifies) {
      x = s;
      if (modifier.any_far(&lse_log2[at.first_row])) {
        for_each_four([&](int e, const float(&lse)[2]) { modifier.template apply<true>(x, e, lse, biases, slopes); });
      } else {
        for_each_four([&](int e, const float(&lse)[2]) { modifier.template apply<false>(x, e, lse, biases, slopes); });
      }
    } else {
      for_each_four([&](int e, const float(&lse)[2]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) x[e + k] = fmaf(s[e + k], scale_log2, -lse[k & 1]);
      });
    }
    return x;
  }

  // Turns the exponents into P.
  template <Edges edges = Edges::Some>
  FMHA_DEVICE void exponentiate(Scores& x, const Work& work, const QueryTile& at, const Shown& shown = {}) const {
#pragma unroll
    for (int e = 0; e < x.num_elems; ++e) {
      const bool on_fma_pipe = e % 2 == 1 && e % 16 < 2 * tile.exp2_polynomials;
      x[e] = on_fma_pipe ? exp2_polynomial(x[e]) : ptx::ex2_approx_ftz(x[e]);
    }
    if constexpr (edges == Edges::All) {
      mask(x, work, at, shown);
    } else if constexpr (edges == Edges::Some) {
      if (is_edge(work, at.first_query)) mask(x, work, at, shown);
    }
  }

  // Decides which elements dropout keeps, or a part of them, during products that overlap no other work.
  template <int part = 0, int parts = 1>
  FMHA_DEVICE void decide(Kept& kept, const Work& work, const QueryTile& at) const {
    const int32_t batch_head = head_of_whole(p.fwd, work.span.i_batch, at.i_head);
    if constexpr (spec.fwd.dropout) kept.template decide<part, parts>(p.fwd, batch_head, first_key(work), at.first_query);
  }

  // Converts dP to the gradient of the score that the softmax sees.
  FMHA_DEVICE void differentiate(Scores& dp, const Scores& probs, const float (&delta)[tile.block_m],
                                 const QueryTile& at, const Kept& kept) const {
    const uint32_t deltas = ptx::shared_address(&delta[at.first_row + mma::fragment_column()]);
    const float factor = leaves_dropout_factor<spec>() ? 1.f : p.fwd.dropout_scale, keep_rate = 1.f / p.fwd.dropout_scale;
#pragma unroll
    for (int e = 0; e < dp.num_elems; e += 4) {
      float pair[2];
      ptx::ld_shared_v2_f32(pair, deltas + Scores::column(e) * sizeof(float));
      if constexpr (leaves_dropout_factor<spec>()) pair[0] *= keep_rate, pair[1] *= keep_rate;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (spec.fwd.dropout) {
          const float of_dp = dp[e + k] * factor;
          dp[e + k] = -probs[e + k] * pair[k & 1];
          if (kept.has(e + k)) dp[e + k] = fmaf(probs[e + k], of_dp, dp[e + k]);
        } else {
          dp[e + k] = probs[e + k] * (dp[e + k] - pair[k & 1]);
        }
      }
    }
  }

  // Converts the gradient of scores to that of scaled products.
  FMHA_DEVICE void multiply_slopes(Scores& ds, const Slopes& slopes) const {
    if constexpr (Modifier::has_slopes) {
#pragma unroll
      for (int e = 0; e < ds.num_elems; e += 2) slopes.multiply(ds[e], ds[e + 1], e);
    }
  }
};

}  // namespace fmha::sm90::bwd
