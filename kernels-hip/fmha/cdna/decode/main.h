// Decode: short queries over a long cache, each wave 32 rows and a part of the keys (config.h). Rows of more than 256
// elements are shared by the waves of a workgroup, whatever the number of queries.
//
//   step n    S^T = K(n) Q^T    K(n + 1) is issued    P(n) = exp2(S(n) - max)    O^T += V(n)^T P(n)^T    V(n + 1) is issued
//
// The matrix work of a step is a tenth of the time that its bytes take, so that registers hold one tile of K and one of
// V, and are filled again as soon as they have been read: loads of one of the two, or of both, are always in flight.
#pragma once
#include <fmha/cdna/decode/columns.h>
#include <fmha/cdna/decode/list.h>
#include <fmha/cdna/decode/load.h>
#include <fmha/cdna/decode/pieces.h>
#include <fmha/cdna/decode/two_caches.h>
#include <fmha/cdna/nonfinite.h>
#include <fmha/cdna/score.h>
#include <fmha/cdna/tile_step.h>
#include <fmha/online_softmax.h>

namespace fmha::cdna::decode {

template <CdnaDecodeSpec spec>
struct Wave {
  using C = Config<spec>;
  const Job& job;
  int32_t query, i_head;  // of the lane's row
  float descale_k, descale_v;
  Array<Frag, C::qk_steps> q;
  Array<Acc, C::columns> o;
  OnlineRow sums;  // row_max is natural; row_sum is of this lane's keys

  FMHA_DEVICE Wave(const FwdParams& p, const Job& job) : job(job) {
    // Lanes beyond the last row repeat that row, and store nothing.
    const int32_t row = min(job.first_row + lane_col(), job.num_rows - 1);
    query = row / p.gqa_ratio;
    i_head = job.i_head_kv * p.gqa_ratio + row % p.gqa_ratio;
    descale_k = scalar_of(p.descale_k, job.span.i_batch, job.i_head_kv, 1.f);
    descale_v = scalar_of(p.descale_v, job.span.i_batch, job.i_head_kv, 1.f);
  }

  // Scale of P, in log2. For bf16, whose V may reach f32's largest number, P is scaled below 1 by the number
  // of keys, so that no sum of P V overflows f32 unless O does. gfx90a's matrix unit reads subnormal f16 as 0.
  FMHA_DEVICE int p_scale_log2() const {
    if constexpr (spec.dtype == DType::Bf16) return job.scale_below_keys();
    return kArch == Arch::Gfx90a ? 12 : 0;
  }

  FMHA_DEVICE void load_q(const CdnaDecodeParams& params) {
    const FwdParams& p = params.call.fwd;
    const uint8_t* from = static_cast<const uint8_t*>(p.q.data) + query_offset(p, job.span, query, i_head) * 2;
    const int half = lane_half(), i_wave = column_wave<spec>();
#pragma unroll
    for (int s = 0; s < C::qk_steps; ++s) {
      const int first = first_elem<spec>(s, half, i_wave);
      q[s] = load_chunk<spec.load, 2, spec.ends_early>(from, first, params.call.head_dim_qk);
    }
  }

  // Whether a query sees a key by the sequence's length and the band.
  FMHA_DEVICE bool sees_in_band(int32_t key) const {
    return key < job.span.seqlen_k && visible(job.band, query, key);
  }

  // Whether the tree mask shows a key to the lane's row; it covers as many last keys as there are queries.
  FMHA_DEVICE bool sees_in_tree(const CdnaDecodeParams& params, int32_t key) const {
    const int32_t bit = key - (job.span.seqlen_k - job.span.seqlen_q);
    if (bit < 0 || bit >= job.span.seqlen_q) return bit < 0;
    const int64_t of_row = job.span.storage_batch * params.tree_mask_batch + job.span.q_row + query;
    return params.tree_mask[of_row * params.tree_mask_words + bit / 32] >> (bit % 32) & 1;
  }

  // Whether some row of the wave does not see some key of the tile.
  FMHA_DEVICE bool is_partly_masked(const CdnaDecodeParams& params, int32_t first_key) const {
    const Range keys = {first_key, first_key + kTileKeys};
    if (keys.end > job.span.seqlen_k) return true;
    if (params.tree_mask && keys.end > job.span.seqlen_k - job.span.seqlen_q) return true;
    return block_class(job.band, job.queries, keys) != BlockClass::Inside;
  }

