// Split-KV's second kernel: the parts of a row, merged by their log-sum-exp into O and LSE. The learnable sink, which
// no part has taken in, joins here.
//
// `warps` warps merge a row. Each reads all parts' LSE, side by side, for the maximum and the sum, and then O of
// every `warps`-th part, several under way at a time: a load from the L2 takes some 300 clocks, and one warp that
// waits for 128 parts in turn takes longer than the whole of a short call's attention. Their sums are added in the
// warps' order.
#pragma once
#include <fmha/common/part_keys.cuh>
#include <fmha/common/recompute_row.cuh>
#include <fmha/share_ends.h>
#include <fmha/kv_parts.h>
#include <fmha/mask.h>
#include <fmha/num.h>
#include <fmha/online_softmax.h>
#include <fmha/ptx/grid.cuh>
#include <fmha/ptx/memory.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/range.h>
#include <fmha/seq.h>

namespace fmha::split {

constexpr int32_t kWarp = 32;
// Whether the device is a Blackwell of data centers: beside eight rows of four numbers its compilers spill two words.
#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr bool kSpillsBesideEight = true;
#else
constexpr bool kSpillsBesideEight = false;
#endif

// Parts whose O a warp loads at a time: 32 registers of a lane. Most rows have few parts, and pay for all in
// instructions.
template <int32_t dim>
constexpr int32_t kUnderWay = max(8 / ceil_div(dim, 4 * kWarp), 2) - (kSpillsBesideEight && dim <= 4 * kWarp ? 1 : 0);

// CTAs that go through their code before the parts are there, about one a multiprocessor, so that the others find it
// cached.
constexpr int32_t kEarly = 144;

// A row of the call, and the weights of its parts.
struct MergedRow {
  SeqSpan span;
  int32_t i_head, i, num_parts;
  int64_t row, part_rows;  // where its first part has it, and rows from part to part
  float top, reference, sum, per_sum;
  float lse_of_keys;  // of the keys alone, which lists of keys ask for
  bool live;  // else no memory of its parts is read
};

// LSE of part `n`; minus infinity for a row that is not live.
FMHA_DEVICE float lse_of(const KvParts& parts, const MergedRow& merged, int32_t n) {
  return merged.live ? parts.lse[n * merged.part_rows + merged.row] : -infinity();
}

// Log-sum-exp of a row's keys, without the sink.
FMHA_DEVICE float lse_of_parts(const KvParts& parts, const MergedRow& merged) {
  const int32_t lane = threadIdx.x % kWarp;
  float top = -infinity(), sum = 0.f;
  for (int32_t n = lane; n < merged.num_parts; n += kWarp) top = max(top, lse_of(parts, merged, n));
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) top = max(top, ptx::shfl_xor(top, step));
  for (int32_t n = lane; n < merged.num_parts; n += kWarp)
    sum += exp2_of((lse_of(parts, merged, n) - finite_or_zero(top)) * kLog2E);
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) sum += ptx::shfl_xor(sum, step);
  return sum == 0.f ? -infinity() : finite_or_zero(top) + log2_of(sum) * kLn2;
}

template <FwdSpec spec, bool listed>
FMHA_DEVICE void weigh(const FwdParams& p, const KvParts& parts, MergedRow& merged) {
  const int32_t lane = threadIdx.x % kWarp;
  // LSE and sink stay natural: times log2(e) a finite one may overflow f32.
  const float sink = spec.sink && merged.live ? scalar_of(p.sink, 0, merged.i_head, -infinity()) : -infinity();
  float top = sink;
  for (int32_t n = lane; n < merged.num_parts; n += kWarp) top = max(top, lse_of(parts, merged, n));
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) top = max(top, ptx::shfl_xor(top, step));
  if constexpr (listed && spec.sink) merged.lse_of_keys = lse_of_parts(parts, merged);
  merged.top = top;
  merged.reference = finite_or_zero(top);
  float sum = 0.f;
  for (int32_t n = lane; n < merged.num_parts; n += kWarp)
    sum += exp2_of((lse_of(parts, merged, n) - merged.reference) * kLog2E);
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) sum += ptx::shfl_xor(sum, step);
  if constexpr (spec.sink) sum += exp2_of((sink - merged.reference) * kLog2E);
  merged.sum = sum;
  // Weights are divided by their sum before O is added up: otherwise O may leave f32 where the merged O does not.
  merged.per_sum = sum == 0.f ? 0.f : 1.f / sum;
}

// Four elements of a lane, of every 128 of a row.
template <int32_t dim>
struct RowPart {
  static constexpr int32_t chunks = ceil_div(dim, 4 * kWarp);
  float elems[chunks][4];

