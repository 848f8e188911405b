// Backward on mma.sync: a CTA sums the gradients of its own rows over the blocks of the other side (config.cuh).
//
// The blocks have a ring of `stages`: with two or more, the next one is copied while this one is computed with, and one
// barrier a block says both that it is there and that the slot to be filled has been read.
#pragma once
#include <fmha/ptx/copy.cuh>
#include <fmha/sm80/bwd/pairs.cuh>
#include <fmha/sm80/bwd/store.cuh>
#include <fmha/sm80/common/copy.cuh>

namespace fmha::sm80::bwd {

// Blocks of `columns`, from a range of rows of the other side: those that some of the CTA's rows see, sink columns first.
struct Blocks {
  int32_t first, num, num_sinks;
  FMHA_DEVICE int32_t at(int32_t i) const { return i < num_sinks ? i : first + i - num_sinks; }
  FMHA_DEVICE int32_t count() const { return num_sinks + num; }
};
FMHA_DEVICE Blocks blocks_of(Range seen, Range sinks, int32_t columns) {
  const int32_t first = seen.begin / columns, end = ceil_div(seen.end, columns);
  Blocks blocks = {first, seen.empty() ? 0 : end - first, ceil_div(sinks.end, columns)};
  // Blocks that the band walks already have their sink columns.
  if (blocks.num > 0) blocks.num_sinks = min(blocks.num_sinks, first);
  return blocks;
}

// What P and dS of a fragment take of its queries: of the thread's two rows, in registers.
template <class Fragment>
struct OwnQueries {
  float of_lse_log2[2], of_delta[2];
  bool far;              // whether scores of any of the warp's rows have an origin that is not 0
  const float* origins;  // in memory, of the thread's rows: seldom asked for
  bool there[2];

  FMHA_DEVICE bool any_far() const { return far; }
  FMHA_DEVICE float origin(int e) const { return there[Fragment::row(e)] ? origins[8 * Fragment::row(e)] : 0.f; }
  FMHA_DEVICE float lse_log2(int e) const { return of_lse_log2[Fragment::row(e)]; }
  FMHA_DEVICE float delta(int e) const { return of_delta[Fragment::row(e)]; }
};
// Of a block that is walked, in shared memory.
template <class Fragment>
struct WalkedQueries {
  const Stats<Fragment::columns>& stats;
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

template <BwdSpec spec, Sm80BwdTile tile>
struct Owner {
  using Shared = Smem<spec, tile>;
  using P = Pairs<spec, tile>;
  using Fragment = typename P::Fragment;
  using Operand = mma::RegisterTile<uint16_t, tile.columns>;
  static constexpr FwdSpec kFwd = spec.fwd;
  static constexpr int threads = num_threads(tile), columns = tile.columns, ahead = tile.fragments_ahead;
  static constexpr int score_sums = makes_ds(tile) ? Shared::dim_qk : 16, value_sums = sums_dv(tile) ? Shared::dim_v : 16;

  const BwdParams& p;
  Shared& smem;
  const SeqSpan span;
  const MaskBand band;
  const int32_t i_head_kv, first_row;  // of the CTA: queries of one head, or keys
  int32_t i_head;                      // of the queries
  const P pairs = {p, span, band};
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
  FMHA_DEVICE void load_own() const {
    constexpr bool queries = owns_queries(tile);
    load<queries, kFwd.head_dim_qk>(smem.own_score, queries ? p.fwd.q : p.fwd.k, first_row);
    if constexpr (makes_ds(tile)) load<queries, kFwd.head_dim_v>(smem.own_value, queries ? p.dout : p.fwd.v, first_row);
  }
  FMHA_DEVICE void load_block(int32_t slot, int32_t block) const {
    constexpr bool queries = !owns_queries(tile);
    const int32_t first = block * columns;
    load<queries, kFwd.head_dim_qk>(smem.score[slot], queries ? p.fwd.q : p.fwd.k, first);
    load<queries, kFwd.head_dim_v>(smem.value[slot], queries ? p.dout : p.fwd.v, first);
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

  // How a block stands to the warp's rows: its queries and keys.
  FMHA_DEVICE BlockClass class_of(int32_t block) const {
    const int32_t begin = block * columns;
    const Range own = {first, first + mma::kRows}, other = {begin, begin + columns};
    const Range queries = owns_queries(tile) ? own : other, keys = owns_queries(tile) ? other : own;
    if (queries.begin >= span.seqlen_q || keys.begin >= span.seqlen_k) return BlockClass::Skipped;
    const BlockClass of_band = kFwd.mask == MaskKind::Full ? BlockClass::Inside : block_class(band, queries, keys);
    const bool whole = queries.end <= span.seqlen_q && keys.end <= span.seqlen_k;
    return of_band == BlockClass::Inside && !whole ? BlockClass::Edge : of_band;
  }

  // What a block adds to the sums.
  template <class Queries>
  FMHA_DEVICE void add(int32_t slot, int32_t block, const Queries& queries) {
    const BlockClass kind = class_of(block);
    if (kind == BlockClass::Skipped) return;
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
      pairs.differentiate(dp[0], s[0], slopes, kept, row, column, edge, queries);
      Operand ds[1];
      ds[0].template from<kFwd.dtype_qk>(dp[0], 0);
      mma::product_ab<kFwd.dtype_qk, ahead, false>(dscore, ds, score);
    }
  }

