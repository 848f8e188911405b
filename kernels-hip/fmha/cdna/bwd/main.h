// Backward on MFMA: a workgroup sums the gradients of its own rows over the blocks of the other side (config.h).
#pragma once
#include <fmha/cdna/bwd/load.h>
#include <fmha/cdna/bwd/owner.h>
#include <fmha/cdna/bwd/rest.h>
#include <fmha/cdna/bwd/store.h>
#include <fmha/cdna/span.h>

namespace fmha::cdna::bwd {

// Blocks of walked rows that some own row sees, sink columns first.
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

// What one workgroup works on.
struct Job {
  SeqSpan span;
  MaskBand band;
  Blocks blocks;                  // of each head
  int32_t first_own;              // row
  int32_t i_head_kv, first_head;  // the first query head, and how many
  int32_t num_heads;
};

FMHA_DEVICE SeqSpan span_of(const FwdParams& p, int32_t i_batch) {
  return uniform(resolve_seq(p, p.cu_seqlens_q ? QLayout::Packed : QLayout::Batch,
                             p.cu_seqlens_k ? KvKind::Packed : KvKind::Strided, i_batch));
}

// Workgroups: blocks of own rows, those that see most first, of every head in turn. Workgroups are dealt to the XCDs
// one after another, so that where heads are a multiple of them those of a head share an L2.
template <CdnaBwdSpec spec, CdnaBwdTile tile>
FMHA_DEVICE Job job_of(const FwdParams& p) {
  constexpr bool queries_own = owns_queries(tile.sums);
  const int32_t heads_of_batch = queries_own ? p.num_heads_q : p.num_heads_kv, heads = p.batch * heads_of_batch;
  const int32_t at = workgroup_idx() / heads, head = workgroup_idx() % heads, i_head = head % heads_of_batch;
  Job job;
  job.span = span_of(p, head / heads_of_batch);
  job.band = resolve_band(p.mask, job.span.seqlen_q, job.span.seqlen_k);
  job.i_head_kv = queries_own ? i_head / p.gqa_ratio : i_head;
  job.first_head = queries_own ? i_head : i_head * p.gqa_ratio;
  job.num_heads = queries_own ? 1 : p.gqa_ratio;
  if constexpr (queries_own) {
    // A causal mask shows most keys to the last queries.
    const int32_t num = ceil_div(p.seqlen_q, tile.rows);
    job.first_own = (spec.mask == MaskKind::Full ? at : num - 1 - at) * tile.rows;
    const Range queries = {job.first_own, min(job.first_own + tile.rows, job.span.seqlen_q)};
    if (queries.empty()) return job;
    job.blocks = blocks_of(k_range(job.band, queries, job.span.seqlen_k),
                           sink_range(job.band, queries, job.span.seqlen_k), tile.columns);
  } else {
    job.first_own = at * tile.rows;
    const Range keys = {job.first_own, min(job.first_own + tile.rows, job.span.seqlen_k)};
    if (keys.empty()) return job;
    job.blocks = blocks_of(query_range(job.band, keys, job.span.seqlen_q), {0, 0}, tile.columns);
  }
  return job;
}

// Rows `first` ... of a tensor with queries' heads, or with keys'.
FMHA_DEVICE TensorRows query_rows(const View& x, const Job& job, int32_t i_head, int32_t first, int32_t num_elems) {
  const int64_t at = row_offset(x, job.span.storage_batch, int64_t(job.span.q_row) + first, i_head);
  return {static_cast<const uint8_t*>(x.data) + at * kElemBytes, x.row * kElemBytes, x.dim * kElemBytes,
          job.span.seqlen_q - first, num_elems};
}
FMHA_DEVICE TensorRows key_rows(const View& x, const Job& job, int32_t first, int32_t num_elems) {
  // The batch stride of a packed tensor is 0.
  const int64_t at = row_offset(x, job.span.i_batch, int64_t(job.span.k_row) + first, job.i_head_kv);
  return {static_cast<const uint8_t*>(x.data) + at * kElemBytes, x.row * kElemBytes, x.dim * kElemBytes,
          job.span.seqlen_k - first, num_elems};
}

// Which of the walked rows a thread loads: the first half of the waves what scores are made of, the second what dP is.
template <CdnaBwdSpec spec, CdnaBwdTile tile>
struct BlockLoad {
  using C = Config<spec, tile>;
  static constexpr int threads = C::num_threads / 2;
  // Rows of one length are loaded without a branch.
  static constexpr bool alike = spec.head_dim_qk == spec.head_dim_v;
  using ScoreLoad = WalkedLoad<spec.head_dim_qk, tile.columns, threads, tile.load>;
  using ValueLoad = WalkedLoad<spec.head_dim_v, tile.columns, threads, tile.load>;
  ScoreLoad score;
  ValueLoad value;
  bool loads_score, loads_stats;
  int thread;
  float stat;  // LSE of a walked query by one half of the threads that load them, delta by the other

  TensorRows rows;  // of the first head, from the sequence's first row on
  int64_t head_bytes;
  const float* stats;  // LSE or delta of them