  // The sum of no parts: -0, to which a part of -0 is added as it is, so that a row of one part has the part's bits.
  FMHA_DEVICE void clear() {
#pragma unroll
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
      for (int32_t e = 0; e < 4; ++e) elems[chunk][e] = -0.f;
    }
  }

  FMHA_DEVICE static int32_t column(int32_t chunk) { return chunk * 4 * kWarp + threadIdx.x % kWarp * 4; }
  // Loads a part's row, which begins at 16 bytes; its last four elements may exceed `dim`, and are not stored.
  FMHA_DEVICE void load(const float* from, bool there) {
#pragma unroll
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      const int32_t at = column(chunk);
      if constexpr (dim % 4 == 0) {
        ptx::ld_global_v4_f32_if(elems[chunk], from + at, there && at < dim);
      } else {
#pragma unroll
        for (int32_t e = 0; e < 4; ++e) elems[chunk][e] = there && at + e < dim ? from[at + e] : 0.f;
      }
    }
  }
};

// Place of a row among the parts of CTAs' shares (shares.cuh).
FMHA_DEVICE void find_in_shares(const KvParts& parts, MergedRow& merged) {
  const int32_t* const begins = parts.shares + kSharesHeader + merged.span.i_batch;
  const auto word = [&](const int32_t* at) { return merged.live ? *at : 0; };
  const Shares stretches = {word(parts.shares), word(parts.shares + 1)};
  const int32_t begin = word(begins), end = word(begins + 1);
  const int32_t tile_head = merged.i_head / parts.heads, in_tile = merged.i_head - tile_head * parts.heads;
  const int32_t of_sequence = tile_head * parts.row_blocks + (merged.i * parts.heads + in_tile) / parts.block_m;
  const int32_t owner = stretches.owner(begin);
  const int64_t rows = int64_t(parts.heads) * parts.num_rows;  // of a part
  merged.num_parts = max(stretches.owner(end - 1) - owner + 1, 1);
  merged.part_rows = rows * parts.tiles;
  const int64_t part = part_of_tile<int64_t>(owner, merged.span.i_batch, parts.tiles, of_sequence);
  merged.row = part * rows + in_tile * parts.num_rows + merged.i;
}

// O of the parts `first`, `first + step`, ... times their weights.
template <int32_t dim>
FMHA_DEVICE void add_parts(const KvParts& parts, const MergedRow& merged, int32_t first, int32_t step,
                           RowPart<dim>& o) {
  constexpr int32_t under_way = kUnderWay<dim>;
#pragma unroll 1
  for (int32_t begin = first; begin < merged.num_parts; begin += under_way * step) {
    RowPart<dim> part[under_way];
    float weight[under_way];
#pragma unroll
    for (int32_t k = 0; k < under_way; ++k) {
      const int32_t n = begin + k * step;
      const bool there = n < merged.num_parts;
      const int64_t row = n * merged.part_rows + merged.row;
      weight[k] = there ? lse_of(parts, merged, n) : -infinity();
      part[k].load(parts.o + row * parts.row, there && merged.live);
    }
#pragma unroll
    for (int32_t k = 0; k < under_way; ++k) {
      // A part without visible keys is neutral, whatever its memory holds.
      const bool seen = weight[k] != -infinity();
      const float factor = seen ? exp2_of((weight[k] - merged.reference) * kLog2E) * merged.per_sum : 0.f;
#pragma unroll
      for (int32_t chunk = 0; chunk < RowPart<dim>::chunks; ++chunk) {
#pragma unroll
        for (int32_t e = 0; e < 4; ++e) o.elems[chunk][e] += factor * (seen ? part[k].elems[chunk][e] : 0.f);
      }
    }
  }
}

// Any grid: a CTA of `threads` takes `threads / 32 / warps` rows at a time until none is left. `dependent`: it was
// launched to start while the parts' grid ends. `in_shares`: parts end where CTAs' shares do. `keys`: those that a
// row that is computed again sees.
template <FwdSpec spec, DType stored, int32_t threads, int32_t warps, bool dependent, bool in_shares,
          class Keys = EveryKey>
