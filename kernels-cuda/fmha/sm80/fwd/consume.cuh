// Work of a warp on its rows: S = Q K^T, P = exp2(S - row maximum), O += P V, all of S, P and O in registers. The
// accumulator of S, packed, is the operand A of P V, so that P never leaves the warp.
#pragma once
#include <fmha/common/list_union.cuh>
#include <fmha/common/score_modifiers.cuh>
#include <fmha/common/seen_keys.cuh>
#include <fmha/common/softmax.cuh>
#include <fmha/sm80/fwd/config.cuh>
#include <fmha/sm80/fwd/fp8_product.cuh>

namespace fmha::sm80 {

template <FwdSpec spec, Sm80Tile tile, class Keys>
struct Consumer {
  using Shared = Smem<spec, tile>;
  static constexpr int n = tile.block_n, rows_of_sixteen = m_tiles(tile);
  using Scores = mma::Accumulator<n>;
  using Output = mma::Accumulator<Shared::dim_v / tile.value_parts>;
  using RowSoftmax = Softmax<shared(tile), p_offset_log2(spec, tile)>;
  using ScoreModifiers = Modifiers<spec, shared(tile)>;
  static constexpr bool has_hi = spec.mask != MaskKind::Full, has_lo = spec.mask == MaskKind::Band;

  const FwdParams& p;
  const Work& work;
  Shared& smem;
  const Keys& keys;
  // First row of the warp, in the CTA and among the sequence's (packed) rows.
  const int32_t warp = threadIdx.x / 32, warp_row = warp / tile.value_parts * warp_rows(tile), first_row = work.first_row + warp_row;
  const int32_t part = warp % tile.value_parts;  // of O's columns
  const int32_t first_query = query_of<tile>(p, first_row), last_query = query_of<tile>(p, first_row + warp_rows(tile) - 1);
  // Descale by which FP8 scores are multiplied.
  const float descale = is_fp8(spec.dtype_qk) ? scalar_of(p.descale_q, work.i_batch, work.i_head_kv, 1.f) * scalar_of(p.descale_k, work.i_batch, work.i_head_kv, 1.f) : 1.f;
  const ScoreModifiers modifiers = {p, fabsf(descale)};
  const float scale_log2 = modifiers.scale_log2();

  Output o[rows_of_sixteen];
  RowSoftmax softmax[rows_of_sixteen];
  mma::RegisterTile<mma::Storage<spec.dtype_v>, n> probs[rows_of_sixteen];

  // Descales of a cache that the products read unconverted.
  static constexpr bool reads_raw = reads_raw_blocks(spec, tile);
  const float descale_k = reads_raw ? scalar_of(p.descale_k, work.i_batch, work.i_head_kv, 1.f) : 1.f;
  const float descale_v = reads_raw ? scalar_of(p.descale_v, work.i_batch, work.i_head_kv, 1.f) : 1.f;

  // The thread's first row of sixteen rows.
  FMHA_DEVICE int32_t row(int m) const { return first_row + m * mma::kRows + threadIdx.x % 32 / 4; }

  FMHA_DEVICE void begin() {
#pragma unroll
    for (int m = 0; m < rows_of_sixteen; ++m) {
      o[m].clear();
      softmax[m].reset();
    }
  }

  // Class of the next block for the warp's rows by masks as data, or by their lists.
  BlockClass by_data = BlockClass::Edge;
  // The lane's row among the warp's, where the tile walks the union of its tokens' lists.
  RowInUnion in_union = row_of_lane();
  FMHA_DEVICE RowInUnion row_of_lane() const {
    if constexpr (unites_lists<Keys>()) {
      const int32_t within = min(int32_t(threadIdx.x % 32), warp_rows(tile) - 1);
      const int32_t i = query_of<tile>(p, first_row + within);
      return RowInUnion::of(keys, i, i < work.seqlen_q && warp_row + within < rows_of_tile<shared(tile)>(p));
    }
    return {};
  }

  FMHA_DEVICE SeqSpan span() const {
    return {work.i_batch, work.storage_batch, work.q_row, work.seqlen_q, work.k_row, work.seqlen_k};
  }

  // Whether no row of the warp sees a key of the block, so that it computes nothing.
  FMHA_DEVICE bool is_hidden(int32_t block) {
    const bool hidden = is_out_of_band(block);
    if constexpr (unites_lists<Keys>()) {
      if (block < 0) return true;
      by_data = in_union.template enter<n>(block);
      return hidden || by_data == BlockClass::Skipped;
    } else if constexpr (Keys::has_classes) {
      if (hidden) return true;
      const Range rows = {first_query, min(last_query + 1, work.seqlen_q)};
      by_data = keys.class_of(span(), work.i_head, rows, {block * n, min((block + 1) * n, work.seqlen_k)});
      return by_data == BlockClass::Skipped;
    }
    return hidden;
  }
  FMHA_DEVICE bool is_out_of_band(int32_t block) const {
    if (block < 0) return true;
    const int32_t begin = block * n, end = begin + n;
    bool hidden = begin >= work.seqlen_k || first_query >= work.seqlen_q;
    if constexpr (has_hi) hidden |= begin > last_query + work.hi;
    if constexpr (has_lo) hidden |= end <= first_query + work.lo && !(spec.sink_columns && begin < work.sink_columns);
    return hidden;
  }
  // Whether the mask or the sequence's end hides a key of the block from some row of the warp.
  FMHA_DEVICE bool is_edge(int32_t block) const {
    const int32_t begin = block * n, end = begin + n;
    bool edge = end > work.seqlen_k;
    if constexpr (has_hi) edge |= end > first_query + work.hi + 1;
    if constexpr (has_lo) edge |= begin < last_query + work.lo;
    if constexpr (Keys::has_classes) edge |= by_data == BlockClass::Edge;
    else if constexpr (!Keys::all) edge |= end > work.seqlen_k - work.seqlen_q;
    return edge;
  }

