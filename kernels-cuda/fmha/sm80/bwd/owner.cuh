// The rows that a CTA of the backward owns, and its walk over the blocks of the other operand (keys for owned queries,
// queries for owned keys): how it loads the blocks and adds them to its sums.
//
// The blocks lie in a ring of `stages` slots. With two or more, the next block is copied while the current one is used,
// and one barrier a block says both that the block has arrived and that every thread has read the slot that is filled
// next.
#pragma once
#include <fmha/blocks.h>
#include <fmha/ptx/copy.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/sm80/bwd/add_dq.cuh>
#include <fmha/sm80/bwd/pairs.cuh>
#include <fmha/sm80/common/copy.cuh>

namespace fmha::sm80::bwd {

// LSE and delta of owned queries, in registers: each thread has the two rows of its fragment.
template <class Fragment>
struct OwnQueries {
  float of_lse_log2[2], of_delta[2];
  bool far;              // whether scores of any of the warp's rows have an origin that is not 0
  const float* origins;  // in memory, of the thread's rows: seldom asked for
  bool there[2];

  // Loads the statistics of a warp's rows from `first` on.
  FMHA_DEVICE static OwnQueries of(const BwdParams& p, const SeqSpan& span, int32_t i_head, int32_t first) {
    const int32_t row = first + threadIdx.x % 32 / 4;
    OwnQueries own;
    own.origins = p.score_origin + stats_offset(p, span, i_head, row);
    bool far = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      own.there[r] = row + 8 * r < span.seqlen_q;
      const int64_t stats = stats_offset(p, span, i_head, own.there[r] ? row + 8 * r : 0);
      own.of_lse_log2[r] = own.there[r] ? p.lse_log2[stats] : infinity();
      own.of_delta[r] = own.there[r] ? p.delta[stats] : 0.f;
      far |= own.there[r] && p.score_origin[stats] != 0.f;
    }
    own.far = __any_sync(ptx::kAllLanes, far);
    return own;
  }

  FMHA_DEVICE bool any_far() const { return far; }
  FMHA_DEVICE float origin(int e) const { return there[Fragment::row(e)] ? origins[8 * Fragment::row(e)] : 0.f; }
  FMHA_DEVICE float lse_log2(int e) const { return of_lse_log2[Fragment::row(e)]; }
  FMHA_DEVICE float delta(int e) const { return of_delta[Fragment::row(e)]; }
};
// LSE and delta of the queries of a walked block, in shared memory.
template <class Fragment>
struct WalkedQueries {
  const QueryStats<Fragment::columns>& stats;
  const int32_t column = fmha::mma::fragment_column();

  FMHA_DEVICE bool any_far() const {
    bool any = false;
#pragma unroll
    for (int first = 0; first < Fragment::columns; first += 32)
      any |= stats.origin[min(first + int32_t(threadIdx.x % 32), Fragment::columns - 1)] != 0.f;
    return __any_sync(ptx::kAllLanes, any);
  }
  FMHA_DEVICE float origin(int e) const { return stats.origin[column + Fragment::column(e)]; }
  FMHA_DEVICE float lse_log2(int e) const { return stats.lse_log2[column + Fragment::column(e)]; }
  FMHA_DEVICE float delta(int e) const { return stats.delta[column + Fragment::column(e)]; }
};

template <BwdSpec spec, Sm80BwdTile tile, class Keys = EveryKey>
struct Owner {
  using Shared = Smem<spec, tile>;
  using P = Pairs<spec, tile, Keys>;
  using Fragment = typename P::Fragment;
  using Operand = mma::RegisterTile<uint16_t, tile.columns>;
  static constexpr FwdSpec kFwd = spec.fwd;
  static constexpr int threads = num_threads(tile), columns = tile.columns, ahead = tile.fragments_ahead;
  static constexpr int score_sums = sums_dq(tile) || sums_dk(tile) ? Shared::dim_qk : 16, value_sums = sums_dv(tile) ? Shared::dim_v : 16;

  const BwdParams& p;
  Shared& smem;
  const SeqSpan span;
  const MaskBand band;
  const int32_t i_head_kv, first_row;  // of the CTA: queries of one head, or keys
  int32_t i_head;                      // of the queries
  const Keys keys_of_data = {};        // what masks as data show, besides the band
  const P pairs = {{p, span, {band, span.seqlen_k}}, keys_of_data};
  const int32_t warp_row = threadIdx.x / 32 * mma::kRows, first = first_row + warp_row;