FMHA_DEVICE void merge(const FwdParams& p, const KvParts& parts, const Keys& keys_of_row = {}) {
  constexpr int32_t dim = spec.head_dim_v, rows = threads / kWarp / warps;
  using Part = RowPart<dim>;
  __shared__ float sums[warps > 1 ? threads / kWarp : 1][warps > 1 ? Part::chunks * 4 * kWarp : 1];
  const int32_t warp = threadIdx.x / kWarp, of_row = warp % warps, lane = threadIdx.x % kWarp;
  const int64_t num_rows = int64_t(p.batch) * p.num_heads_q * parts.num_rows;
  // The first pass runs through a row's code without reading or writing its memory, while the parts' grid still runs:
  // so the code has arrived from memory when the parts are ready.
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
    bool there = at < num_rows, again = false;
    Part o;
    o.clear();
    if (there) {
      merged.span = {i_batch, 0, 0, merged.i + 1, 0, 1};
      if (live) merged.span = resolve_seq(p, spec.q_layout, spec.kv_layout, i_batch);
      there = merged.i < merged.span.seqlen_q;
    }
    if (there) {
      if constexpr (in_shares) {
        find_in_shares(parts, merged);
      } else if constexpr (are_of_token<Keys>()) {
        merged.num_parts = parts.count;
        merged.row = at;
        merged.part_rows = num_rows;
      } else {
        // Parts that the forward kernel has written: up to the last key that the row sees, and the first part in any
        // case.
        const int32_t keys = keys_of_a_part(merged.span.seqlen_k, parts.count, parts.block_n);
        const MaskBand band = resolve_band(p.mask, merged.span.seqlen_q, merged.span.seqlen_k);
        merged.num_parts = max(ceil_div(row_range(band, merged.i, merged.span.seqlen_k).end, keys), 1);
        merged.row = at;
        merged.part_rows = num_rows;
      }
      weigh<spec, are_of_token<Keys>()>(p, parts, merged);
      // The last place of so large an LSE hides the sum that it is of, and with it what a part weighs beside others.
      again = live && (merged.num_parts > 1 || spec.sink) && fabsf(merged.top) < infinity() &&
              fabsf(merged.top * kLog2E) >= kLargestShift;
      if (!again) add_parts<dim>(parts, merged, of_row, warps, o);
    }
    if constexpr (warps > 1) {
#pragma unroll
      for (int32_t chunk = 0; chunk < Part::chunks; ++chunk) {
#pragma unroll
        for (int32_t e = 0; e < 4; ++e) sums[warp][(chunk * 4 + e) * kWarp + lane] = o.elems[chunk][e];
      }
      __syncthreads();
      if (of_row == 0) {
#pragma unroll
        for (int32_t w = 1; w < warps; ++w) {
#pragma unroll
          for (int32_t chunk = 0; chunk < Part::chunks; ++chunk) {
#pragma unroll
            for (int32_t e = 0; e < 4; ++e) o.elems[chunk][e] += sums[warp + w][(chunk * 4 + e) * kWarp + lane];
          }
        }
      }
    }
    if (there && of_row == 0) {
      if (again) {
        const SeqSpan& span = merged.span;
        if constexpr (are_of_token<Keys>()) {
          using KeysOfRow = typename Keys::OfRow;
          const KeysOfRow keys = keys_of_row.at(p, span, merged.i, merged.i_head / p.gqa_ratio);
          RecomputedRow<spec, stored, KeysOfRow> row{
              p, span, merged.i_head, merged.i, span.storage_batch, span.q_row + merged.i,
              {0, keys.list.count()}, keys};
          row.run();
        } else {
          RecomputedRow<spec, stored, Keys> row{
              p, span, merged.i_head, merged.i, span.storage_batch, span.q_row + merged.i,
              {0, span.seqlen_k}, keys_of_row};
          row.run();
        }
      } else {
        bool all_in_sink = false;
        if constexpr (are_of_token<Keys>() && spec.sink)
          all_in_sink = live && merged.top == infinity() && merged.lse_of_keys < infinity();
        float factor = 1.f;
        if constexpr (is_fp8(spec.dtype_o)) factor *= live && p.scale_o ? *p.scale_o : 1.f;
        const int64_t to = row_offset(p.o, merged.span.storage_batch, merged.span.q_row + merged.i, merged.i_head);
#pragma unroll
        for (int32_t chunk = 0; chunk < Part::chunks; ++chunk) {
#pragma unroll
          for (int32_t e = 0; e < 4; ++e) {
            const int32_t d = Part::column(chunk) + e;
            const float value = all_in_sink ? 0.f : o.elems[chunk][e] * factor;
            if (live && d < dim) store_elem<spec.dtype_o>(p.o.data, to + d, value);
          }
        }
        if constexpr (spec.write_lse) {
          float lse = merged.sum == 0.f ? -infinity() : merged.top + log2_of(merged.sum) * kLn2;
          if constexpr (are_of_token<Keys>() && spec.sink) {
            if (all_in_sink) lse = infinity();
            if (keys_of_row.lists.lse_without_sink) lse = merged.lse_of_keys;
          }
          if (live && lane == 0) p.lse[lse_offset(p, merged.span, merged.i_head, merged.i)] = lse;
        }
      }
    }
    if constexpr (warps > 1) __syncthreads();
    if (live) {
      first += int64_t(gridDim.x) * rows;
    } else {
      live = true;
      if constexpr (dependent) ptx::wait_for_grids_before();
    }
  }
}

}  // namespace fmha::split