  // Computes scores over the wave's columns. `latent`: the columns of K that came with V.
  template <class Latent>
  FMHA_DEVICE Acc scores(const KTile<spec>& k, const Latent& latent) const {
    Acc s = {};
#pragma unroll
    for (int c = 0; c < C::qk_steps; ++c) {
      const Frag frag = c < C::latent_steps ? latent.frag(c) : k.frag(c, spec.scaled ? k.factor : descale_k);
#pragma unroll
      for (int part = 0; part < Mma<spec.dtype>::parts; ++part) s = mma_part<spec.dtype>(frag, q[c], part, s);
    }
    return s;
  }

  // Converts raw scores to natural ones, -infinity for keys that the row does
  // not see. `shown`: a bit for each place of a list's tile that names a key.
  FMHA_DEVICE void modify_and_mask(Acc& s, const CdnaDecodeParams& params, int32_t first_key, bool is_partly_masked,
                                   uint32_t shown) const {
    const FwdParams& p = params.call.fwd;
    const int32_t first = first_key + acc_row(0, lane_half());
    if constexpr (spec.modifies) {
      const ScorePlace place = {job.span.i_batch, i_head, query, job.span.seqlen_q, job.span.seqlen_k};
      modify_block(s, params.call, place, p.softmax_scale, first);
    } else {
      s *= p.softmax_scale;
    }
    // The product is rounded separately: a multiply-add with
    // the maximum would keep a large score's rounding error.
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float rounded = s[i];
      opaque_in_vgpr(rounded);
      s[i] = rounded;
    }
    if (!is_partly_masked) return;
    if constexpr (spec.listed) {
      const uint32_t of_half = shown >> acc_row(0, lane_half());
#pragma unroll
      for (int i = 0; i < 16; ++i) s[i] = of_half >> acc_row(i, 0) & 1 ? s[i] : -infinity();
      return;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i] = sees_in_band(first + acc_row(i, 0)) ? s[i] : -infinity();
    if (!params.tree_mask) return;
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i] = sees_in_tree(params, first + acc_row(i, 0)) ? s[i] : -infinity();
  }

  // Raises the running maximum to a tile's; sums and O are rescaled only if it rose for some row.
  FMHA_DEVICE void raise_row_max(const Acc& s) {
    float most = -infinity();
#pragma unroll
    for (int i = 0; i < 16; i += 2) most = v_max3_f32(most, s[i], s[i + 1]);
    most = max_of_halves(most, -infinity());
    if (v_cmp_ballot(most > sums.row_max) == 0) return;
    const float before = sums.row_max;
    sums.row_max = v_max_f32(before, most);
    const float correction = v_exp_f32((before - finite_or_zero(sums.row_max)) * kLog2E);
    sums.row_sum *= correction;
#pragma unroll
    for (int n = 0; n < C::columns; ++n) o[n] *= correction;
  }

  FMHA_DEVICE Array<Frag, C::pv_steps> probabilities(Acc& s) {
    const float base = finite_or_zero(sums.row_max), scale_log2 = float(p_scale_log2());
    Array<Frag, C::pv_steps> frags;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      s[i] = v_exp_f32(v_fma_f32(s[i] - base, kLog2E, scale_log2));
      sums.row_sum += s[i];
    }
