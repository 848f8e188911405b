// The launch that merges the results of split keys, where each part has a fixed number of keys: it folds each row's
// parts (fold.cuh), from the last part to the first.
//
// `warps` warps divide a row's columns among them, so their number changes no bit of the result. Each lane of a warp
// computes the exponential of one of 32 parts in parallel; only the sums and O are accumulated part by part.
#pragma once
#include <fmha/common/fold.cuh>
#include <fmha/common/merge_parts.cuh>

namespace fmha::split {

// Which columns of a row of O one warp has: some of every 128 columns.
template <int32_t dim, int32_t warps>
struct RowColumns {
  static_assert(warps == 1 || warps == 4, "lanes load 16 bytes, or 4");
  static constexpr int32_t width = 4 / warps, chunks = ceil_div(dim, 4 * kWarp);
  // Number of parts that a warp loads before it adds the first: 32 or 16 registers of a lane.
  static constexpr int32_t under_way = max(warps == 1 ? 8 / chunks : 16 / chunks, 2);
  float elems[chunks][width];

  FMHA_DEVICE static int32_t column(int32_t chunk) {
    const int32_t warp = int32_t(threadIdx.x) / kWarp % warps, lane = int32_t(threadIdx.x) % kWarp;
    return chunk * 4 * kWarp + (warp * kWarp + lane) * width;
  }
  FMHA_DEVICE void load(const float* from, bool there) {
#pragma unroll
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      const int32_t at = column(chunk);
      if constexpr (width == 4 && dim % 4 == 0) {
        ptx::ld_global_v4_f32_if(elems[chunk], from + at, there && at < dim);
      } else {
#pragma unroll
        for (int32_t e = 0; e < width; ++e) elems[chunk][e] = there && at + e < dim ? from[at + e] : 0.f;
      }
    }
  }
};

// Result of merging a row's parts: its LSE and factor, and whether a part must be recomputed.
struct FoldedParts {
  FoldedRow row;
  bool again = false;
};

template <int32_t dim, int32_t warps>
FMHA_DEVICE FoldedParts fold_row(const KvParts& parts, const MergedRow& merged, RowColumns<dim, warps>& o) {
  using Columns = RowColumns<dim, warps>;
  const int32_t lane = threadIdx.x % kWarp;
  FoldedParts folded;
#pragma unroll 1
  for (int32_t end = merged.num_parts; end > 0; end -= kWarp) {
    const int32_t count = min(end, kWarp);
    const auto from_last = [&](int32_t l) { return end - 1 - l; };
    // Lane l holds the l-th part counted from the last: its LSE, and the largest LSE of the parts up to it.
    const float lse = lane < count ? lse_of(parts, merged, from_last(lane)) : -infinity();
    folded.again |= bits_of(lse) == kAgainBits;
    float next = fmaxf(folded.row.top, lse);
#pragma unroll
    for (int32_t step = 1; step < kWarp; step *= 2) {
      const float before = ptx::shfl_idx(next, max(lane - step, 0));
      next = fmaxf(next, before);
    }
    const float before = ptx::shfl_idx(next, max(lane - 1, 0));
    const FoldWeights exponentials = FoldedRow::exponentials(lane == 0 ? folded.row.top : before, next, lse);
    FoldWeights weights;
#pragma unroll 1
    for (int32_t k = 0; k < count; ++k) {
      const FoldWeights of_part = {ptx::shfl_idx(exponentials.old, k), ptx::shfl_idx(exponentials.part, k)};
      const FoldWeights added = folded.row.add(of_part);
      if (k == lane) weights = added;
    }
    folded.row.top = ptx::shfl_idx(next, kWarp - 1);
#pragma unroll 1
    for (int32_t begin = 0; begin < count; begin += Columns::under_way) {
      Columns part[Columns::under_way];
#pragma unroll
      for (int32_t k = 0; k < Columns::under_way; ++k) {
        const int32_t n = from_last(begin + k);
        part[k].load(parts.o + (n * merged.part_rows + merged.row) * parts.row, merged.live && begin + k < count);
      }
#pragma unroll
      for (int32_t k = 0; k < Columns::under_way; ++k) {
        const int32_t at = begin + k;
        if (at >= count) break;
        const FoldWeights of_part = {ptx::shfl_idx(weights.old, at), ptx::shfl_idx(weights.part, at)};
        const bool seen = ptx::shfl_idx(lse, at) != -infinity();
#pragma unroll
        for (int32_t chunk = 0; chunk < Columns::chunks; ++chunk) {
#pragma unroll
          for (int32_t e = 0; e < Columns::width; ++e)
            o.elems[chunk][e] = fold(o.elems[chunk][e], element_of_part(part[k].elems[chunk][e], seen), of_part);
        }
      }
    }
  }
  folded.again = __any_sync(ptx::kAllLanes, folded.again);
  return folded;
}