  // Walks `num` blocks: `load_at(slot, i)` copies the i-th, `add_at(slot, i)` adds it.
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
    // What was copied for nobody.
    ptx::cp_async_wait_group<0>();
  }
};

// dQ of a block of queries of one head. CTAs: blocks of queries, those that see most keys first, of every head in turn.
template <BwdSpec spec, Sm80BwdTile tile>
FMHA_DEVICE void query_owner(const BwdParams& p, Smem<spec, tile>& smem) {
  const int32_t heads = p.fwd.batch * p.fwd.num_heads_q, num_blocks = ceil_div(p.fwd.seqlen_q, tile.rows);
  if (int32_t(blockIdx.x) >= heads * num_blocks) return;
  const int32_t at = blockIdx.x / heads, head = blockIdx.x % heads;
  const int32_t i_batch = head / p.fwd.num_heads_q, i_head = head % p.fwd.num_heads_q;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const int32_t first_row = (spec.fwd.mask == MaskKind::Full ? at : num_blocks - 1 - at) * tile.rows;
  if (first_row >= span.seqlen_q) return;
  const MaskBand band = resolve_band(p.fwd.mask, span.seqlen_q, span.seqlen_k);
  const Range queries = {first_row, min(first_row + tile.rows, span.seqlen_q)};
  const Range sinks = spec.fwd.sink_columns ? sink_range(band, queries, span.seqlen_k) : Range{0, 0};
  const Blocks blocks = blocks_of(k_range(band, queries, span.seqlen_k), sinks, tile.columns);
  Owner<spec, tile> owner{p, smem, span, band, i_head / p.fwd.gqa_ratio, first_row, i_head};
  owner.dscore[0].clear();

  const int32_t thread_row = owner.first + threadIdx.x % 32 / 4;
  OwnQueries<typename Owner<spec, tile>::Fragment> own;
  own.origins = p.score_origin + stats_offset(p, span, i_head, thread_row);
  bool far = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    own.there[r] = thread_row + 8 * r < span.seqlen_q;
    const int64_t stats = stats_offset(p, span, i_head, own.there[r] ? thread_row + 8 * r : 0);
    own.of_lse_log2[r] = own.there[r] ? p.lse_log2[stats] : infinity();
    own.of_delta[r] = own.there[r] ? p.delta[stats] : 0.f;
    far |= own.there[r] && p.score_origin[stats] != 0.f;
  }
  own.far = __any_sync(ptx::kAllLanes, far);
  owner.walk(
      blocks.count(), [&](int32_t slot, int32_t i) { owner.load_block(slot, blocks.at(i)); },
      [&](int32_t slot, int32_t i) { owner.add(slot, blocks.at(i), own); });

  const uint32_t found = store_gradient<spec, tile, spec.fwd.head_dim_qk>(
      p.dq, owner.dscore[0], p.fwd.softmax_scale, [&](int32_t row) { return owner.row_of_query(p.dq, owner.first + row); },
      [&](int32_t row) { return owner.first + row < span.seqlen_q; });
  if constexpr (spec.fwd.mask != MaskKind::Full) {
    for_each_found(found, [&](int32_t row) { bwd_query_row<spec, simt::Warp>(p, span, i_head, owner.first + row); });
  }
}

