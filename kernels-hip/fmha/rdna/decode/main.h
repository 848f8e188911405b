// The RDNA decode kernel: a workgroup has `block_m` rows, (query, head of a KV head's group) pairs, query by query,
// and one part of the keys of their sequence. Tiles go through LDS as the forward's do (tile_step.h); O and the
// statistics of the softmax go to the workspace, and a second launch merges the parts (cdna/decode/merge.h).
//
//   step n    barrier    K(n), V(n) to LDS    barrier    entry(n + 1) of the table    tile_step    places of n + 1 to LDS
//
// Rows of more than 256 elements: O of 16 rows does not fit a wave's registers beside Q, so each of four waves has a
// quarter of the columns, and the products are added through LDS (SharedColumns).
#pragma once
#include <fmha/cdna/decode/list.h>
#include <fmha/cdna/decode/pieces.h>
#include <fmha/cdna/decode/two_caches.h>
#include <fmha/rdna/decode/load.h>
#include <fmha/rdna/tile_step.h>
#include <fmha/isa/sync.h>

namespace fmha::rdna::decode {

using cdna::CdnaDecodeParams;

// Parameters are read again for each piece of work: kept from one to the next, they would fill the scalar registers.
FMHA_DEVICE const CdnaDecodeParams& again() { return reload_params<CdnaDecodeParams>(); }

struct Job : cdna::decode::Job {
  float scale;    // of raw scores
  bool has_tree;  // a tree mask, which is of the last keys, as many as there are queries

  // Word `i` of the query's row of the tree mask. All keys before
  // the mask's keys are visible; later keys are never requested.
  FMHA_DEVICE uint32_t tree_word(int32_t query, int32_t i) const {
    if (i < 0) return ~0u;
    if (i * 32 >= span.seqlen_q) return 0;
    const CdnaDecodeParams& params = again();
    const int64_t of_row = span.storage_batch * params.tree_mask_batch + span.q_row + query;
    return ((const uint32_t FMHA_GLOBAL*)params.tree_mask)[of_row * params.tree_mask_words + i];
  }

  // A bit for each of the 32 keys from `first_key` on: whether the tree mask shows it to the query.
  FMHA_DEVICE uint32_t in_tree(int32_t query, int32_t first_key) const {
    const int32_t bit = first_key - (span.seqlen_k - span.seqlen_q);
    const uint64_t words = uint64_t(tree_word(query, (bit >> 5) + 1)) << 32 | tree_word(query, bit >> 5);
    return uint32_t(words >> (bit & 31));
  }

  // Words of a mask with one bit per key, in the form that the softmax needs.
  FMHA_DEVICE bool has_words() const { return has_tree; }
  FMHA_DEVICE bool may_hide(Range keys) const { return has_tree && keys.end > span.seqlen_k - span.seqlen_q; }
  FMHA_DEVICE uint32_t shown_word(int32_t query, int32_t first_key) const { return in_tree(query, first_key); }

  FMHA_DEVICE bool sees(int32_t query, int32_t key) const {
    return key < span.seqlen_k && visible(band, query, key) && (!has_tree || in_tree(query, key) & 1);
  }
};

// A piece of work of a decode kernel over lists of keys.
struct ListJob : Job {
  uint32_t shown;  // a bit for each place of a tile: whether it names a key

  FMHA_DEVICE bool has_words() const { return shown != ~0u; }
  FMHA_DEVICE bool may_hide(Range) const { return shown != ~0u; }
  FMHA_DEVICE uint32_t shown_word(int32_t, int32_t) const { return shown; }
};

// `row_bytes`: of a key, where the cache has rows of bytes.
template <CdnaSpec spec, RdnaTile tile, bool scaled = false, int row_bytes = 0>
struct Lds : LdsOfScales<tile.block_n, scaled, row_bytes> {
  using C = Config<spec, tile>;
  typename C::Lds tiles;
  Places<tile.block_n> k_places, v_places;
  uint32_t shown;  // of a list's tile
  f32x4 sums[C::column_waves == 1 ? 1 : C::num_waves][C::n_blocks * 2][kWaveSize];  // of scores, over a wave's columns
};

// Adds the products of the waves that share columns: sums of two waves first, then those of both pairs,
// so that all four get equal bits. The barriers between tiles separate the next tile's sums from these.
template <CdnaSpec spec, RdnaTile tile, class Lds>
struct SharedColumns {
  using C = Config<spec, tile>;
  Lds& lds;

