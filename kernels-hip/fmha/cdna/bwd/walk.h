// The walk of a workgroup: it sums the gradients of the rows that it owns over blocks of walked rows (job.h).
#pragma once
#include <fmha/cdna/bwd/owner.h>
#include <fmha/cdna/bwd/rest.h>
#include <fmha/cdna/bwd/store.h>
#include <fmha/isa/sync.h>

namespace fmha::cdna::bwd {

// Where the loop over blocks is: it visits the blocks of one head, then those of the next.
struct Place {
  int32_t i_head, i_block;
};

// The blocks that a workgroup walks for each head: those of the band, which are equal for
// all heads; under masks as data those of the head's list, which a launch before has made.
template <class U>
struct HeadBlocks {
  const Job& job;

  FMHA_DEVICE ListWalk list(int32_t i_head) const {
    constexpr MatrixBwdTile tile = U::tile;
    const int32_t length = owns_queries(tile.sums) ? job.span.seqlen_k : job.span.seqlen_q;
    return ListWalk::of(reload_params<MaskedBwdParams>().list, job.span.i_batch, job.first_head + i_head,
                        job.first_own / tile.rows, ceil_div(length, tile.columns));
  }
  FMHA_DEVICE int32_t count(int32_t i_head) const {
    if constexpr (U::spec.masks) return list(i_head).num_tiles;
    return job.blocks.count();
  }
  // Number of blocks of all heads together.
  FMHA_DEVICE int32_t total() const {
    if constexpr (!U::spec.masks) return job.blocks.count() * job.num_heads;
    int32_t total = 0;
#pragma nounroll
    for (int32_t h = 0; h < job.num_heads; ++h) total += count(h);
    return total;
  }
  FMHA_DEVICE int32_t at(Place place) const {
    if constexpr (U::spec.masks) return list(place.i_head).tile_at(place.i_block);
    return job.blocks.at(place.i_block);
  }
  // Whether masks as data (tensors) hide a part of a block.
  FMHA_DEVICE bool is_cut(Place place) const { return list(place.i_head).is_cut(place.i_block); }

  FMHA_DEVICE Place first() const {
    Place place = {0, 0};
    if constexpr (U::spec.masks) skip_heads_without(place);
    return place;
  }
  FMHA_DEVICE void advance(Place& place) const {
    if constexpr (U::spec.masks) {
      ++place.i_block;
      skip_heads_without(place);
    } else if (++place.i_block == job.blocks.count()) {
      place.i_block = 0, ++place.i_head;
    }
  }

 private:
  FMHA_DEVICE void skip_heads_without(Place& place) const {
#pragma nounroll
    while (place.i_head < job.num_heads && place.i_block >= count(place.i_head)) place.i_block = 0, ++place.i_head;
  }
};

// The loop of a workgroup: one stage of LDS is filled while the stage before is computed with.
template <class U>
class Walk {
  using C = typename U::C;
  static constexpr MatrixBwdTile tile = U::tile;

 public:
  FMHA_DEVICE Walk(Owner<U>& owner, typename C::Lds& lds, const Job& job, int32_t first_of_wave,
                   const OwnStats& own_stats, const MatrixBwdParams& params)
      : owner_(owner), lds_(lds), job_(job), own_stats_(own_stats), first_of_wave_(first_of_wave),
        blocks_{job}, num_(blocks_.total()), load_(params, job), at_(blocks_.first()), next_(at_) {}

  FMHA_DEVICE void run(const MatrixBwdParams& params) {
    if (num_ == 0) return;
    issue(params);
    if constexpr (tile.stages == 2) {
      load_.store(lds_.stage[0]);
      issue(params);
      s_barrier_of_lds();
      // Two steps are written out per iteration, so that stages are constants; the last step of an odd number adds
      // nothing.
#pragma nounroll
      for (int32_t n = 0; n < num_; n += 2) {
        step<0, 1>(true);
        step<1, 0>(n + 1 < num_);
      }
    } else {
#pragma nounroll
      for (int32_t n = 0; n < num_; ++n) {
        s_barrier_of_lds();  // all waves have read the block before
        load_.store(lds_.stage[0]);
        issue(reload_params<MatrixBwdParams>());
        s_barrier_of_lds();
        add_tile(lds_.stage[0], true);
      }
    }
  }

 private:
  // The last block is loaded once more at the walk's end without being read, which saves a branch.
  FMHA_DEVICE Place after(const Place& place) const {
    Place next = place;
    blocks_.advance(next);
    return next.i_head < job_.num_heads ? next : place;
  }

  FMHA_DEVICE void issue(const MatrixBwdParams& params) {
    load_.issue(params, next_.i_head, blocks_.at(next_));
    next_ = after(next_);
  }

  template <int stage, int other>
  FMHA_DEVICE void step(bool adds) {
    add_tile(lds_.stage[stage], adds);
    load_.store(lds_.stage[other]);
    issue(reload_params<MatrixBwdParams>());
    s_barrier_of_lds();
  }

