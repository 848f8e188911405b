// Writes O and LSE from a wave's sums, and adds values that were left out of the products because of a mask.
#pragma once
#include <fmha/cdna/output.h>
#include <fmha/isa/sync.h>
#include <fmha/rdna/tile_step.h>

namespace fmha::rdna {

constexpr int kRun = 4;  // elements of O that are stored at once

// Limits a number to FP8's range, beyond which the conversion would give NaN; a NaN stays NaN.
template <DType dtype>
FMHA_DEVICE float saturated(float x) {
  if constexpr (!is_fp8(dtype)) return x;
  const float most = dtype == DType::E4m3Fn ? 448.f : 57344.f;
  return x > most ? most : x < -most ? -most : x;
}

// Four adjacent elements of O, aligned to their size.
template <DType dtype>
FMHA_DEVICE void store_run(uint8_t* to, float a, float b, float c, float d) {
  if constexpr (dtype == DType::F32) {
    *reinterpret_cast<f32x4*>(to) = f32x4{a, b, c, d};
  } else if constexpr (dtype == DType::F16) {
    *reinterpret_cast<f16x4*>(to) = f16x4{f16(a), f16(b), f16(c), f16(d)};
  } else if constexpr (dtype == DType::Bf16) {
    using bf16x4 = Vec<bf16, 4>;
    *reinterpret_cast<bf16x4*>(to) = bf16x4{bf16(a), bf16(b), bf16(c), bf16(d)};
  } else {
#if defined(__gfx1201__)
    *reinterpret_cast<uint32_t*>(to) = fp8_word<dtype>(saturated<dtype>(a), saturated<dtype>(b), saturated<dtype>(c),
                                                       saturated<dtype>(d), bits_of(a));
#endif
  }
}

// Work of one workgroup.
struct Job {
  SeqSpan span;
  int32_t i_head, i_head_kv;
  MaskBand band;
  float scale;  // of raw scores: to natural ones where they are modified, else to log2
};

// Offset of the first element of a query in O.
FMHA_DEVICE int64_t first_of_o(const FwdParams& p, const Job& job, int32_t query) {
  return row_offset(p.o, job.span.storage_batch, int64_t(job.span.q_row) + query, job.i_head);
}

// Stores O from registers: head_dim_v and every stride of O are multiples of a run.
template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE void store_runs(const Wave<spec, tile>& wave, const CdnaParams& p, const Job& job, float o_scale) {
  const bool is_inside = wave.query < job.span.seqlen_q;
  cdna::with_dtype_o<spec>(p, [&](auto dtype) __attribute__((always_inline)) {
    constexpr int bytes = size_bytes(dtype.value);
    uint8_t* const o = static_cast<uint8_t*>(p.fwd.o.data) + first_of_o(p.fwd, job, wave.query) * bytes;
    const int first = lane_half() * kAccElems;
#pragma unroll
    for (int d = 0; d < Config<spec, tile>::d_blocks; ++d) {
      // All lanes: half waves exchange rows.
      const Array<float, kAccElems> x = rows_in_order(wave.o[d] * o_scale);
#pragma unroll
      for (int i = 0; i < kAccElems; i += kRun) {
        const int32_t dim = d * kEdge + first + i;
        if (is_inside && dim < p.head_dim_v)
          store_run<dtype.value>(o + dim * bytes, x[i], x[i + 1], x[i + 2], x[i + 3]);
      }
    }
  });
}

// Stores O to any address, element by element: each block of O goes through the wave's own LDS block, so that the
// code of a store is emitted once a block and not once a register.
template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE void store_elements(const Wave<spec, tile>& wave, typename Config<spec, tile>::Lds& lds,
                                const CdnaParams& p, const Job& job, float o_scale) {
  const int lane = lane_idx(), half = lane_half();
  float* const block = lds.o[v_readfirstlane_b32(thread_idx() / kWaveSize)];
  s_barrier();  // K and V have been read
#pragma unroll
  for (int d = 0; d < Config<spec, tile>::d_blocks; ++d) {
#pragma unroll
    for (int i = 0; i < kAccElems; ++i) block[lane_col() * kEdge + acc_row(i, half)] = wave.o[d][i] * o_scale;
    lds_in_order();
#pragma nounroll
    for (int id = lane; id < kEdge * kEdge; id += kWaveSize) {
      const int32_t query = wave.queries.begin + id / kEdge, dim = d * kEdge + id % kEdge;
      const float x = block[id];
      if (query >= job.span.seqlen_q || dim >= p.head_dim_v) continue;
      cdna::with_dtype_o<spec>(p, [&](auto dtype) __attribute__((always_inline)) {
        store_elem<dtype.value>(p.fwd.o.data, first_of_o(p.fwd, job, query) + dim, x);
      });
    }
    lds_in_order();
  }
}

template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE void epilogue(Wave<spec, tile>& wave, typename Config<spec, tile>::Lds& lds, const CdnaParams& params,
                          const Job& job) {
  const FwdParams& p = params.fwd;
  OnlineRow row = wave.row;
  row.row_sum += other_half(row.row_sum);
  // P was scaled: its scale is divided out of the sum here and out of the output below.
  const float unscale = float_of(uint32_t(127 - p_scale_log2<spec, tile>(job)) << 23);
  row.row_sum *= unscale;
  float o_scale = unscale;
  // Scores are natural if there is a modifier or a sink: times log2(e) either may overflow f32.
  const bool is_natural = spec.modifies || p.sink.data;
  if (is_natural && !spec.modifies) {
    row.row_max *= kLn2;
    opaque_in_vgpr(row.row_max);  // as one multiply-add with a difference it would leave half a last place of itself
  }
  if (p.sink.data) {
    const float sink = scalar_of(p.sink, job.span.i_batch, job.i_head, -infinity());
    const float before = row.row_max;
    row.row_max = v_max_f32(before, sink);
    const float base = finite_or_zero(row.row_max), seen = v_exp_f32((before - base) * kLog2E);
    row.row_sum = row.row_sum * seen + v_exp_f32((sink - base) * kLog2E);
    o_scale *= seen;
  }
  if (p.lse && wave.query < job.span.seqlen_q && lane_half() == 0) {
    const float natural = row.row_sum == 0.f ? -infinity() : row.row_max + log2_of(row.row_sum) * kLn2;
    p.lse[lse_offset(p, job.span, job.i_head, wave.query)] = is_natural ? natural : row.lse();
  }
  o_scale *= row.normaliser() * scalar_of(p.descale_v, job.span.i_batch, job.i_head_kv, 1.f);
  if constexpr (spec.dropout) o_scale *= p.dropout_scale;
  if (p.scale_o) o_scale *= *p.scale_o;
  if constexpr (tile.store == StorePath::Vector) store_runs<spec, tile>(wave, params, job, o_scale);
  else store_elements<spec, tile>(wave, lds, params, job, o_scale);
}

// Adds the values of V that were written to LDS as 0 to the queries that see their keys, after O is written,
// one element after another. Each lane has its own query's elements of one parity, which no other lane touches.
template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE void add_back_nonfinite(const Wave<spec, tile>& wave, const CdnaParams& params, const Job& job,
                                    int32_t first_key) {
  const FwdParams& p = params.fwd;
  if (wave.query >= job.span.seqlen_q) return;
  const float scale = scalar_of(p.descale_v, job.span.i_batch, job.i_head_kv, 1.f) * (p.scale_o ? *p.scale_o : 1.f);
  const int64_t o = first_of_o(p, job, wave.query);
  const int32_t end = min(first_key + tile.block_n, job.span.seqlen_k);
#pragma nounroll
  for (int32_t key = first_key; key < end; ++key) {
    if (!visible(job.band, wave.query, key)) continue;
    const auto product = [&] {
      return scaled_product<spec.dtype_qk, spec.dtype_qk>(p, KvKind::Packed, job.span, job.i_head, job.i_head_kv,
                                                          params.head_dim_qk, wave.query, key);
    };
    if constexpr (spec.masks) {
      const DataMasks masks = {reload_params<MaskedCdnaParams>().masks};
      if (!masks_show(masks, p, job.span, job.i_head, {wave.query, key}, product)) continue;
    } else if (!functions_show(p, job.span, job.i_head, {wave.query, key}, product)) {
      continue;
    }
    const int64_t v = row_offset(p.v, kv_row(p, KvKind::Packed, job.span, key), job.i_head_kv);
#pragma nounroll
    for (int32_t dim = lane_half(); dim < params.head_dim_v; dim += 2) {
      float value = load_elem<spec.dtype_v>(p.v.data, v + dim * p.v.dim);
      // The test precedes the scaling: for a difference of products the compiler would use an FMA, which yields the
      // rounding error.
      if (value - value == 0.f) continue;
      value *= scale;
      if constexpr (spec.dropout) {
        const int32_t batch_head = head_of_whole(p, job.span.i_batch, job.i_head);
        if (params.drops && !dropout_keeps(p, batch_head, wave.query, key)) value *= 0.f;
      }
      cdna::with_dtype_o<spec>(params, [&](auto dtype) __attribute__((always_inline)) {
        store_elem<dtype.value>(p.o.data, o + dim, load_elem<dtype.value>(p.o.data, o + dim) + value);
      });
    }
  }
}

}  // namespace fmha::rdna