  FMHA_DEVICE void add_others(Scores<spec, tile>& s) const {
    if constexpr (C::column_waves == 1) return;
    static_assert(C::column_waves == 1 || C::column_waves == 4, "two pairs of waves");
    const int thread = opaque_thread_idx(), lane = thread % kWaveSize, i_wave = v_readfirstlane_b32(thread / kWaveSize);
#pragma unroll
    for (int n = 0; n < 2 * C::n_blocks; ++n) {
      const Acc& own = s[n / 2];
      const int i = n % 2 * 4;
      lds.sums[i_wave][n][lane] = f32x4{own[i], own[i + 1], own[i + 2], own[i + 3]};
    }
    s_barrier();
#pragma unroll
    for (int n = 0; n < 2 * C::n_blocks; ++n) {
      const f32x4 mate = lds.sums[i_wave ^ 1][n][lane], first = lds.sums[i_wave ^ 2][n][lane],
                  second = lds.sums[i_wave ^ 3][n][lane];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = n % 2 * 4 + i;
        s[n / 2][at] = (s[n / 2][at] + mate[i]) + (first[i] + second[i]);
      }
      sched_barrier();
    }
  }
};

template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE Wave<spec, tile> wave_of(const FwdParams& p, const Job& job) {
  using C = Config<spec, tile>;
  Wave<spec, tile> wave;
  const int thread = opaque_thread_idx();  // what follows of it is not kept from one sequence's keys to the next's
  const int32_t first = job.first_row + v_readfirstlane_b32(thread / kWaveSize) / C::column_waves * kEdge;
  const int32_t last = job.num_rows - 1;
  wave.queries = {min(first, last) / p.gqa_ratio, min(first + kEdge - 1, last) / p.gqa_ratio + 1};
  // Lanes beyond the last row compute that row too, and store nothing.
  const int32_t row = min(first + lane_col(thread), last);
  wave.query = row / p.gqa_ratio;
  wave.i_head = job.i_head_kv * p.gqa_ratio + row % p.gqa_ratio;
#pragma unroll
  for (int d = 0; d < C::d_blocks; ++d) wave.o[d] = Acc{};
  return wave;
}

// Whether the lane has a row of its own.
template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE bool is_a_row(const Job& job) {
  const int thread = opaque_thread_idx();
  const int i_rows = thread / kWaveSize / Config<spec, tile>::column_waves;
  return job.first_row + i_rows * kEdge + lane_col(thread) < job.num_rows;
}

// Row of the workspace where the lane's row of this part of the keys lies.
template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE int64_t row_of_parts(const FwdParams& p, const Wave<spec, tile>& wave, const Job& job) {
  return cdna::decode::row_of_part(p, job.part, wave.i_head, wave.query);
}

// The lane's first column in block `d` of O; the lane has eight adjacent columns.
template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE int32_t first_column(int d) {
  using C = Config<spec, tile>;
  return column_wave<C>() * C::wave_dim_v + d * kEdge + lane_half(opaque_thread_idx()) * kAccElems;
}

// Stores a part's O, divided by its own sum, and its statistics.
template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE void store(Wave<spec, tile>& wave, const Job& job) {
  using C = Config<spec, tile>;
  wave.row.row_sum += other_half(wave.row.row_sum);
  const float normaliser = wave.row.normaliser();
  const CdnaDecodeParams& params = again();
  const bool is_there = is_a_row<spec, tile>(job);
  const int64_t at = row_of_parts(params.call.fwd, wave, job);
  float FMHA_GLOBAL* const to = (float FMHA_GLOBAL*)params.o + at * spec.head_dim_v;
#pragma unroll
  for (int d = 0; d < C::d_blocks; ++d) {
    // All lanes must call it, since the halves of a wave exchange rows.
    const Array<float, kAccElems> x = rows_in_order(wave.o[d] * normaliser);
    const int32_t first = first_column<spec, tile>(d);
    if (!is_there || first >= params.call.head_dim_v) continue;
#pragma unroll
    for (int i = 0; i < kAccElems; i += 4) {
      *(f32x4 FMHA_GLOBAL*)(to + first + i) = f32x4{x[i], x[i + 1], x[i + 2], x[i + 3]};
    }
  }
  if (is_there && lane_half(opaque_thread_idx()) == 0 && column_wave<C>() == 0) {
    const float unscale = float_of(uint32_t(127 - p_scale_log2<spec, tile>(job)) << 23);
    float FMHA_GLOBAL* const stats = (float FMHA_GLOBAL*)params.stats + 2 * at;
    stats[0] = wave.row.row_max;
    stats[1] = wave.row.row_sum * unscale;
  }
}

