// A row of O and its LSE computed again by a warp, key by visible key.
//
// A NaN or infinity of V that one query sees and the mask hides from another reaches both through the tensor cores,
// since 0 times either is NaN. Looking for such values in V would cost every tile (two warps doing so: 1 to 4 % on an
// H200), so they are found in O: a row that is not finite although its LSE is gets computed again from memory. So are
// rows whose unnormalised O has left f32 though O itself does not, and on Hopper rows of very large scores (range.h).
// That is slow, and exact.
//
// Every branch is uniform over the warp in a way that ptxas can tell: else it would keep the calling kernel's
// slot indices in per-lane registers from here on, which the descriptors of the products cannot use.
#pragma once
#include <fmha/cache_rows.h>
#include <fmha/mask.h>
#include <fmha/common/output_row.cuh>
#include <fmha/common/seen_keys.cuh>
#include <fmha/num.h>
#include <fmha/online_softmax.h>
#include <fmha/philox.h>
#include <fmha/range.h>
#include <fmha/score.h>
#include <fmha/seq.h>
#include <fmha/ptx/collective.cuh>
#include <fmha/ptx/warp.cuh>

namespace fmha {

// Elements of memory without scales; ScaledElems (block_scales.h) multiplies by scales.
struct PlainElems {};

// Recomputes one row: query i of a head. `among` is the range of keys, or of places in a list, of which the row sees
// those that `keys` shows. K and V lie in memory as `stored`: Q's type, or FP8 where Q has 16 bits.
template <FwdSpec spec, DType stored = spec.dtype_qk, class Keys = EveryKey, class Elems = PlainElems>
struct RecomputedRow {
  static constexpr int row_bytes = row_bytes_of<Keys>();
  static constexpr bool widens = stored != spec.dtype_qk;
  static constexpr bool scaled = requires(const Elems& x, const FwdParams& p, const SeqSpan& span) {
    x.query_row(p, span, 0, 0);
  };
  static constexpr int32_t columns = ceil_div(spec.head_dim_v, 32);  // of O, to a lane

  const FwdParams& p;
  const SeqSpan span;
  const int32_t i_head, i;
  const int32_t o_batch = span.storage_batch, o_row = span.q_row + i;  // where O lies
  const Range among = {0, span.seqlen_k};
  const Keys keys = {};
  const Elems elems = {};
  const int32_t lane = threadIdx.x % 32;
  const int32_t i_head_kv = i_head / p.gqa_ratio;
  const float scale = is_fp8(spec.dtype_qk) ? p.softmax_scale * descale(p.descale_q) * descale(p.descale_k) : p.softmax_scale;
  // The softmax takes natural scores where a modifier changes them; otherwise products with the scale's sign, since
  // their magnitude stays within f32 whatever the scale. A scale of 0 is replaced by f32's smallest number, which takes
  // every product to 0 and does not turn a maximum of -inf into NaN.
  const float positive_scale = modifies_score(spec) ? 1.f : fmaxf(fabsf(scale), 1.4e-45f);
  const float scale_log2 = positive_scale * kLog2E;
  float row_max = -infinity(), row_sum = 0.f;  // of exp2((score - row_max) * scale_log2)
  float room = 1.f;                            // what O is multiplied by so that it stays in f32 (range.h)
  float o[columns] = {};

  // An element of K or V in Q's type: stored FP8 times its
  // descale, rounded like a dequantised cache.
  FMHA_DEVICE float of_cache(const View& view, int64_t at, const HeadScalars& descales) const {
    return round_to<spec.dtype_qk>(load_elem<stored>(view.data, at) * descale(descales));
  }

  // Key j's row of bytes.
  FMHA_DEVICE BytesOfRow bytes_of(int32_t j) const {
    return keys.list.template bytes_of<row_bytes>(keys.list.place(spec.kv_layout, j));
  }

  // The product of Q[i] and K[j]. The lanes divide the dimension among them.
  FMHA_DEVICE float product(int32_t j) const {
    if constexpr (scaled) return scaled_product(j);
    const int64_t q = query_offset(p, span, query_of_sequence(keys, i), i_head);
    int64_t k = 0;
    BytesOfRow bytes = {};
    if constexpr (row_bytes > 0) bytes = bytes_of(j);
    else k = offset_of_key<size_bytes(stored)>(keys, p, p.k, spec.kv_layout, span, j, i_head_kv);
    float dot = 0.f;
#pragma unroll
    for (int32_t c = 0; c < ceil_div(spec.head_dim_qk, 32); ++c) {
      const int32_t d = c * 32 + lane, there = min(d, spec.head_dim_qk - 1);
      float key;
      if constexpr (row_bytes > 0) key = element_of_row<row_bytes>(bytes, there);
      else if constexpr (widens) key = of_cache(p.k, k + there, p.descale_k);
      else key = load_elem<spec.dtype_qk>(p.k.data, k + there);
      const float term = load_elem<spec.dtype_qk>(p.q.data, q + there) * key;
      dot += d < spec.head_dim_qk ? term : 0.f;
    }
#pragma unroll
    for (int32_t step = 16; step > 0; step /= 2) dot += ptx::shfl_xor(dot, step);
    return dot;
  }

