// Stores O and LSE of a tile from registers to memory. Each warpgroup stores its columns of O.
#pragma once
#include <fmha/common/output_row.cuh>
#include <fmha/common/recompute_row.cuh>
#include <fmha/common/store_rows.cuh>
#include <fmha/sm90/mla/fold.cuh>

namespace fmha::mla {

// Stores the first `columns` of a row's part in f32, 16 bytes at a time: of two 8-column groups even lanes store the
// first, odd lanes the second.
template <int columns, class Output>
FMHA_DEVICE void store_quads(float* out, const Output& o, int r, float factor, bool stored) {
  const int32_t quad_lane = threadIdx.x % 4;
  const bool odd = quad_lane & 1;
#pragma unroll
  for (int e = 2 * r; e < Output::num_elems; e += 8) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      words[k] = bits_of(o[e + k] * factor);
      words[2 + k] = bits_of(o[e + 4 + k] * factor);
    }
    exchange_halves(words);
    const int32_t column = 2 * e - 4 * r + (odd ? 8 : 0) + 2 * (quad_lane & 2);
    ptx::st_global_v4_b32_if(out + column, words, stored && column < columns);
  }
}

// The spec for the stores of a warpgroup: a row ends with the warpgroup's last column.
template <FwdSpec spec, Sm90MlaTile tile, int group>
FMHA_DEVICE constexpr FwdSpec half_of() {
  constexpr int columns = Plan<spec, tile>::columns_half;
  FwdSpec half = spec;
  half.head_dim_v = clamp(spec.head_dim_v - group * columns, 0, columns);
  return half;
}

// Recomputes rows in which a warp of warpgroup 0 has found a NaN or an infinity. They are written with all columns.
template <FwdSpec spec, Sm90MlaTile tile, int group, class Keys>
FMHA_DEVICE void recompute_found(const Consumer<spec, tile, group>& consumer, const Keys& keys, const bool (&found)[2], int32_t o_batch,
                                 int32_t o_row) {
  const FwdParams& p = consumer.p;
  const Work& work = consumer.work;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t lanes = ptx::vote_ballot(found[r] && threadIdx.x % 4 == 0);
#pragma unroll 1
    for (int32_t lane = 0; lane < 32; lane += 4) {
      if (!ptx::uniform(lanes >> lane & 1)) continue;
      const int32_t packed_row = work.first_row + ptx::shfl_idx(consumer.tile_row + 8 * r, lane);
      const int32_t i = Work::query_of(p, packed_row);
      SeqSpan span = work.span;
      // Keys of a token's list are numbered by their entries, so the number of entries takes the place of the
      // sequence's length.
      if constexpr (are_of_token<Keys>()) span.seqlen_k = keys.list.count();
      RecomputedRow<spec, tile.stored, Keys> again{p, span, work.head_of(p, packed_row, i), i, o_batch, o_row + i, work.part_keys, keys};
      again.run();
    }
  }
}

// Stores O and LSE where the CTAs of a cluster fold their parts of the keys. `to_descale_v`: a further factor of O.
// `is_far`: all rows are recomputed instead.
template <FwdSpec spec, Sm90MlaTile tile, int group, class Keys>
FMHA_DEVICE void store_folded(Consumer<spec, tile, group>& consumer, const Keys& keys, float to_descale_v, bool is_far,
                              int32_t o_batch) {
  using Folding = Fold<spec, tile, group>;
  const FwdParams& p = consumer.p;
  const Work& work = consumer.work;
  Folding fold{consumer};
  fold.meet();
  float factor[2], lse[2];
  bool again[2], stored[2];
  OutputRow to[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t packed_row = work.first_row + fold.row(r), i = Work::query_of(p, packed_row);
    to[r] = {o_batch, i, work.head_of(p, packed_row, i)};
    stored[r] = i < work.end_query;
    const auto joined = fold.join(r);
    const float row_max = consumer.softmax.rows[r].row_max, max_log2 = Folding::RowSoftmax::shift_of(row_max, consumer.scale_log2);
    const PartEnd end = end_lane_row<spec, typename Folding::RowSoftmax>(p, keys, max_log2, row_max, joined.sum, consumer.scale_log2,
                                                                         stored[r] ? to[r].i_head : 0, consumer.o, r);
    factor[r] = end.result.factor * to_descale_v * joined.correction;
    lse[r] = end.result.lse;
    again[r] = quad_reduce(stored[r] && (is_far || end.again) ? 1.f : 0.f, [](float a, float b) { return fmaxf(a, b); }) > 0.f;
  }
  fold.send(factor, again);
  typename Folding::Owned sum;
  fold.add(sum);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    again[r] = fold.is_again(r);
    const bool is_sum = stored[r] && !again[r];
    store_quads<Folding::columns / 2>(static_cast<float*>(p.o.data) + to[r].o(p) + fold.first_column(), sum, r, 1.f, is_sum);
    if constexpr (group == 0) {
      const bool tells = is_sum && fold.rank == 0 && threadIdx.x % 4 == 0;
      ptx::st_global_f32_if(to[r].lse(p), lse[r], tells);
    }
  }
  if constexpr (group == 0) {
    if (ptx::uniform(fold.rank) == 0) recompute_found(consumer, keys, again, o_batch, 0);
  }
}