  FMHA_DEVICE void add_tile(const typename C::Stage& stage, bool adds) {
    const Pairs<U> pairs = {job_.span, job_.band, job_.first_head + at_.i_head};
    const int thread = opaque_thread_idx();
    const int32_t first_walked = blocks_.at(at_) * tile.columns;
    bool is_cut = false;
    if constexpr (U::spec.masks) is_cut = blocks_.is_cut(at_);
#pragma unroll
    for (int b = 0; b < tile.columns / kBlockRows; ++b) {
      const int32_t walked = first_walked + b * kBlockRows;
      const PairPlace at = {first_of_wave_ + U::lane_col(thread), walked + U::walked_row(0, U::lane_half(thread))};
      const int kind = v_readfirstlane_b32(int(class_of(walked)));
      if (adds && kind != int(BlockClass::Skipped)) {
        const bool edge = kind == int(BlockClass::Edge) || is_cut;
        if constexpr (C::queries_own) owner_.add(pairs, stage, b, at, edge, own_stats_);
        else owner_.add(pairs, stage, b, at, edge, U::BlockStats::of(stage.stats, b, U::lane_half(thread)));
      }
    }
    at_ = after(at_);
  }

  // Class of the block of this wave's rows and the walked rows from `walked` on: all, some or none of its pairs are
  // visible.
  FMHA_DEVICE BlockClass class_of(int32_t walked) const {
    const Range own = {first_of_wave_, first_of_wave_ + U::edge}, other = {walked, walked + kBlockRows};
    const Range queries = C::queries_own ? own : other, keys = C::queries_own ? other : own;
    if (queries.begin >= job_.span.seqlen_q || keys.begin >= job_.span.seqlen_k) return BlockClass::Skipped;
    BlockClass kind = BlockClass::Inside;
    if constexpr (U::spec.mask != MaskKind::Full) kind = block_class(job_.band, queries, keys);
    const bool is_whole = queries.end <= job_.span.seqlen_q && keys.end <= job_.span.seqlen_k;
    return kind == BlockClass::Inside && !is_whole ? BlockClass::Edge : kind;
  }

  Owner<U>& owner_;
  typename C::Lds& lds_;
  const Job& job_;
  const OwnStats own_stats_;
  int32_t first_of_wave_;
  HeadBlocks<U> blocks_;
  int32_t num_;
  typename U::Load load_;
  Place at_, next_;
};

template <class U>
FMHA_DEVICE void main(const MatrixBwdParams& params) {
  using C = typename U::C;
  __shared__ typename C::Lds lds;
  const BwdParams& p = params.bwd;
  const Job job = job_of<U>(p.fwd);
  const int32_t end = C::queries_own ? job.span.seqlen_q : job.span.seqlen_k;
  if (job.first_own >= end) return;
  const int thread = opaque_thread_idx();
  const int32_t first = job.first_own + v_readfirstlane_b32(thread / kWaveSize) * U::edge;
  const int32_t own = first + U::lane_col(thread);

  Owner<U> owner;
  owner.clear();
  const int32_t qk = params.head_dim_qk, v = params.head_dim_v, i_head = job.first_head;
  U::load_own(owner.own_score, C::queries_own ? query_rows(p.fwd.q, job, i_head, first, qk)
                                              : key_rows(p.fwd.k, job, first, qk));
  if constexpr (C::makes_dp) {
    U::load_own(owner.own_value, C::queries_own ? query_rows(p.dout, job, i_head, first, v)
                                                : key_rows(p.fwd.v, job, first, v));
  }
  OwnStats own_stats = {};
  if constexpr (C::queries_own) {
    const int64_t at = stats_offset(p, job.span, i_head, own);
    own_stats = {own < end ? p.lse_log2[at] : infinity(), own < end ? p.delta[at] : 0.f};
  }
  Walk<U>(owner, lds, job, first, own_stats, params).run(params);

  const MatrixBwdParams& then = reload_params<MatrixBwdParams>();
  if constexpr (Owner<U>::adds_captured) {
    owner.captured.finish(then.bwd.captured_sums);
    return;
  }
  const int64_t row = own;
  if (own < end) {
    if constexpr (C::makes_ds) {
      const View& view = C::queries_own ? then.bwd.dq : then.bwd.dk;
      const int64_t to = C::queries_own ? row_offset(view, job.span.storage_batch, job.span.q_row + row, i_head)
                                        : row_offset(view, job.span.i_batch, job.span.k_row + row, job.i_head_kv);
      store_row<U>(view, to, owner.dscore, then.bwd.fwd.softmax_scale, then.head_dim_qk);
    }
    if constexpr (C::makes_dv) {
      const View& view = then.bwd.dv;
      // Dropout's factor is applied to the sums in f32: multiplying P by it would round again, and change every P of 1
      // by an equal relative error.
      const float dropout_scale = U::spec.dropout ? then.bwd.fwd.dropout_scale : 1.f;
      store_row<U>(view, row_offset(view, job.span.i_batch, job.span.k_row + row, job.i_head_kv), owner.dvalue,
                   dropout_scale / U::p_scale, then.head_dim_v);
    }
  }
  if constexpr (U::spec.mask != MaskKind::Full) {
    // A wave without rows stores zeros to its half of the word of flags.
    const int32_t first_of_word = U::edge == kRowsOfWord ? first : first / kRowsOfWord * kRowsOfWord;
    if (first_of_word >= end) return;
    float zero = 0.f;
    if constexpr (C::makes_ds) zero += zero_if_finite<U>(owner.dscore);
    if constexpr (C::makes_dv) zero += zero_if_finite<U>(owner.dvalue);
    store_nonfinite<U>(nonfinite_of(then.bwd, U::tile.sums, job.span.i_batch,
                                    C::queries_own ? i_head : job.i_head_kv, first),
                       first, zero);
  }
}

}  // namespace fmha::cdna::bwd