// Any grid: a CTA of `threads` takes `threads / 32 / warps` rows at a time until none is left. `dependent`: the launch
// may start while the grid that computes the parts still runs. `keys`: the keys that a recomputed row sees.
template <FwdSpec spec, DType stored, int32_t threads, int32_t warps, bool dependent, class Keys = EveryKey>
FMHA_DEVICE void fold(const FwdParams& p, const KvParts& parts, const Keys& keys_of_row = {}) {
  constexpr int32_t dim = spec.head_dim_v, rows = threads / kWarp / warps;
  using Columns = RowColumns<dim, warps>;
  const int32_t warp = threadIdx.x / kWarp, of_row = warp % warps, lane = threadIdx.x % kWarp;
  const int64_t num_rows = int64_t(p.batch) * p.num_heads_q * parts.num_rows;
  // The first pass of a dependent launch accesses no memory: it only brings the code into the instruction cache while
  // the grid before still runs.
  bool live = !dependent || int32_t(blockIdx.x) >= kEarly;
  if constexpr (dependent) {
    if (live) ptx::wait_for_grids_before();
  }
  for (int64_t first = int64_t(blockIdx.x) * rows; first < num_rows;) {
    const int64_t at = first + warp / warps, batch_head = at / parts.num_rows;
    const int32_t i_batch = int32_t(batch_head / p.num_heads_q);
    MergedRow merged;
    merged.live = live;
    merged.i_head = int32_t(batch_head % p.num_heads_q);
    merged.i = parts.first_row + int32_t(at % parts.num_rows);
    bool there = at < num_rows;
    if (there) {
      merged.span = {i_batch, 0, 0, merged.i + 1, 0, 1};
      if (live) merged.span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
      there = merged.i < merged.span.seqlen_q;
    }
    if (there) {
      const SeqSpan& span = merged.span;
      // Number of parts that the forward kernel has written for this row: those up to the last key that the row sees,
      // at least the first.
      const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);
      merged.num_parts = max(ceil_div(row_range(band, merged.i, span.seqlen_k).end, parts.keys), 1);
      merged.row = at;
      merged.part_rows = num_rows;
      Columns o;
#pragma unroll
      for (int32_t chunk = 0; chunk < Columns::chunks; ++chunk) {
#pragma unroll
        for (int32_t e = 0; e < Columns::width; ++e) o.elems[chunk][e] = -0.f;
      }
      FoldedParts folded = fold_row<dim>(parts, merged, o);
      float factor = 1.f;
      if constexpr (spec.sink) {
        // The sink is a natural logarithm: times log2(e) it may overflow f32. It adds to the row's sum and nothing to
        // O.
        const float sink = live ? scalar_of(p.sink, 0, merged.i_head, -infinity()) : -infinity();
        factor = folded.row.take(sink).old;
      }
      if (folded.again && live) {
        if (of_row == 0) {
          RecomputedRow<spec, stored, Keys> row{
              p, span, merged.i_head, merged.i, span.storage_batch, span.q_row + merged.i,
              {0, span.seqlen_k}, keys_of_row};
          row.run();
        }
      } else {
        if constexpr (is_fp8(spec.dtype_o)) factor *= live && p.scale_o ? *p.scale_o : 1.f;
        const int64_t to = row_offset(p.o, span.storage_batch, span.q_row + merged.i, merged.i_head);
        // A row that sees no key has no sum.
        const bool empty = folded.row.sum == 0.f;
#pragma unroll
        for (int32_t chunk = 0; chunk < Columns::chunks; ++chunk) {
#pragma unroll
          for (int32_t e = 0; e < Columns::width; ++e) {
            const int32_t d = Columns::column(chunk) + e;
            const float value = empty ? 0.f : o.elems[chunk][e] * factor;
            if (live && d < dim) store_elem<spec.dtype_o>(p.o.data, to + d, value);
          }
        }
        if constexpr (spec.write_lse) {
          if (live && lane == 0 && of_row == 0) p.lse[lse_offset(p, span, merged.i_head, merged.i)] = folded.row.lse();
        }
      }
    }
    if (live) {
      first += int64_t(gridDim.x) * rows;
    } else {
      live = true;
      if constexpr (dependent) ptx::wait_for_grids_before();
    }
  }
}

}  // namespace fmha::split