// dK and dV of a block of keys of one kv head, over the queries of all its query heads. CTAs: blocks of keys, the first ones,
// which a causal mask shows to most queries, first.
template <BwdSpec spec, Sm80BwdTile tile>
FMHA_DEVICE void key_owner(const BwdParams& p, Smem<spec, tile>& smem) {
  const int32_t heads = p.fwd.batch * p.fwd.num_heads_kv;
  if (int32_t(blockIdx.x) >= heads * ceil_div(p.fwd.seqlen_k, tile.rows)) return;
  const int32_t head = blockIdx.x % heads;
  const int32_t i_batch = head / p.fwd.num_heads_kv, i_head_kv = head % p.fwd.num_heads_kv;
  const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, i_batch);
  const int32_t first_row = blockIdx.x / heads * tile.rows;
  if (first_row >= span.seqlen_k) return;
  const MaskBand band = resolve_band(p.fwd.mask, span.seqlen_q, span.seqlen_k);
  const Range keys = {first_row, min(first_row + tile.rows, span.seqlen_k)};
  const Blocks blocks = blocks_of(query_range(band, keys, span.seqlen_q), {0, 0}, tile.columns);
  const int32_t first_head = i_head_kv * p.fwd.gqa_ratio;
  Owner<spec, tile> owner{p, smem, span, band, i_head_kv, first_row, first_head};
  owner.dscore[0].clear();
  owner.dvalue[0].clear();

  using Fragment = typename Owner<spec, tile>::Fragment;
  const int32_t num = blocks.count();
  owner.walk(
      num * p.fwd.gqa_ratio,
      [&](int32_t slot, int32_t i) {
        owner.i_head = first_head + i / num;
        owner.load_block(slot, blocks.at(i % num));
      },
      [&](int32_t slot, int32_t i) {
        owner.i_head = first_head + i / num;
        owner.add(slot, blocks.at(i % num), WalkedQueries<Fragment>{smem.stats[slot]});
      });

  const auto is_there = [&](int32_t row) { return owner.first + row < span.seqlen_k; };
  uint32_t found = 0;
  if constexpr (sums_dk(tile)) {
    found |= store_gradient<spec, tile, spec.fwd.head_dim_qk>(
        p.dk, owner.dscore[0], p.fwd.softmax_scale, [&](int32_t row) { return owner.row_of_key(p.dk, owner.first + row); }, is_there);
  }
  if constexpr (sums_dv(tile)) {
    found |= store_gradient<spec, tile, spec.fwd.head_dim_v>(
        p.dv, owner.dvalue[0], 1.f, [&](int32_t row) { return owner.row_of_key(p.dv, owner.first + row); }, is_there);
  }
  if constexpr (spec.fwd.mask != MaskKind::Full) {
    for_each_found(found, [&](int32_t row) { bwd_key_row<spec, simt::Warp>(p, span, i_head_kv, owner.first + row); });
  }
}

template <BwdSpec spec, Sm80BwdTile tile>
FMHA_DEVICE void main(const BwdParams& p) {
  static_assert(spec.fwd.dtype_qk == spec.fwd.dtype_v && size_bytes(spec.fwd.dtype_qk) == 2, "sm80: one 16-bit type");
  static_assert(tile.rows == mma::kRows * tile.warps, "sm80: a warp has 16 rows");
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<spec, tile>& smem = *reinterpret_cast<Smem<spec, tile>*>(raw);
  if constexpr (owns_queries(tile)) {
    query_owner<spec, tile>(p, smem);
  } else {
    key_owner<spec, tile>(p, smem);
  }
}

// dSink of a head, a CTA: its threads sum every so many queries of every sequence, then their sums are added in the order of
// the threads, so that it has the same bits whenever it is computed.
template <BwdSpec spec>
FMHA_DEVICE void dsink(const BwdParams& p) {
  __shared__ float sums[32];
  const int32_t i_head = blockIdx.x, warps = blockDim.x / 32;
  const float sink = scalar_of(p.fwd.sink, 0, i_head, -infinity());
  float sum = 0.f;
  for (int32_t b = 0; b < p.fwd.batch; ++b) {
    const SeqSpan span = resolve_seq(p.fwd, spec.fwd.q_layout, spec.fwd.kv_layout, b);
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < span.seqlen_q; i += blockDim.x) sum += sink_term(p, stats_offset(p, span, i_head, i), sink);
  }
  sum = lane_sum<simt::Warp>(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int32_t warp = 1; warp < warps; ++warp) sum += sums[warp];
  p.dsink[i_head] = sum;
}

}  // namespace fmha::sm80::bwd
