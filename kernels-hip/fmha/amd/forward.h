// Parts that the forwards on MFMA and on WMMA share around their products: a workgroup's work, a lane's scores by their
// keys, the mask, the running maximum, the end of a row, and values that a mask kept out of the products.
//
// `Layout` says how an accumulator's registers lie: `edge` keys to a block, of which a lane has `elems`, register i's
// at `row(i, half)`; of lanes that share a query, `half` says which one it is.
#pragma once
#include <fmha/amd/mask_lanes.h>
#include <fmha/amd/output.h>
#include <fmha/amd/score.h>
#include <fmha/amd/span.h>
#include <fmha/dropout.h>
#include <fmha/finish.h>
#include <fmha/isa/sched.h>
#include <fmha/mask.h>
#include <fmha/online_softmax.h>
#include <fmha/shown_words.h>

namespace fmha::amd {

using cdna::CdnaParams;
using cdna::CdnaSpec;
using cdna::MaskedCdnaParams;

// Work of one workgroup.
struct Job {
  SeqSpan span;
  int32_t i_head, i_head_kv;
  MaskBand band;
  float scale;  // of raw scores: to natural ones where they are modified, else to log2
};

template <CdnaSpec spec>
FMHA_DEVICE Job job_of(const FwdParams& p, int32_t i_batch, int32_t i_head) {
  Job job;
  job.span = uniform(resolve_seq(p, p.cu_seqlens_q ? QLayout::Packed : QLayout::Batch,
                                 p.cu_seqlens_k ? KvKind::Packed : KvKind::Strided, i_batch));
  job.i_head = i_head;
  job.i_head_kv = i_head / p.gqa_ratio;
  job.band = resolve_band(p.mask, job.span.seqlen_q, job.span.seqlen_k);
  float scale = p.softmax_scale;
  if constexpr (is_fp8(spec.dtype_qk)) {
    scale *= scalar_of(p.descale_q, i_batch, job.i_head_kv, 1.f) * scalar_of(p.descale_k, i_batch, job.i_head_kv, 1.f);
  }
  job.scale = spec.modifies ? scale : scale * kLog2E;
  return job;
}

// Tiles of keys that some query of the workgroup sees: those of sink columns, then the band's.
struct TileWalk {
  int32_t num_sink_tiles, first_band_tile, num_tiles;

  template <CdnaSpec spec, int block_n>
  static FMHA_DEVICE TileWalk of(const Job& job, Range queries) {
    const Range band = k_range(job.band, queries, job.span.seqlen_k);
    const Range sinks = spec.sink_columns ? sink_range(job.band, queries, job.span.seqlen_k) : Range{0, 0};
    TileWalk walk;
    walk.num_sink_tiles = ceil_div(sinks.end, block_n);
    walk.first_band_tile = max(band.begin / block_n, walk.num_sink_tiles);
    const int32_t end = band.empty() ? 0 : ceil_div(band.end, block_n);
    walk.num_tiles = walk.num_sink_tiles + max(end - walk.first_band_tile, 0);
    return walk;
  }