#pragma unroll
    for (int word = 0; word < 8; ++word) frags[word / 4][word % 4] = p_word<spec.dtype>(s, 2 * word, 0);
    return frags;
  }

  // O += V P. Returns true if V had a NaN or an infinity that some row does not see: it was replaced by 0, since 0
  // times NaN is NaN, and the value is added at the end to the rows that see it.
  FMHA_DEVICE bool add_values(const VTile<spec>& v, const Array<Frag, C::pv_steps>& p, bool is_partly_masked) {
    bool zeroed = false;
#pragma unroll
    for (int step = 0; step < C::pv_steps; ++step) {
      const auto factors = v.factors(step, descale_v);
      for_each<0, C::columns>([&](auto n) __attribute__((always_inline)) {
        Frag frag = v.template frag<n.value>(step, factors);
        if (is_partly_masked) {
          uint32_t found = 0;
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            found |= nonfinite_elems<spec.dtype>(frag[w]);
            frag[w] = without_nonfinite<spec.dtype>(frag[w]);
          }
          zeroed |= v_cmp_ballot(found != 0) != 0;
        }
#pragma unroll
        for (int part = 0; part < Mma<spec.dtype>::parts; ++part) {
          o[n.value] = mma_part<spec.dtype>(frag, p[step], part, o[n.value]);
        }
      });
    }
    return zeroed;
  }

  // Whether the lane has a row of its own. The value is opaque: results kept across the loop would need registers that
  // rows of 512 do not leave.
  FMHA_DEVICE bool is_a_row() const { return job.first_row + lane_col(opaque_thread_idx()) < job.num_rows; }

  FMHA_DEVICE int64_t row_of_parts(const FwdParams& p) const {
    int32_t query = this->query, i_head = this->i_head;
    opaque_in_vgpr(query), opaque_in_vgpr(i_head);
    return row_of_part(p, job.part, i_head, query);
  }

  // Stores the part's O, divided by its own sum, and its statistics.
  FMHA_DEVICE void store(const CdnaDecodeParams& params) {
    if (!is_a_row()) return;
    sums.row_sum += other_half(sums.row_sum);
    const float normaliser = sums.normaliser();
    const int half = lane_half(), i_wave = column_wave<spec>();
    const int64_t at = row_of_parts(params.call.fwd);
    float FMHA_GLOBAL* to = (float FMHA_GLOBAL*)params.o + at * spec.head_dim_v;
#pragma unroll
    for (int i = 0; i < 16; i += kRun) {
      const int32_t first = i_wave * C::wave_columns + acc_row(i, half) * C::columns;
      if (first >= params.call.head_dim_v) continue;
#pragma unroll
      for (int r = 0; r < kRun; ++r) {
#pragma unroll
        for (int n = 0; n < C::columns; ++n) to[first + r * C::columns + n] = o[n][i + r] * normaliser;
      }
    }
    if (half == 0 && i_wave == 0) {
      const float unscale = float_of(uint32_t(127 - p_scale_log2()) << 23);
      float FMHA_GLOBAL* stats = (float FMHA_GLOBAL*)params.stats + 2 * at;
      stats[0] = sums.row_max;
      stats[1] = sums.row_sum * unscale;
    }
  }

  // Adds the values that add_values replaced by 0, element by element; only inputs
  // with NaN or infinity get here. A lane adds to elements that it has stored itself.
  FMHA_DEVICE void add_back_nonfinite(const CdnaDecodeParams& params, int32_t first_key) const {
    if (!is_a_row()) return;
    const FwdParams& p = params.call.fwd;
    float* const to = params.o + row_of_parts(p) * spec.head_dim_v;
    const int32_t end = min(first_key + kTileKeys, job.span.seqlen_k);
#pragma nounroll
    for (int32_t key = first_key; key < end; ++key) {
      if (!sees_in_band(key) || (params.tree_mask && !sees_in_tree(params, key))) continue;
      const KvRow at = kv_row(p, job.layout, job.span, key);
      const int64_t from = row_offset(p.v, at, job.i_head_kv);
      const float factor = spec.scaled ? ScaledPlaces::factor<true>(at, job.i_head_kv) : descale_v;
#pragma nounroll
      for (int32_t i = 0; i < 16 * C::columns; ++i) {
        const int32_t d = column_wave<spec>() * C::wave_columns + acc_row(i / C::columns, lane_half()) * C::columns +
                          i % C::columns;
        if (d >= params.call.head_dim_v) continue;
        float value = load_elem<spec.stored>(p.v.data, from + d * p.v.dim);
        if constexpr (is_fp8(spec.stored)) value = round_to<spec.dtype>(value * factor);
        if (value - value != 0.f) to[d] += value;
      }
    }
  }
};

// Parameters are read again for each work item: kept from one to the next, they would fill the scalar registers.
FMHA_DEVICE const CdnaDecodeParams& again() { return reload_params<CdnaDecodeParams>(); }

// Type that finds the keys of a kernel: of a sequence, of a list, or of two caches.
template <CdnaDecodeSpec spec>
using RunsOf = typename Choose<spec.scaled, ScaledPlaces, SequencePlaces>::type;
template <CdnaDecodeSpec spec>
using PlacesOf = typename Choose<spec.two_caches, TwoPlaces,
                                 typename Choose<spec.listed, ListPlaces, RunsOf<spec>>::type>::type;