  // The product of a query and key `j` whose elements have scales.
  FMHA_DEVICE float scaled_product(int32_t j) const {
    if constexpr (scaled) {
      const auto q = elems.query_row(p, span, i, i_head);
      const auto k = elems.template key_row<spec>(p, span, j, i_head_kv);
      float dot = 0.f;
#pragma unroll 1
      for (int32_t d = lane; d < spec.head_dim_qk; d += 32) dot += elems.of_row(q, d) * elems.of_row(k, d);
#pragma unroll
      for (int32_t step = 16; step > 0; step /= 2) dot += ptx::shfl_xor(dot, step);
      return dot;
    }
    return 0.f;
  }

  FMHA_DEVICE float descale(const HeadScalars& x) const { return scalar_of(x, span.i_batch, i_head_kv, 1.f); }

  FMHA_DEVICE void take(Range range, const Score<spec>& modifiers) {
    const int32_t begin = ptx::uniform(range.begin), end = ptx::uniform(range.end);
#pragma unroll 1
    for (int32_t j = begin; j < end; ++j) {
      if constexpr (!Keys::all) {
        if (!ptx::uniform(keys.sees(span, i_head, i, j))) continue;
      }
      float score = product(j);
      if constexpr (modifies_score(spec)) score = modifiers.natural({i, j}, score);
      else score = scale < 0.f ? -score : score;
      if constexpr (Score<spec>::hides) {
        if (ptx::uniform(int32_t(score == -infinity()))) continue;
      }
      const float base = finite_or_zero(fmaxf(row_max, score));
      const float correction = ptx::ex2_approx_ftz((row_max - base) * scale_log2);
      const float prob = ptx::ex2_approx_ftz((score - base) * scale_log2);
      row_max = fmaxf(row_max, score);
      row_sum = row_sum * correction + prob;
      const float next_room = headroom(row_sum), rescale = correction * next_room * inverse_of_power(room);
      room = next_room;
      constexpr float of_p = p_scale(spec.dtype_v);
      float weight = round_to<spec.dtype_v>(prob * of_p) / of_p;
      if constexpr (spec.dropout) {
        // Selects a word by constants: indexing words[j % 4] would put the array into local memory.
        const Array<uint32_t, 4> words = dropout_words(p, head_of_whole(p, span.i_batch, i_head), i, j / 4);
        const uint32_t even = j & 2 ? words[2] : words[0], odd = j & 2 ? words[3] : words[1];
        weight = (j & 1 ? odd : even) < p.dropout_threshold ? weight : 0.f;
      }
      weight *= room;
      if constexpr (scaled) {
        const auto value = elems.template value<spec>(p, span, j, i_head_kv);
#pragma unroll
        for (int32_t c = 0; c < columns; ++c)
          o[c] = o[c] * rescale + weight * value(min(c * 32 + lane, spec.head_dim_v - 1));
        continue;
      }
      constexpr int bytes = size_bytes(widens ? stored : spec.dtype_v);
      int64_t v = 0;
      BytesOfRow of_row = {};
      if constexpr (row_bytes > 0) of_row = bytes_of(j);
      else v = offset_of_key<bytes>(keys, p, p.v, spec.kv_layout, span, j, i_head_kv);
#pragma unroll
      for (int32_t c = 0; c < columns; ++c) {
        const int32_t d = min(c * 32 + lane, spec.head_dim_v - 1);
        const int64_t at = spec.v_layout == VLayout::ColMajor ? v + d * p.v.dim : v + d;
        float value;
        if constexpr (row_bytes > 0) value = element_of_row<row_bytes>(of_row, d);
        else if constexpr (widens) value = of_cache(p.v, at, p.descale_v);
        else value = load_elem<spec.dtype_v>(p.v.data, at);
        o[c] = o[c] * rescale + weight * value;
      }
    }
  }

  FMHA_DEVICE void run() {
    const MaskBand band = resolve_band(p.mask, span.seqlen_q, span.seqlen_k);
    const Score<spec> modifiers = Score<spec>::of(p, span, i_head, scale);
    const Range row = {i, i + 1};
    if constexpr (are_of_token<Keys>()) {
      take(among, modifiers);
    } else {
      if constexpr (spec.sink_columns) take(sink_range(band, row, span.seqlen_k), modifiers);
      const Range seen = row_range(band, i, span.seqlen_k);
      take({max(seen.begin, among.begin), min(seen.end, among.end)}, modifiers);
    }

    const RowMax max = {__fmul_rn(row_max, scale_log2), __fmul_rn(row_max, positive_scale)};
    const RowResult result = finish_row_of<spec>(p, keys, max, row_sum, i_head).row;
    const float unscaled = result.factor * inverse_of_power(room);
    const float factor = scaled_output<output_scales(spec)>(unscaled, p, span.i_batch, i_head_kv);
    const OutputRow to = {o_batch, o_row, i_head};
#pragma unroll
    for (int32_t c = 0; c < columns; ++c) {
      const int32_t d = c * 32 + lane;
      store_o<spec.dtype_o>(p.o.data, to.o(p) + d, o[c] * factor, d < spec.head_dim_v);
    }
    if constexpr (spec.write_lse) ptx::st_global_f32_if(to.lse(p), result.lse, lane == 0);
  }
};

}  // namespace fmha