// Adds the values that were written to LDS as 0, element by element; only inputs
// with NaN or infinity get here. A lane adds to elements that it has stored itself.
template <CdnaSpec spec, RdnaTile tile, DType stored, bool scaled>
FMHA_DEVICE void add_back_nonfinite(const Wave<spec, tile>& wave, const Job& job, int32_t first_key) {
  if (!is_a_row<spec, tile>(job)) return;
  const CdnaDecodeParams& params = again();
  const FwdParams& p = params.call.fwd;
  float* const to = params.o + row_of_parts(p, wave, job) * spec.head_dim_v;
  const float descale = scalar_of(p.descale_v, job.span.i_batch, job.i_head_kv, 1.f);
  const int32_t end = min(first_key + tile.block_n, job.span.seqlen_k);
#pragma nounroll
  for (int32_t key = first_key; key < end; ++key) {
    if (!job.sees(wave.query, key)) continue;
    const KvRow at = kv_row(p, job.layout, job.span, key);
    const int64_t from = row_offset(p.v, at, job.i_head_kv);
    const float factor = scaled ? cdna::decode::ScaledPlaces::factor<true>(at, job.i_head_kv) : descale;
#pragma nounroll
    for (int32_t i = 0; i < Config<spec, tile>::d_blocks * kAccElems; ++i) {
      const int32_t column = first_column<spec, tile>(i / kAccElems) + i % kAccElems;
      if (column >= params.call.head_dim_v) continue;
      float value = load_elem<stored>(p.v.data, from + column * p.v.dim);
      if constexpr (is_fp8(stored)) value = round_to<spec.dtype_v>(value * factor);
      if (value - value != 0.f) to[column] += value;
    }
  }
}

template <CdnaSpec spec, RdnaTile tile, DType stored, class KeyPlaces, int row_bytes = 0, class Piece, class Lds>
FMHA_DEVICE void compute(Piece& job, Lds& lds) {
  using C = Config<spec, tile>;
  constexpr bool scaled = __is_same(KeyPlaces, cdna::decode::ScaledPlaces);
  constexpr bool listed = !scaled && !__is_same(KeyPlaces, cdna::decode::SequencePlaces);
  using OfCache = CacheRows<spec.dtype_qk, stored, tile.block_n, listed, scaled>;
  static_assert(tile.block_n <= C::num_threads, "a key of a tile to each thread");
  const auto factors_of = [&](const HeadScalars& descale, bool of_v) __attribute__((always_inline)) {
    if constexpr (scaled) {
      return Factors<tile.block_n, true>{of_v ? lds.v_factors : lds.k_factors};
    } else {
      const float of_all = is_fp8(stored) ? scalar_of(descale, job.span.i_batch, job.i_head_kv, 1.f) : 1.f;
      return Factors<tile.block_n, false>{of_all};
    }
  };
  constexpr int bytes = size_bytes(stored);
  Wave<spec, tile> wave = wave_of<spec, tile>(again().call.fwd, job);
  const auto tiles = cdna::decode::PartTiles<tile.block_n>::of(job);
  uint32_t zeroed = 0;
  if (tiles.count > 0) {
    {
      const FwdParams& p = again().call.fwd;
      const int64_t at = query_offset(p, job.span, wave.query, wave.i_head);
      const Rows row = {static_cast<const uint8_t*>(p.q.data) + at * C::qk_bytes, 0, C::qk_bytes, 1, again().call.head_dim_qk};
      load_q<spec, tile>(wave.q, row, 0, lane_half(opaque_thread_idx()));
    }
    KeyPlaces places(again().call.fwd, job, tiles, opaque_thread_idx());
    const auto put = [&]() __attribute__((always_inline)) {
      const int at = opaque_thread_idx();
      const FwdParams& p = again().call.fwd;
      const KvRow row = places.row(p, job);
      const uint32_t shown = places.shown();
      if (at >= tile.block_n) return;
      const bool is_there = !listed || (shown >> at & 1);
      if constexpr (row_bytes > 0) {
        const BytesOfRow of_row = KeyPlaces::template bytes_of<row_bytes>(p, row);
        lds.k_places.put(at, is_there ? of_row.row - static_cast<const uint8_t*>(p.k.data) : kNoRow);
        lds.scales.put(at, of_row.scales);
      } else {
        lds.k_places.put(at, is_there ? KeyPlaces::template offset<false, bytes>(p, row, job.i_head_kv) : kNoRow);
        lds.v_places.put(at, is_there ? KeyPlaces::template offset<true, bytes>(p, row, job.i_head_kv) : kNoRow);
      }
      if constexpr (scaled) {
        lds.k_factors.put(at, KeyPlaces::template factor<false>(row, job.i_head_kv));
        lds.v_factors.put(at, KeyPlaces::template factor<true>(row, job.i_head_kv));
      }
      if (listed && at == 0) lds.shown = shown | ~bits_below(tile.block_n);
    };
    places.find(again().call.fwd, job, tiles, 0, opaque_thread_idx());
    put();
#pragma nounroll
    for (int32_t n = 0; n < tiles.count; ++n) {
      const int32_t first_key = tiles.first_key(n), num_keys = job.span.seqlen_k - first_key;
      const CdnaDecodeParams& params = again();
      const FwdParams& p = params.call.fwd;
      s_barrier();  // all waves have read the previous tile; this one's places are there
      if constexpr (listed) job.shown = v_readfirstlane_b32(lds.shown);
      if constexpr (row_bytes > 0) {
        using OfBytes = BytesRows<tile.block_n, row_bytes>;
        const uint8_t* const from = static_cast<const uint8_t*>(p.k.data);
        copy_k<spec, tile>(lds.tiles.k, OfBytes{from, lds.k_places, lds.scales, num_keys, params.call.head_dim_qk});
        const OfBytes of_v = {from, lds.k_places, lds.scales, num_keys, params.call.head_dim_v};
        copy_v<spec, tile>(lds.tiles.v, of_v, false);
      } else {
        copy_k<spec, tile>(lds.tiles.k, OfCache{
            static_cast<const uint8_t*>(p.k.data), lds.k_places, factors_of(p.descale_k, false), bytes, num_keys,
            params.call.head_dim_qk});
        zeroed |= copy_v<spec, tile>(lds.tiles.v, OfCache{
            static_cast<const uint8_t*>(p.v.data), lds.v_places, factors_of(p.descale_v, true), p.v.dim * bytes,
            num_keys, params.call.head_dim_v},
            // Rows that a list does not name are 0, and all rows of the tile see all others.
            !listed && !needs_no_mask<spec, tile>(job, job.queries, first_key));
      }
      s_barrier();  // all waves have copied the tile, and may read it
      // The last step computes the last tile's places again, without reading them.
      places.find(again().call.fwd, job, tiles, n + 1, opaque_thread_idx());
      tile_step<spec, tile>(wave, lds.tiles, again().call, job, first_key,
                            SharedColumns<spec, tile, Lds>{lds});
      // Keeps the products before the branch in `put`. After it,
      // all operands of V would stay live: 442 spills at D 256.
#pragma unroll
      for (int d = 0; d < C::d_blocks; ++d) opaque_in_vgpr(wave.o[d]);
      put();
    }
  }
  if constexpr (listed) {
    store<spec, tile>(wave, job);
    return;
  }
  // Every wave must learn whether any wave has zeroed values: each writes its own word.
  const bool wave_zeroed = v_cmp_ballot(zeroed != 0) != 0;
  if (lane_idx() == 0) lds.tiles.zeroed[thread_idx() / kWaveSize] = wave_zeroed;
  store<spec, tile>(wave, job);
  s_barrier();
  bool any = false;
#pragma unroll
  for (int w = 0; w < C::num_waves; ++w) any |= lds.tiles.zeroed[w] != 0;
  if (!v_readfirstlane_b32(any)) return;
#pragma nounroll
  for (int32_t n = 0; n < tiles.count; ++n) {
    const int32_t first_key = tiles.first_key(n);
    if (!needs_no_mask<spec, tile>(job, job.queries, first_key))
      add_back_nonfinite<spec, tile, stored, scaled>(wave, job, first_key);
  }
}