// Runs the kernel. `columns`: how waves that share columns exchange sums (columns.h).
template <CdnaDecodeSpec spec, class Columns>
FMHA_DEVICE void compute(const Job& job, Columns columns) {
  using C = Config<spec>;
  Wave<spec> wave{again().call.fwd, job};
#pragma unroll
  for (int n = 0; n < C::columns; ++n) wave.o[n] = Acc{};
  const Tiles tiles = Tiles::of(job);
  bool zeroed = false;
  if (tiles.count > 0) {
    wave.load_q(again());
    KTile<spec> k;
    VTile<spec> v;
    using Places = PlacesOf<spec>;
    Places places(again().call.fwd, job, tiles, lane_col());
    places.find(again().call.fwd, job, tiles, 0, lane_col());
    KvRow at = places.row(again().call.fwd, job);
    k.template issue<Places>(again(), job, at);
    places.find(again().call.fwd, job, tiles, 1, lane_col());
    v.template issue<Places>(again(), job, at);
#pragma nounroll
    for (int32_t n = 0; n < tiles.count; ++n) {
      const int32_t first_key = tiles.first_key(n);
      const uint32_t shown = places.shown();
      const bool is_partly_masked = spec.listed ? shown != ~0u : wave.is_partly_masked(again(), first_key);
      v.widen();
      columns.put_latent(v);
      Acc s = wave.scores(k, columns);
      sched_barrier();
      // The last step loads the last tile once more, here and below, unread: behind a branch the compiler does not
      // know how many loads are younger than a tile's, and waits for them too, K(n + 1) before V(n) is used and V(n)
      // before K(n).
      at = places.row(again().call.fwd, job);
      k.template issue<Places>(again(), job, at);
      places.find(again().call.fwd, job, tiles, n + 2, lane_col());
      sched_barrier();
      columns.add_others(s);
      wave.modify_and_mask(s, again(), first_key, is_partly_masked, shown);
      wave.raise_row_max(s);
      const auto probabilities = wave.probabilities(s);
      // All rows of a tile have one list, so absent keys are 0 for each of them.
      if (spec.listed && is_partly_masked) v.keep(shown);
      zeroed |= wave.add_values(v, probabilities, is_partly_masked && !spec.listed);
      sched_barrier();
      v.template issue<Places>(again(), job, at);
    }
  }
  wave.store(again());
  if (spec.listed || !zeroed) return;
#pragma nounroll
  for (int32_t n = 0; n < tiles.count; ++n) {
    const int32_t first_key = tiles.first_key(n);
    if (wave.is_partly_masked(again(), first_key)) wave.add_back_nonfinite(again(), first_key);
  }
}

// Number of the work item of this workgroup, or of this wave in it; -1 after the last.
template <CdnaDecodeSpec spec>
FMHA_DEVICE int32_t work_of(const CdnaDecodeParams& params) {
  int32_t at = workgroup_idx() * params.waves_of_group + v_readfirstlane_b32(thread_idx() / kWaveSize);
  if constexpr (Config<spec>::column_waves > 1) {
    // The hardware assigns workgroups to dies round-robin. Workgroups with the same keys and other rows are put on one
    // die, whose L2 then has the keys.
    const int32_t num_xcds = params.num_xcds, turn = workgroup_idx() / num_xcds;
    const int32_t keys = turn / params.row_blocks * num_xcds + workgroup_idx() % num_xcds;
    at = keys * params.row_blocks + turn % params.row_blocks;
  }
  return at < params.num_waves ? at : -1;
}

template <CdnaDecodeSpec spec, class Compute>
FMHA_DEVICE void walk(const CdnaDecodeParams& params, int32_t at, bool leaves, Job& job, Compute compute) {
  if constexpr (!spec.listed) {
    walk_piece<kEdge>(params, at, leaves, job, compute);
  } else if (list_job<kEdge, PlacesOf<spec>>(params, at, job)) {
    compute();
  }
}

template <CdnaDecodeSpec spec>
FMHA_DEVICE void run(const CdnaDecodeParams& params) {
  const int32_t at = work_of<spec>(params);
  if (at < 0) return;
  Job job;
  job.scale_keys = params.scale_keys;
  if constexpr (Config<spec>::column_waves == 1) {
    walk<spec>(params, at, true, job, [&]() __attribute__((always_inline)) { compute<spec>(job, AllColumns{}); });
  } else {
    __shared__ typename SharedColumns<spec>::Lds lds;
    const bool is_first_wave = column_wave<spec>() == 0;
    walk<spec>(params, at, is_first_wave, job, [&]() __attribute__((always_inline)) {
      compute<spec>(job, SharedColumns<spec>(lds));
    });
  }
}

}  // namespace fmha::cdna::decode