  FMHA_DEVICE int32_t tile_at(int32_t step) const {
    return step < num_sink_tiles ? step : first_band_tile + step - num_sink_tiles;
  }
};

// The walk over keys: under masks as data by a list that a launch before has made.
template <CdnaSpec spec>
using WalkOf = typename Choose<spec.masks, ListWalk, TileWalk>::type;
template <CdnaSpec spec, int block_n>
FMHA_DEVICE WalkOf<spec> walk_of(const Job& job, Range queries, int32_t m_block) {
  if constexpr (spec.masks) {
    const int32_t past_end = ceil_div(job.span.seqlen_k, block_n);
    return ListWalk::of(reload_params<MaskedCdnaParams>().list, job.span.i_batch, job.i_head, m_block, past_end);
  } else {
    return TileWalk::of<spec, block_n>(job, queries);
  }
}

// Whether the n-th tile of a walk may be masked in part.
template <CdnaSpec spec, int block_n, class Walk>
FMHA_DEVICE bool is_partly_masked(const Job& job, Range queries, const Walk& walk, int32_t n) {
  if constexpr (code::kIsGiven) return true;
  if constexpr (spec.masks) return walk.is_cut(n);
  const int32_t first_key = walk.tile_at(n) * block_n;
  if constexpr (spec.mask == MaskKind::Full) return false;
  return block_class(job.band, queries, {first_key, first_key + block_n}) != BlockClass::Inside;
}

// Keep mask for tests: the keep bit of every position within the lengths, masked or not.
template <int num_threads>
FMHA_DEVICE void write_keep_mask(const CdnaParams& params, const Job& job, Range queries) {
  const FwdParams& p = params.fwd;
  const int64_t batch_head = int64_t(job.span.i_batch) * p.num_heads_q + job.i_head;
  const int32_t head = head_of_whole(p, job.span.i_batch, job.i_head);
  for (int32_t i = queries.begin; i < queries.end; ++i) {
    uint8_t* const row = p.keep_mask + (batch_head * p.seqlen_q + i) * p.seqlen_k;
    for (int32_t j = thread_idx(); j < job.span.seqlen_k; j += num_threads) {
      const bool keeps = dropout_keeps(p, head, i, j);
      row[j] = keeps | !params.drops;
    }
  }
}

// Calls `change(score, key)` for all of a lane's scores of a block, or of a tile's blocks; `first` is the key of its
// first one.
template <class Layout, class Acc, class Change>
FMHA_DEVICE void for_each_score(Acc& s, int32_t first, Change change) {
#pragma unroll
  for (int i = 0; i < Layout::elems; ++i) s[i] = change(s[i], first + Layout::row(i, 0));
}
template <class Layout, class Acc, int blocks, class Change>
FMHA_DEVICE void for_each_score(Array<Acc, blocks>& s, int32_t first, Change change) {
#pragma unroll
  for (int n = 0; n < blocks; ++n) for_each_score<Layout>(s[n], first + n * Layout::edge, change);
}

// Hides pairs behind the last key, and those that a band hides.
template <class Layout, MaskKind kind, class Acc, int blocks>
FMHA_DEVICE void mask(Array<Acc, blocks>& s, const SeqSpan& span, const MaskBand& band, int32_t query, int32_t first) {
  for_each_score<Layout>(s, first, [&](float x, int32_t key) {
    const bool seen = key < span.seqlen_k && (kind == MaskKind::Full || visible(band, query, key));
    return seen ? x : -infinity();
  });
}

// Hides the pairs of a tile that masks as data, or a mask as code beside them, cut. `queries`: those of the wave;
// `own`: the lane's first key in a block.
template <class Layout, class Acc, int blocks>
FMHA_DEVICE void mask_by_data(Array<Acc, blocks>& s, const Job& job, Range queries, int32_t query, int32_t first_key,
                              int32_t own) {
  constexpr int words = max(blocks * Layout::edge / 32, 1);
  const MaskedCdnaParams& p = reload_params<MaskedCdnaParams>();
  const int32_t last_query = job.span.seqlen_q - 1;
  query = min(query, last_query);
  const Range rows = {min(queries.begin, last_query), min(queries.end, job.span.seqlen_q)};
  const ShownWords<MaskLanes> masks = {DataMasks{p.masks}};
  const auto shown = masks.template of_query<words>(job.span, job.i_head, query, rows, first_key);
#pragma unroll
  for (int n = 0; n < blocks; ++n) {
    const int word = n * Layout::edge / 32, shift = n * Layout::edge % 32 + own;
    const uint32_t seen = shown.seen[word] >> shift, full = shown.full[word] >> shift;
#pragma unroll
    for (int i = 0; i < Layout::elems; ++i) {
      const int32_t row = Layout::row(i, 0), key = first_key + own + n * Layout::edge + row;
      bool sees = key < job.span.seqlen_k && visible(job.band, query, key) && (seen >> row & 1);
      if constexpr (code::kIsGiven) {
        // No branch around the function: one hid pairs that it shows (clang 22, emulated; cause not found).
        const uint32_t by_function = Functions::of(p.cdna.fwd, job.span, job.i_head).shows({query, key});
        sees &= ((full >> row | by_function) & 1) != 0;
      }
      s[n][i] = sees ? s[n][i] : -infinity();
    }
  }
}

// Takes in a tile's maximum. The sum and O, and what `also` multiplies, are rescaled only where the maximum rose for
// some row of the wave. `to_log2`: the factor that turns maxima into log2.
template <class Acc, int blocks, class Also>
FMHA_DEVICE void raise_row_max(OnlineRow& row, Array<Acc, blocks>& o, float tile_max, float to_log2, Also also) {
  if (v_cmp_ballot(tile_max > row.row_max) == 0) return;
  const float before = row.row_max;
  row.row_max = v_max_f32(before, tile_max);
  const float correction = exp2_of((before - finite_or_zero(row.row_max)) * to_log2);
  row.row_sum *= correction;
  also(correction);
#pragma unroll
  for (int d = 0; d < blocks; ++d) o[d] *= correction;
}

// P's scale, in log2, of a bf16 V, which may reach f32's largest number: P lies below 1 by the number of keys, so that
// no sum of P V leaves f32 where O does not; a power of two moves no bit of the others.
FMHA_DEVICE int scale_below_keys(const SeqSpan& span) { return __builtin_clz(span.seqlen_k | 1) - 32; }

struct RowUnit : ScalarUnit {
  FMHA_DEVICE static float exp2(float x) { return v_exp_f32(x); }
  FMHA_DEVICE static float larger(float a, float b) { return v_max_f32(a, b); }
  FMHA_DEVICE static float rounded_product(float a, float b) {
    float product = a * b;
    opaque_in_vgpr(product);
    return product;
  }
};

// Ends the row of a lane whose P are 2^`p_scale_log2` times as large: writes its LSE, and gives what its O is
// multiplied by. `writes`: the lane is the row's first, and the row is one of the call's.
template <CdnaSpec spec>
FMHA_DEVICE float end_of_row(const FwdParams& p, const Job& job, const OnlineRow& row, int p_scale_log2, int32_t query,
                             bool writes) {
  const float unscale = float_of(uint32_t(127 - p_scale_log2) << 23), row_sum = row.row_sum * unscale;
  const RowMax max = {row.row_max, spec.modifies ? row.row_max : RowUnit::rounded_product(row.row_max, kLn2)};
  // Natural where a modifier or a sink is: times log2(e) either may be more than f32 holds.
  const RowResult end = p.sink.data ? end_row_with_sink<RowUnit>(max, row_sum, scalar_of(p.sink, 0, job.i_head, 0.f), true)
                                    : end_row<RowUnit>(max, row_sum, spec.modifies);
  if (p.lse && writes) *output_row(job.span, job.i_head, query).lse(p) = end.lse;
  constexpr OutputScales scales = {true, spec.dropout, true};
  return scaled_output<scales>(end.factor * unscale, p, job.span.i_batch, job.i_head_kv);
}

// Adds the values of V that went to LDS as 0 to a query that sees their keys, after O is written, one element after
// another; only inputs with NaN or infinity get here. `next(dim)`: the lane's own columns, from `first_dim` on, which
// it has written itself, so that it needs no synchronisation to read them.
template <CdnaSpec spec, int block_n, class Next>
FMHA_DEVICE void add_back_nonfinite(const CdnaParams& params, const Job& job, int32_t query, int32_t first_key,
                                    int32_t first_dim, Next next) {
  const FwdParams& p = params.fwd;
  if (query >= job.span.seqlen_q) return;
  const float scale = scaled_output<OutputScales{true, false, true}>(1.f, p, job.span.i_batch, job.i_head_kv);
  const int64_t o = output_row(job.span, job.i_head, query).o(p);
  const int32_t end = min(first_key + block_n, job.span.seqlen_k);
#pragma nounroll
  for (int32_t key = first_key; key < end; ++key) {
    if (!visible(job.band, query, key)) continue;
    const auto product = [&] {
      return scaled_product<spec.dtype_qk, spec.dtype_qk>(p, KvKind::Packed, job.span, job.i_head, job.i_head_kv,
                                                          params.head_dim_qk, query, key);
    };
    if constexpr (spec.masks) {
      const DataMasks masks = {reload_params<MaskedCdnaParams>().masks};
      if (!masks_show(masks, p, job.span, job.i_head, {query, key}, product)) continue;
    } else if (!functions_show(p, job.span, job.i_head, {query, key}, product)) {
      continue;
    }
    const int64_t v = row_offset(p.v, kv_row(p, KvKind::Packed, job.span, key), job.i_head_kv);
#pragma nounroll
    for (int32_t dim = first_dim; dim < params.head_dim_v; dim = next(dim)) {
      float value = load_elem<spec.dtype_v>(p.v.data, v + dim * p.v.dim);
      // The test precedes the scaling: the compiler would make an FMA of a difference of a product, which gives what
      // rounding left.
      if (value - value == 0.f) continue;
      value *= scale;
      if constexpr (spec.dropout) {
        const int32_t batch_head = head_of_whole(p, job.span.i_batch, job.i_head);
        if (params.drops && !dropout_keeps(p, batch_head, query, key)) value *= 0.f;
      }
      with_dtype_o<spec>(params, [&](auto dtype) __attribute__((always_inline)) {
        store_elem<dtype.value>(p.o.data, o + dim, load_elem<dtype.value>(p.o.data, o + dim) + value);
      });
    }
  }
}

}  // namespace fmha::amd
