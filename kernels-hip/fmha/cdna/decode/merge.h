// The second launch of decode: the parts of a row become O and
// LSE. The learnable sink, which no part includes, is added here.
//
// A workgroup has one row. Every wave computes all weights and adds every
// fourth part's O; the four sums are added through LDS in a fixed order.
#pragma once
#include <fmha/cdna/decode/list.h>
#include <fmha/cdna/decode/pieces.h>
#include <fmha/cdna/decode/two_caches.h>
#include <fmha/exp_sum.h>
#include <fmha/isa/sync.h>
#include <fmha/num.h>

namespace fmha::cdna::decode {

constexpr int kMergeWaves = 4;
constexpr int kMergeThreads = kMergeWaves * kWaveSize;

FMHA_DEVICE ExpSum over_lanes(ExpSum x) {
#pragma unroll
  for (int step = kWaveSize / 2; step > 0; step /= 2) {
    const int from = thread_idx() % kWaveSize ^ step;
    x.merge({ds_bpermute_b32(from, x.top), ds_bpermute_b32(from, x.sum)});
  }
  // Lanes have added in different orders, so the first lane's result is used for all.
  x.sum = float_of(uint32_t(v_readfirstlane_b32(int(bits_of(x.sum)))));
  return x;
}

FMHA_DEVICE void store_of_type(const CdnaDecodeParams& params, int64_t at, float x) {
  void* const o = params.call.fwd.o.data;
  switch (DType(params.call.dtype_o)) {
    case DType::F32: store_elem<DType::F32>(o, at, x); break;
    case DType::F16: store_elem<DType::F16>(o, at, x); break;
    case DType::Bf16: store_elem<DType::Bf16>(o, at, x); break;
    case DType::E4m3Fn: store_elem<DType::E4m3Fn>(o, at, x); break;
    case DType::E5m2: store_elem<DType::E5m2>(o, at, x); break;
    case DType::E4m3Fnuz: store_elem<DType::E4m3Fnuz>(o, at, x); break;
    default: store_elem<DType::E5m2Fnuz>(o, at, x);
  }
}

// Ends a row over a list: an infinite sink takes all weight of a row with finite scores, and LSE may be wanted without
// the sink.
struct ListEnd {
  bool sink_has_all, without_sink;

  static FMHA_DEVICE ListEnd of(const FwdParams& p, int32_t i_head, float lse_of_keys) {
    const float sink = p.sink.data ? scalar_of(p.sink, 0, i_head, -infinity()) : -infinity();
    const bool without_sink = reload_params<ListDecodeParams>().lists.lse_without_sink != 0;
    return {sink == infinity() && lse_of_keys < infinity(), without_sink};
  }
};

// Merges rows. `row_elems`: elements of a part's row in the workspace. `Places`: where keys come from; with
// SequencePlaces parts belong to sequences, otherwise to tokens.
template <int row_elems, class Places>
FMHA_DEVICE void merge(const CdnaDecodeParams& params) {
  constexpr bool listed = !__is_same(Places, SequencePlaces);
  constexpr int columns = ceil_div(row_elems, kWaveSize);  // of a lane
  __shared__ float of_waves[kMergeWaves][row_elems];
  const FwdParams& p = params.call.fwd;
  const int32_t at = workgroup_idx(), i = at % p.seqlen_q, batch_head = at / p.seqlen_q;
  const int32_t i_head = batch_head % p.num_heads_q;
  SeqSpan span = span_of(p, batch_head / p.num_heads_q);
  if (i >= span.seqlen_q) return;
  if constexpr (listed) span.seqlen_k = Places::count(p, span, i, i_head / p.gqa_ratio);
  const PartsOfRow of_row = PartsOfRow::of(params, span);
  const int32_t num_parts = of_row.count;
  const int64_t first = row_of_part(p, of_row.first, i_head, i), rows = row_of_part(p, of_row.step, 0, 0);
  const float FMHA_GLOBAL* stats = (const float FMHA_GLOBAL*)params.stats + 2 * first;
  const float FMHA_GLOBAL* parts = (const float FMHA_GLOBAL*)params.o + first * row_elems;
  const int thread = thread_idx(), lane = thread % kWaveSize, i_wave = v_readfirstlane_b32(thread / kWaveSize);

  ExpSum all;
  for (int32_t n = lane; n < num_parts; n += kWaveSize) all.merge({stats[2 * n * rows], stats[2 * n * rows + 1]});
  all = over_lanes(all);
  const float lse_of_keys = all.log();
  const ListEnd end = listed ? ListEnd::of(p, i_head, lse_of_keys) : ListEnd{false, false};
  if (p.sink.data && !end.sink_has_all) all.add(scalar_of(p.sink, 0, i_head, -infinity()));
  const float per_sum = all.normaliser();

  Array<float, columns> o = {};
#pragma unroll 8
  for (int32_t n = i_wave; n < num_parts; n += kMergeWaves) {
    const float weight = exp_of_difference(stats[2 * n * rows], all.top) * stats[2 * n * rows + 1] * per_sum;
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      const int32_t d = c * kWaveSize + lane;
      o[c] += weight * parts[n * rows * row_elems + min(d, params.call.head_dim_v - 1)];
    }
  }
#pragma unroll
  for (int c = 0; c < columns; ++c) {
    if (c * kWaveSize + lane < row_elems) of_waves[i_wave][c * kWaveSize + lane] = o[c];
  }
  s_barrier();
  const float factor = p.scale_o ? *p.scale_o : 1.f;
  const int64_t to = row_offset(p.o, span.storage_batch, int64_t(span.q_row) + i, i_head);
#pragma unroll
  for (int first = 0; first < row_elems; first += kMergeThreads) {
    const int d = first + thread;
    if (d >= params.call.head_dim_v) break;
    float x = of_waves[0][d];
#pragma unroll
    for (int w = 1; w < kMergeWaves; ++w) x += of_waves[w][d];
    store_of_type(params, to + d, end.sink_has_all ? 0.f : x * factor);
  }
  if (p.lse && thread == 0) {
    const float lse = end.sink_has_all ? infinity() : all.log();
    p.lse[lse_offset(p, span, i_head, i)] = end.without_sink ? lse_of_keys : lse;
  }
}

}  // namespace fmha::cdna::decode