  FMHA_DEVICE BlockLoad(const CdnaBwdParams& params, const Job& job) {
    const int thread_of_group = opaque_thread_idx(), i_wave = v_readfirstlane_b32(thread_of_group / kWaveSize);
    thread = thread_of_group % threads;
    loads_score = i_wave < C::num_waves / 2;
    loads_stats = !C::queries_own && i_wave < 2 * tile.columns / kWaveSize;
    const FwdParams& p = params.bwd.fwd;
    const int32_t dim = loads_score ? params.head_dim_qk : params.head_dim_v;
    if constexpr (C::queries_own) {
      rows = key_rows(loads_score ? p.k : p.v, job, 0, dim);
      head_bytes = 0;
    } else {
      const View& view = loads_score ? p.q : params.bwd.dout;
      rows = query_rows(view, job, job.first_head, 0, dim);
      head_bytes = view.head * kElemBytes;
      stats = (thread < tile.columns ? params.bwd.lse_log2 : params.bwd.delta) +
              stats_offset(params.bwd, job.span, job.first_head, 0);
    }
  }

  // Block `block` of the `i_head`-th head.
  FMHA_DEVICE void issue(const CdnaBwdParams& params, int32_t i_head, int32_t block) {
    const int32_t first = block * tile.columns;
    TensorRows from = rows;
    from.data += i_head * head_bytes;
    from = from.from(first);
    if (alike || loads_score) score.issue(from, thread);
    else value.issue(from, thread);
    if constexpr (!C::queries_own) {
      // Stats are there for whole blocks of 32 queries; behind them a tile's block is past the lengths, and skipped.
      const int32_t query = min(first + thread % tile.columns, int32_t(params.bwd.stats_batch) - 1);
      if (loads_stats) stat = stats[i_head * params.bwd.stats_head + query];
    }
  }
  FMHA_DEVICE void store(typename C::Stage& stage) const {
    if constexpr (alike && C::Score::has_rows == C::Value::has_rows && C::Score::has_columns == C::Value::has_columns) {
      score.store(loads_score ? stage.score : stage.value, thread);
    } else {
      if (loads_score) score.store(stage.score, thread);
      else if constexpr (alike) score.store(stage.value, thread);
      else value.store(stage.value, thread);
    }
    if constexpr (!C::queries_own) {
      if (loads_stats) (thread < tile.columns ? stage.stats.lse_log2 : stage.stats.delta)[thread % tile.columns] = stat;
    }
  }
};

// The walk's place: blocks of a head, then those of the next.
struct Place {
  int32_t i_head, i_block;
  FMHA_DEVICE void advance(const Blocks& blocks) {
    if (++i_block == blocks.count()) i_block = 0, ++i_head;
  }
};

// A workgroup's walk: stage after stage is filled while the one before is computed with.
template <CdnaBwdSpec spec, CdnaBwdTile tile>
class Walk {
  using C = Config<spec, tile>;

 public:
  FMHA_DEVICE Walk(Owner<spec, tile>& owner, typename C::Lds& lds, const Job& job, int32_t first_of_wave,
                   const OwnStats& own_stats, const CdnaBwdParams& params)
      : owner_(owner), lds_(lds), job_(job), own_stats_(own_stats), first_of_wave_(first_of_wave),
        num_(job.blocks.count() * job.num_heads), load_(params, job) {}

  FMHA_DEVICE void run(const CdnaBwdParams& params) {
    if (num_ == 0) return;
    issue(params);
    if constexpr (tile.stages == 2) {
      load_.store(lds_.stage[0]);
      issue(params);
      s_barrier();
      // Two at a time, so that stages are constants; the last step of an odd number adds nothing.
#pragma nounroll
      for (int32_t n = 0; n < num_; n += 2) {
        step<0, 1>(true);
        step<1, 0>(n + 1 < num_);
      }
    } else {
#pragma nounroll
      for (int32_t n = 0; n < num_; ++n) {
        s_barrier();  // all waves have read the block before
        load_.store(lds_.stage[0]);
        issue(reload_params<CdnaBwdParams>());
        s_barrier();
        add_tile(lds_.stage[0], true);
      }
    }
  }

 private:
  // Behind the walk's end the last block is loaded again, for nobody: no branch.
  FMHA_DEVICE Place after(const Place& place) const {
    Place next = place;
    next.advance(job_.blocks);
    return next.i_head < job_.num_heads ? next : place;
  }

  FMHA_DEVICE void issue(const CdnaBwdParams& params) {
    load_.issue(params, next_.i_head, job_.blocks.at(next_.i_block));
    next_ = after(next_);
  }

  template <int stage, int other>
  FMHA_DEVICE void step(bool adds) {
    add_tile(lds_.stage[stage], adds);
    load_.store(lds_.stage[other]);
    issue(reload_params<CdnaBwdParams>());
    s_barrier();
  }