  mma::Accumulator<score_sums> dscore[1];  // dQ, or dK
  mma::Accumulator<value_sums> dvalue[1];  // dV

  FMHA_DEVICE int64_t row_of_query(const View& view, int32_t i) const {
    return row_offset(view, span.storage_batch, int64_t(span.q_row) + i, i_head);
  }
  FMHA_DEVICE int64_t row_of_key(const View& view, int32_t j) const {
    return row_offset(view, kv_row(p.fwd, kFwd.kv_layout, span, j), i_head_kv);
  }

  // Rows [first, first + rows of the tile) of queries or keys.
  template <bool queries, int dim, class Tile>
  FMHA_DEVICE void load(const Tile& to, const View& view, int32_t first) const {
    const uint16_t* data = static_cast<const uint16_t*>(view.data);
    const int32_t end = queries ? span.seqlen_q : span.seqlen_k;
    const uint16_t* at = first < end ? data + (queries ? row_of_query(view, first) : row_of_key(view, first)) : data;
    copy_tile<tile.copy_bytes, threads>(
        to, data, [&](int32_t row) -> const uint16_t* { return first + row < end ? at + row * view.row : nullptr; },
        [](int32_t, int32_t column) { return elems_there<dim>(column); });
  }
  // Loads a V whose keys are contiguous, [dim, keys], as rows of a tile: neighbouring threads have neighbouring keys,
  // eight elements of each at a time. The loads are ordinary ones, complete at the end, and no asynchronous copies.
  template <class Tile>
  FMHA_DEVICE void load_columns(const Tile& to, int32_t first) const {
    const View& view = p.fwd.v;
    const uint16_t* data = static_cast<const uint16_t*>(view.data);
    const uint16_t* at = first < span.seqlen_k ? data + row_of_key(view, first) : data;
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < Tile::rows * (Tile::dim / kWord); i += threads) {
      const int32_t row = i % Tile::rows, column = i / Tile::rows * kWord;
      uint32_t elems[kWord];
#pragma unroll
      for (int e = 0; e < kWord; ++e) {
        const bool there = first + row < span.seqlen_k && column + e < kFwd.head_dim_v;
        elems[e] = ptx::ld_global_u16_if(at + row * view.row + (column + e) * view.dim, there);
      }
      const uint32_t packed[4] = {elems[0] | elems[1] << 16, elems[2] | elems[3] << 16, elems[4] | elems[5] << 16,
                                  elems[6] | elems[7] << 16};
      ptx::st_shared_v4(to.address() + fmha::mma::word_offset<Tile>(row, column), packed);
    }
  }
  // Loads rows of V, or rows of dO where the walked blocks are queries.
  template <bool queries, class Tile>
  FMHA_DEVICE void load_value(const Tile& to, int32_t first) const {
    if constexpr (!queries && kFwd.v_layout == VLayout::ColMajor) {
      load_columns(to, first);
    } else {
      load<queries, kFwd.head_dim_v>(to, queries ? p.dout : p.fwd.v, first);
    }
  }
  FMHA_DEVICE void load_own() const {
    constexpr bool queries = owns_queries(tile);
    load<queries, kFwd.head_dim_qk>(smem.own_score, queries ? p.fwd.q : p.fwd.k, first_row);
    if constexpr (makes_ds(tile)) load_value<queries>(smem.own_value, first_row);
  }
  FMHA_DEVICE void load_block(int32_t slot, int32_t block) const {
    constexpr bool queries = !owns_queries(tile);
    const int32_t first = block * columns;
    load<queries, kFwd.head_dim_qk>(smem.score[slot], queries ? p.fwd.q : p.fwd.k, first);
    load_value<queries>(smem.value[slot], first);
    if constexpr (queries) {
      auto& stats = smem.stats[slot];
      for (int32_t row = threadIdx.x; row < columns; row += threads) {
        const bool there = first + row < span.seqlen_q;
        const int64_t at = stats_offset(p, span, i_head, there ? first + row : 0);
        ptx::cp_async<4>(ptx::shared_address(&stats.lse_log2[row]), p.lse_log2 + at, there ? 4 : 0);
        ptx::cp_async<4>(ptx::shared_address(&stats.delta[row]), p.delta + at, there ? 4 : 0);
        ptx::cp_async<4>(ptx::shared_address(&stats.origin[row]), p.score_origin + at, there ? 4 : 0);
      }
    }
  }

  // Class of a block for the warp's rows: all, some or none of its pairs are visible.
  FMHA_DEVICE BlockClass class_of(int32_t block) const {
    const int32_t begin = block * columns;
    const Range own = {first, first + mma::kRows}, other = {begin, begin + columns};
    const Range queries = owns_queries(tile) ? own : other, keys = owns_queries(tile) ? other : own;
    if (queries.begin >= span.seqlen_q || keys.begin >= span.seqlen_k) return BlockClass::Skipped;
    const BlockClass of_band = kFwd.mask == MaskKind::Full ? BlockClass::Inside : block_class(band, queries, keys);
    const bool whole = queries.end <= span.seqlen_q && keys.end <= span.seqlen_k;
    if constexpr (Keys::has_classes) {
      if (of_band == BlockClass::Skipped) return of_band;
      const Range there = {queries.begin, min(queries.end, span.seqlen_q)};
      const BlockClass by_data =
          keys_of_data.class_of(span, i_head, there, {keys.begin, min(keys.end, span.seqlen_k)});
      if (by_data != BlockClass::Inside) return by_data;
    }
    return of_band == BlockClass::Inside && !whole ? BlockClass::Edge : of_band;
  }

  // Adds a block's contribution to the owned sums and, in a one-pass kernel, to dQ, by all warps together.
  template <class Queries>
  FMHA_DEVICE void add(int32_t slot, int32_t block, const Queries& queries) {
    const BlockClass kind = class_of(block);
    if (kind != BlockClass::Skipped) {
      add_to_own(slot, block, kind, queries);
    } else if constexpr (adds_dq(tile)) {
      put_ds<decltype(smem.ds), Operand>(smem.ds, warp_row, nullptr);
    }
    if constexpr (adds_dq(tile)) {
      __syncthreads();
      add_dq<spec, tile>(DqShape<spec, tile>::block_of(p, span, i_head, block * columns), smem.ds, smem.own_score);
    }
  }
  template <class Queries>
  FMHA_DEVICE void add_to_own(int32_t slot, int32_t block, BlockClass kind, const Queries& queries) {
    const bool edge = kind == BlockClass::Edge;
    const int32_t row = first + threadIdx.x % 32 / 4, column = block * columns + fmha::mma::fragment_column();
    const auto& score = smem.score[slot];
    const auto& value = smem.value[slot];
    const typename P::Kept kept = pairs.kept_of(i_head, row, column);
    typename P::Slopes slopes;
    Fragment s[1];
    mma::product_abt<kFwd.dtype_qk, ahead>(s, smem.own_score, warp_row, score);
    pairs.exponentiate(s[0], slopes, i_head, row, column, edge, queries);
    if constexpr (sums_dv(tile)) {
      Operand probs[1];
      if constexpr (kFwd.dropout) {
        probs[0].template from<kFwd.dtype_v>(pairs.dropped(s[0], kept), 0);
      } else {
        probs[0].template from<kFwd.dtype_v>(s[0], 0);
      }
      mma::product_ab<kFwd.dtype_v, ahead, false>(dvalue, probs, value);
    }
    if constexpr (makes_ds(tile)) {
      Fragment dp[1];
      mma::product_abt<kFwd.dtype_v, ahead>(dp, smem.own_value, warp_row, value);
      pairs.template differentiate<true>(dp[0], s[0], slopes, kept, i_head, row, column, edge, queries);
      Operand ds[1];
      ds[0].template from<kFwd.dtype_qk>(dp[0], 0);
      if constexpr (adds_dq(tile)) put_ds(smem.ds, warp_row, &ds[0]);
      mma::product_ab<kFwd.dtype_qk, ahead, false>(dscore, ds, score);
    }
  }

  // Adds to `sum` the contribution of the block in slot 0 to the gradient of the scores as the softmax takes them.
  template <class Queries>
  FMHA_DEVICE void add_gradient_of_scores(Fragment& sum, int32_t block, const Queries& queries) const {
    const BlockClass kind = class_of(block);
    if (kind == BlockClass::Skipped) return;
    const bool edge = kind == BlockClass::Edge;
    const int32_t row = first + threadIdx.x % 32 / 4, column = block * columns + fmha::mma::fragment_column();
    const typename P::Kept kept = pairs.kept_of(i_head, row, column);
    typename P::Slopes slopes;
    Fragment s[1], dp[1];
    mma::product_abt<kFwd.dtype_qk, ahead>(s, smem.own_score, warp_row, smem.score[0]);
    pairs.exponentiate(s[0], slopes, i_head, row, column, edge, queries);
    mma::product_abt<kFwd.dtype_v, ahead>(dp, smem.own_value, warp_row, smem.value[0]);
    pairs.template differentiate<false>(dp[0], s[0], slopes, kept, i_head, row, column, edge, queries);
#pragma unroll
    for (int e = 0; e < sum.num_elems; ++e) sum[e] += dp[0][e];
  }

  // Adds to `sums` a block's contribution to the gradients of captured tensors.
  template <class Queries, class Sums>
  FMHA_DEVICE void add_captured(int32_t slot, int32_t block, const Queries& queries, Sums& sums) const {
    const BlockClass kind = class_of(block);
    if (kind == BlockClass::Skipped) return;
    const bool edge = kind == BlockClass::Edge;
    const int32_t row = first + threadIdx.x % 32 / 4, column = block * columns + fmha::mma::fragment_column();
    const typename P::Kept kept = pairs.kept_of(i_head, row, column);
    typename P::Slopes slopes;
    Fragment s[1], dp[1];
    mma::product_abt<kFwd.dtype_qk, ahead>(s, smem.own_score, warp_row, smem.score[slot]);
    const Fragment raw = s[0];
    pairs.exponentiate(s[0], slopes, i_head, row, column, edge, queries);
    mma::product_abt<kFwd.dtype_v, ahead>(dp, smem.own_value, warp_row, smem.value[slot]);
    pairs.template differentiate<false>(dp[0], s[0], slopes, kept, i_head, row, column, edge, queries);
    const auto modifiers = pairs.modifiers(i_head);
#pragma unroll
    for (int e = 0; e < raw.num_elems; ++e) {
      const Pair at = P::pair_of(e, row, column);
      const float y = raw[e] * modifiers.scale, gradient = dp[0][e] * modifiers.slope_behind_functions(at, y);
      // A hidden pair contributes nothing: without this test 0 times an infinite derivative would be NaN.
      if (dp[0][e] == 0.f) continue;
      static_cast<const Functions&>(modifiers).slopes(
          at, y, [&](int32_t n, int64_t element, float slope) { sums.add(n, element, gradient * slope); });
    }
  }

  // Loop over `num` blocks: `load_at(slot, i)` copies the i-th block, `add_at(slot, i)` adds it.
  template <class LoadAt, class AddAt>
  FMHA_DEVICE void walk(int32_t num, LoadAt load_at, AddAt add_at) {
    constexpr int before = max(tile.stages - 1, 1), under_way = max(tile.stages - 2, 0);
    load_own();
#pragma unroll
    for (int i = 0; i < before; ++i) {
      if (i < num) load_at(i, i);
      ptx::cp_async_commit_group();
    }
#pragma unroll 1
    for (int32_t i = 0; i < num; ++i) {
      ptx::cp_async_wait_group<under_way>();
      __syncthreads();
      if constexpr (tile.stages > 1) {
        const int32_t next = i + tile.stages - 1;
        if (next < num) load_at(next % tile.stages, next);
        ptx::cp_async_commit_group();
      }
      add_at(i % tile.stages, i);
      if constexpr (tile.stages == 1) {
        __syncthreads();
        if (i + 1 < num) load_at(0, i + 1);
        ptx::cp_async_commit_group();
      }
    }
    // Waits for the last copies, although nothing uses their data: they must not write to shared memory after the CTA's
    // end.
    ptx::cp_async_wait_group<0>();
  }
};

}  // namespace fmha::sm80::bwd