  // Writes -inf where the mask hides a key from one of the thread's two rows.
  FMHA_DEVICE void mask(Scores& s, int32_t first_row_of_two, int32_t block) const {
    const int32_t first_key = block * n + fmha::mma::fragment_column();
    int32_t end[2], begin[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t i = query_of<tile>(p, first_row_of_two + 8 * r);
      end[r] = (has_hi ? min(work.seqlen_k, i + work.hi + 1) : work.seqlen_k) - first_key;
      begin[r] = has_lo ? i + work.lo - first_key : 0;
    }
    const int32_t sinks = work.sink_columns - first_key;
    [[maybe_unused]] uint32_t groups[2] = {};
    if constexpr (unites_lists<Keys>()) {
#pragma unroll
      for (int r = 0; r < 2; ++r) groups[r] = ptx::shfl_idx(in_union.groups, first_row_of_two + 8 * r - first_row);
    }
#pragma unroll
    for (int e = 0; e < s.num_elems; ++e) {
      const int column = s.column(e), r = s.row(e);
      bool hidden = column >= end[r];
      if constexpr (has_lo) hidden |= column < begin[r] && !(spec.sink_columns && column < sinks);
      if constexpr (unites_lists<Keys>()) {
        hidden |= !(groups[r] >> column / kGroupKeys & 1);
      } else if constexpr (!Keys::all) {
        const int32_t i = query_of<tile>(p, first_row_of_two + 8 * r);
        hidden |= !keys.sees(span(), work.i_head, i, first_key + column);
      }
      if (hidden) s[e] = -infinity();
    }
  }

  // Tells which of the scores dropout sets to zero.
  FMHA_DEVICE DroppedBits<n> dropped_of(int m, int32_t block) {
    int32_t i[2], batch_head[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t at = row(m) + 8 * r;
      i[r] = query_of<tile>(p, at);
      const int32_t i_head = tile.pack_gqa ? work.i_head + at - i[r] * p.gqa_ratio : work.i_head;
      batch_head[r] = head_of_whole(p, work.i_batch, i_head);
    }
    DroppedBits<n> dropped;
    dropped.template decide<n, !tile.pack_gqa>(p, smem.quads[warp], i, batch_head, block * n);
    return dropped;
  }

  // Packs P of sixteen rows. With 8-bit P dropout has been applied before.
  FMHA_DEVICE void take_probs(int m, Scores& s, int32_t block) {
    if constexpr (is_fp8(spec.dtype_v)) {
      if constexpr (spec.dropout) dropped_of(m, block).drop(s);
      mma::pack_operand<spec.dtype_v, Shared::turned ? mma::KeyOrder::OfAccumulator : mma::KeyOrder::OfMemory>(probs[m], s, 0);
    } else {
      probs[m].template from<spec.dtype_v>(s, 0);
    }
  }

  // Computes S of a block and its P; updates running maxima, sums and O, which is relative to the maxima.
  template <bool unit = false, class KTile>
  FMHA_DEVICE void score(const KTile& k, int32_t block) {
    typename ScoreModifiers::BiasWords bias[rows_of_sixteen];
    if constexpr (ScoreModifiers::prefetches) {
#pragma unroll
      for (int m = 0; m < rows_of_sixteen; ++m) modifiers.fetch(bias[m], work, row(m), block);
    }
    Scores s[rows_of_sixteen];
    if constexpr (reads_raw) {
      raw_product_abt<spec, tile, unit>(s, smem.q, k, descale_k);
    } else {
      mma::product_abt<spec.dtype_qk, tile.fragments_ahead>(s, smem.q, warp_row, k);
    }
    const bool edge = is_edge(block);
#pragma unroll
    for (int m = 0; m < rows_of_sixteen; ++m) {
      // A negative product of descales changes the sign of S, like a negative scale.
      if (spec.negative_scale != (is_fp8(spec.dtype_qk) && descale < 0.f)) {
#pragma unroll
        for (int e = 0; e < Scores::num_elems; ++e) s[m][e] = -s[m][e];
      }
      modifiers.apply(s[m], bias[m], work, row(m), block);
      if (edge) mask(s[m], row(m), block);
      softmax[m].step(s[m], scale_log2, 0, [] {});
      take_probs(m, s[m], block);
      rescale(m);
      if constexpr (spec.dropout && !is_fp8(spec.dtype_v)) dropped_of(m, block).drop(probs[m], n);
    }
  }

  // Rescales O to the running maxima of the last block, if any of the warp's upper or lower eight rows needs it.
  FMHA_DEVICE void rescale(int m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!softmax[m].corrects(r)) continue;
#pragma unroll
      for (int e = 0; e < Output::num_elems; ++e) {
        if (Output::row(e) == r) o[m][e] *= softmax[m].correction[r];
      }
    }
  }

  template <bool unit = false, class VTile>
  FMHA_DEVICE void accumulate(const VTile& v) {
    if constexpr (reads_raw) {
      raw_product_ab<spec, tile, unit>(o, probs, v, descale_v);
    } else {
      mma::product_ab<spec.dtype_v, tile.fragments_ahead, Shared::v_columns>(o, probs, v, part);
    }
  }
};

}  // namespace fmha::sm80