// Stores O and LSE of a CTA's own rows.
template <FwdSpec spec, Sm90MlaTile tile, int group, class Keys>
FMHA_DEVICE void store_rows(Consumer<spec, tile, group>& consumer, const Keys& keys, float to_descale_v, bool is_far, int32_t o_batch,
                            int32_t o_row) {
  using RowSoftmax = typename Consumer<spec, tile, group>::RowSoftmax;
  constexpr FwdSpec half = half_of<spec, tile, group>();
  const FwdParams& p = consumer.p;
  const Work& work = consumer.work;
  Smem<spec, tile>& smem = consumer.smem;
  const int32_t quad_lane = threadIdx.x % 4;
  bool suspect[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t row = consumer.tile_row + 8 * r, packed_row = work.first_row + row, i = Work::query_of(p, packed_row);
    const int32_t i_head = work.head_of(p, packed_row, i);
    const bool stored = i < work.end_query;
    const float sum = smem.row_sum[0][row] + smem.row_sum[1][row], row_max = consumer.softmax.rows[r].row_max;
    const float max_log2 = RowSoftmax::shift_of(row_max, consumer.scale_log2);
    const PartEnd end = end_lane_row<spec, RowSoftmax>(p, keys, max_log2, row_max, sum, consumer.scale_log2,
                                                       stored ? i_head : 0, consumer.o, r);
    RowResult result = end.result;
    result.factor *= to_descale_v;
    suspect[r] = stored && (is_far || end.again);
    const OutputRow to = {o_batch, o_row + i, i_head};
    const int64_t at = to.o(p) + group * Plan<spec, tile>::columns_half;
    if constexpr (!tile.vector_store) {
      store_elements<half, false>(p.o.data, at, consumer.o, r, result.factor, stored);
    } else if constexpr (spec.dtype_o == DType::F32) {
      store_quads<half.head_dim_v>(static_cast<float*>(p.o.data) + at, consumer.o, r, result.factor, stored);
    } else {
      store_vectors<half, false>(static_cast<uint16_t*>(p.o.data) + at, consumer.o, r, result.factor, stored);
    }
    if constexpr (spec.write_lse && group == 0) ptx::st_global_f32_if(to.lse(p), result.lse, stored && quad_lane == 0);
  }

  // A recomputed row is written by warpgroup 0 with all columns, after both warpgroups have stored it.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    suspect[r] = quad_reduce(suspect[r] ? 1.f : 0.f, [](float a, float b) { return fmaxf(a, b); }) > 0.f;
    if (group == 1 && quad_lane == 0) smem.suspect[consumer.tile_row + 8 * r] = suspect[r];
  }
  ptx::bar_sync<kBothGroups>(kConsumers);
  if constexpr (group == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) suspect[r] = suspect[r] || smem.suspect[consumer.tile_row + 8 * r];
    recompute_found(consumer, keys, suspect, o_batch, o_row);
  }
}

// Ends a tile. `keys` says which keys rows see; over a list they are numbered by their places in the part.
template <FwdSpec spec, Sm90MlaTile tile, int group, class Keys>
FMHA_DEVICE void store(Consumer<spec, tile, group>& consumer, const Keys& keys) {
  constexpr bool in_parts = tile.split_keys > 0;
  const FwdParams& p = consumer.p;
  const Work& work = consumer.work;
  Smem<spec, tile>& smem = consumer.smem;
  const int32_t quad_lane = threadIdx.x % 4;
  // The parts of split keys are stored as batches of their own, one after another, also where sequences are packed. A
  // part of an equal share stores only the heads of its tile, and the first of these is at index 0.
  constexpr bool of_share = in_shares(tile);
  const int32_t o_batch = of_share   ? work.part
                          : in_parts ? work.part * p.batch + work.span.i_batch
                                     : work.span.storage_batch;
  const int32_t o_row = of_share ? -work.i_head_kv * p.gqa_ratio * p.seqlen_q : in_parts ? 0 : work.span.q_row;

  // A V inside an FP8 K was widened with K's descale. If V has another descale, O is multiplied by their quotient,
  // provided that they are close enough for 16-bit rounding; otherwise rows are recomputed.
  float to_descale_v = 1.f;
  bool is_far = false;
  if constexpr (is_fp8(tile.stored) && tile.v_in_k && tile.row_bytes == 0) {
    const float of_k = scalar_of(p.descale_k, work.span.i_batch, work.i_head_kv, 1.f);
    const float of_v = scalar_of(p.descale_v, work.span.i_batch, work.i_head_kv, 1.f);
    if (of_k != of_v) to_descale_v = of_v / of_k;
    is_far = !(to_descale_v >= 0.25f && to_descale_v <= 4.f);
  }

  float row_sum[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] = quad_reduce(consumer.softmax.rows[r].row_sum, [](float a, float b) { return a + b; });
    if (quad_lane == 0) smem.row_sum[group][consumer.tile_row + 8 * r] = row_sum[r];
  }
  ptx::bar_sync<kBothGroups>(kConsumers);
  if constexpr (tile.fold_parts > 1) {
    store_folded(consumer, keys, to_descale_v, is_far, o_batch);
  } else {
    store_rows(consumer, keys, to_descale_v, is_far, o_batch, o_row);
  }
}

}  // namespace fmha::mla
