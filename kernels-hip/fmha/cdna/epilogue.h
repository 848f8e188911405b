// Conversion of a wave's sums to O and LSE.
#pragma once
#include <fmha/cdna/output.h>
#include <fmha/cdna/tile_step.h>
#include <fmha/isa/sync.h>

namespace fmha::cdna {

// Limits a number to FP8's range, beyond which the conversion would give NaN; a NaN stays NaN.
template <DType dtype>
FMHA_DEVICE float saturated(float x) {
  if constexpr (!is_fp8(dtype)) return x;
  const float most = dtype == DType::E4m3Fn ? 448.f : dtype == DType::E4m3Fnuz ? 240.f : 57344.f;
  return x > most ? most : x < -most ? -most : x;
}

// Stores four adjacent elements of O to an address that is a multiple of their size.
template <DType dtype>
FMHA_DEVICE void store_run_of_o(uint8_t* to, float a, float b, float c, float d) {
  const u32x4 run = pack_run<dtype>(saturated<dtype>(a), saturated<dtype>(b), saturated<dtype>(c), saturated<dtype>(d));
  if constexpr (size_bytes(dtype) == 4) *reinterpret_cast<u32x4*>(to) = run;
  if constexpr (size_bytes(dtype) == 2) *reinterpret_cast<u32x2*>(to) = u32x2{run[0], run[1]};
  if constexpr (size_bytes(dtype) == 1) *reinterpret_cast<uint32_t*>(to) = run[0];
}

template <DType dtype>
FMHA_DEVICE void store_elem_of_o(uint8_t* to, float x) {
  const uint32_t word = pack_run<dtype>(saturated<dtype>(x), 0.f, 0.f, 0.f)[0];
  if constexpr (size_bytes(dtype) == 4) *reinterpret_cast<uint32_t*>(to) = word;
  if constexpr (size_bytes(dtype) == 2) *reinterpret_cast<uint16_t*>(to) = uint16_t(word);
  if constexpr (size_bytes(dtype) == 1) *to = uint8_t(word);
}

// Offset of the first element of this lane's query in O.
FMHA_DEVICE int64_t first_of_o(const FwdParams& p, const Job& job, int32_t query) {
  return row_offset(p.o, job.span.storage_batch, int64_t(job.span.q_row) + query, job.i_head);
}

// Stores from the registers: head_dim_v and every stride of O are multiples of a run.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void store_runs(const Wave<spec, tile>& wave, const CdnaParams& p, const Job& job, float o_scale) {
  if (wave.query >= job.span.seqlen_q) return;
  with_dtype_o<spec>(p, [&](auto dtype) __attribute__((always_inline)) {
    constexpr int bytes = size_bytes(dtype.value);
    const int half = lane_half(opaque_thread_idx());
    uint8_t* o = static_cast<uint8_t*>(p.fwd.o.data) + first_of_o(p.fwd, job, wave.query) * bytes;
#pragma unroll
    for (int d = 0; d < Config<spec, tile>::d_blocks; ++d) {
#pragma unroll
      for (int i = 0; i < 16; i += kRun) {
        const int32_t dim = d * kEdge + acc_row(i, half);
        if (dim >= p.head_dim_v) continue;
        const Acc& acc = wave.o[d];
        store_run_of_o<dtype.value>(o + dim * bytes, acc[i] * o_scale, acc[i + 1] * o_scale, acc[i + 2] * o_scale,
                                    acc[i + 3] * o_scale);
      }
    }
  });
}

// Stores to any address, element by element: each block of O goes through the wave's own LDS block, so that the code
// of a store is emitted once per block and not once per register.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void store_elements(const Wave<spec, tile>& wave, typename Config<spec, tile>::Lds& lds,
                                const CdnaParams& p, const Job& job, float o_scale) {
  const int thread = opaque_thread_idx(), lane = thread % kWaveSize, col = lane_col(thread), half = lane_half(thread);
  float* const block = lds.o[v_readfirstlane_b32(thread / kWaveSize)];
  s_barrier();  // K and V have been read
#pragma unroll
  for (int d = 0; d < Config<spec, tile>::d_blocks; ++d) {
#pragma unroll
    for (int i = 0; i < 16; ++i) block[col * kEdge + acc_row(i, half)] = wave.o[d][i] * o_scale;
    lds_in_order();
#pragma nounroll
    for (int id = lane; id < kEdge * kEdge; id += kWaveSize) {
      const int32_t query = wave.first_query + id / kEdge, dim = d * kEdge + id % kEdge;
      if (query >= job.span.seqlen_q || dim >= p.head_dim_v) continue;
      const float x = block[id];
      with_dtype_o<spec>(p, [&](auto dtype) __attribute__((always_inline)) {
        uint8_t* const o = static_cast<uint8_t*>(p.fwd.o.data);
        store_elem_of_o<dtype.value>(o + (first_of_o(p.fwd, job, query) + dim) * size_bytes(dtype.value), x);
      });
    }
    lds_in_order();
  }
}

template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE void epilogue(Wave<spec, tile>& wave, typename Config<spec, tile>::Lds& lds, const CdnaParams& params,
                          const Job& job) {
  const FwdParams& p = params.fwd;
  OnlineRow row = wave.row;
  row.row_sum += wave.odd_key_sum;
  row.row_sum += other_half(row.row_sum);
  // The scale of P is divided out of the sum here and out of the output below.
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

}  // namespace fmha::cdna