// `KeyPlaces`: SequencePlaces, or ScaledPlaces.
template <CdnaSpec spec, RdnaTile tile, DType stored, class KeyPlaces>
FMHA_DEVICE void run(const CdnaDecodeParams& params) {
  __shared__ Lds<spec, tile, __is_same(KeyPlaces, cdna::decode::ScaledPlaces)> lds;
  const FwdParams& p = params.call.fwd;
  Job job;
  job.scale = p.softmax_scale;
  job.scale_keys = params.scale_keys;
  job.has_tree = params.tree_mask != nullptr;
  const bool is_first_wave = v_readfirstlane_b32(thread_idx() / kWaveSize) == 0;
  cdna::decode::walk_piece<tile.block_m>(params, workgroup_idx(), is_first_wave, job, [&]() __attribute__((always_inline)) {
    compute<spec, tile, stored, KeyPlaces>(job, lds);
    s_barrier();  // all waves know whether any has zeroed values, before they say so of the next keys
  });
}

// `KeyPlaces`: those of lists, or of two caches.
template <CdnaSpec spec, RdnaTile tile, DType stored, class KeyPlaces, int row_bytes>
FMHA_DEVICE void run_listed(const CdnaDecodeParams& params) {
  static_assert(row_bytes == 0 || (!Config<spec, tile>::by_element && stored == DType::Bf16),
                "rows of bytes are read by pieces");
  __shared__ Lds<spec, tile, false, row_bytes> lds;
  ListJob job;
  job.scale = params.call.fwd.softmax_scale;
  job.scale_keys = params.scale_keys;
  job.has_tree = false;
  job.shown = ~0u;
  if (cdna::decode::list_job<tile.block_m, KeyPlaces>(params, workgroup_idx(), job)) {
    compute<spec, tile, stored, KeyPlaces, row_bytes>(job, lds);
  }
}

}  // namespace fmha::rdna::decode