  FMHA_DEVICE void add_tile(const typename C::Stage& stage, bool adds) {
    const Pairs<spec, tile> pairs = {job_.span, job_.band, job_.first_head + at_.i_head};
    const int thread = opaque_thread_idx();
    const int32_t first_walked = job_.blocks.at(at_.i_block) * tile.columns;
    for_each<0, C::blocks>([&](auto index) __attribute__((always_inline)) {
      constexpr int b = decltype(index)::value;
      const int32_t walked = first_walked + b * kEdge;
      const PairPlace at = {first_of_wave_ + lane_col(thread), walked + kRun * lane_half(thread)};
      const int kind = v_readfirstlane_b32(int(class_of(walked)));
      if (adds && kind != int(BlockClass::Skipped)) {
        const bool edge = kind == int(BlockClass::Edge);
        if constexpr (C::queries_own) owner_.add(pairs, stage, b, at, edge, own_stats_);
        else owner_.add(pairs, stage, b, at, edge, BlockStats::of(stage.stats, b, lane_half(thread)));
      }
    });
    at_ = after(at_);
  }

  // How the walked rows `walked` ... stand to the wave's.
  FMHA_DEVICE BlockClass class_of(int32_t walked) const {
    const Range own = {first_of_wave_, first_of_wave_ + kEdge}, other = {walked, walked + kEdge};
    const Range queries = C::queries_own ? own : other, keys = C::queries_own ? other : own;
    if (queries.begin >= job_.span.seqlen_q || keys.begin >= job_.span.seqlen_k) return BlockClass::Skipped;
    BlockClass kind = BlockClass::Inside;
    if constexpr (spec.mask != MaskKind::Full) kind = block_class(job_.band, queries, keys);
    const bool is_whole = queries.end <= job_.span.seqlen_q && keys.end <= job_.span.seqlen_k;
    return kind == BlockClass::Inside && !is_whole ? BlockClass::Edge : kind;
  }

  Owner<spec, tile>& owner_;
  typename C::Lds& lds_;
  const Job& job_;
  const OwnStats own_stats_;
  int32_t first_of_wave_, num_;
  BlockLoad<spec, tile> load_;
  Place at_ = {0, 0}, next_ = {0, 0};
};

template <CdnaBwdSpec spec, CdnaBwdTile tile>
FMHA_DEVICE void main(const CdnaBwdParams& params) {
  using C = Config<spec, tile>;
  __shared__ typename C::Lds lds;
  const BwdParams& p = params.bwd;
  const Job job = job_of<spec, tile>(p.fwd);
  const int32_t end = C::queries_own ? job.span.seqlen_q : job.span.seqlen_k;
  if (job.first_own >= end) return;
  const int thread = opaque_thread_idx();
  const int32_t first = job.first_own + v_readfirstlane_b32(thread / kWaveSize) * kEdge, own = first + lane_col(thread);

  Owner<spec, tile> owner;
  owner.clear();
  const int32_t qk = params.head_dim_qk, v = params.head_dim_v, i_head = job.first_head;
  load_own<tile.load>(owner.own_score, C::queries_own ? query_rows(p.fwd.q, job, i_head, first, qk)
                                                      : key_rows(p.fwd.k, job, first, qk));
  if constexpr (C::makes_ds) {
    load_own<tile.load>(owner.own_value, C::queries_own ? query_rows(p.dout, job, i_head, first, v)
                                                        : key_rows(p.fwd.v, job, first, v));
  }
  OwnStats own_stats = {};
  if constexpr (C::queries_own) {
    const int64_t at = stats_offset(p, job.span, i_head, own);
    own_stats = {own < end ? p.lse_log2[at] : infinity(), own < end ? p.delta[at] : 0.f};
  }
  Walk<spec, tile>(owner, lds, job, first, own_stats, params).run(params);

  const CdnaBwdParams& then = reload_params<CdnaBwdParams>();
  const int64_t row = own;
  if (own < end) {
    if constexpr (C::makes_ds) {
      const View& view = C::queries_own ? then.bwd.dq : then.bwd.dk;
      const int64_t to = C::queries_own ? row_offset(view, job.span.storage_batch, job.span.q_row + row, i_head)
                                        : row_offset(view, job.span.i_batch, job.span.k_row + row, job.i_head_kv);
      store_row<spec.dtype_grad, tile.store>(view, to, owner.dscore, then.bwd.fwd.softmax_scale, then.head_dim_qk);
    }
    if constexpr (C::makes_dv) {
      const View& view = then.bwd.dv;
      // In f32: P times it would be rounded once more, every P of 1 by the same share.
      const float dropout_scale = spec.dropout ? then.bwd.fwd.dropout_scale : 1.f;
      store_row<spec.dtype_grad, tile.store>(
          view, row_offset(view, job.span.i_batch, job.span.k_row + row, job.i_head_kv), owner.dvalue,
          dropout_scale / Owner<spec, tile>::p_scale, then.head_dim_v);
    }
  }
  if constexpr (spec.mask != MaskKind::Full) {
    if (first >= end) return;
    float zero = 0.f;
    if constexpr (C::makes_ds) zero += zero_if_finite(owner.dscore);
    if constexpr (C::makes_dv) zero += zero_if_finite(owner.dvalue);
    store_nonfinite(nonfinite_of(then.bwd, tile.sums, job.span.i_batch,
                                 C::queries_own ? i_head : job.i_head_kv, first),
                    zero);
  }
}

}  // namespace fmha::cdna::bwd
