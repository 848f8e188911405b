// From a wave's sums to O and LSE.
#pragma once
#include <fmha/cdna/tile_step.h>

namespace fmha::cdna {

// Beyond FP8's range the conversion would give NaN; a NaN stays one.
template <DType dtype>
FMHA_DEVICE float saturated(float x) {
  if constexpr (!is_fp8(dtype)) return x;
  const float most = dtype == DType::E4m3Fn ? 448.f : dtype == DType::E4m3Fnuz ? 240.f : 57344.f;
  return x > most ? most : x < -most ? -most : x;
}

// Four adjacent elements of O.
template <FwdSpec spec, StorePath path>
FMHA_DEVICE void store_run_of_o(uint8_t* row, int32_t dim, float a, float b, float c, float d) {
  constexpr int bytes = size_bytes(spec.dtype_o);
  const u32x4 run = pack_run<spec.dtype_o>(saturated<spec.dtype_o>(a), saturated<spec.dtype_o>(b),
                                           saturated<spec.dtype_o>(c), saturated<spec.dtype_o>(d));
  uint8_t* to = row + dim * bytes;
  if constexpr (path == StorePath::Vector) {
    if constexpr (bytes == 4) *reinterpret_cast<u32x4*>(to) = run;
    if constexpr (bytes == 2) *reinterpret_cast<u32x2*>(to) = u32x2{run[0], run[1]};
    if constexpr (bytes == 1) *reinterpret_cast<uint32_t*>(to) = run[0];
  } else {
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      if (dim + e >= spec.head_dim_v) break;
      const uint32_t word = run[e * bytes / 4] >> (e * bytes % 4 * 8);
      if constexpr (bytes == 4) reinterpret_cast<uint32_t*>(to)[e] = word;
      if constexpr (bytes == 2) reinterpret_cast<uint16_t*>(to)[e] = uint16_t(word);
      if constexpr (bytes == 1) to[e] = uint8_t(word);
    }
  }
}

template <FwdSpec spec, CdnaTile tile>
FMHA_DEVICE void epilogue(Wave<spec, tile>& wave, const FwdParams& p, const Job& job) {
  using C = Config<spec, tile>;
  OnlineRow row = wave.row;
  row.row_sum += wave.other_sum;
  row.row_sum += other_half(row.row_sum);
  // P's own scale leaves the sum here and the output below.
  constexpr float unscale = 1.f / (1 << int(C::p_scale_log2));
  row.row_sum *= unscale;
  float o_scale = unscale;
  if constexpr (spec.sink) {
    const float sink_log2 = kLog2E * scalar_of(p.sink, job.span.i_batch, job.i_head, -infinity());
    o_scale *= row.raise_to(v_max_f32(row.row_max, sink_log2));
    row.row_sum += v_exp_f32(sink_log2 - finite_or_zero(row.row_max));
  }
  if (wave.query >= job.span.seqlen_q) return;

  if (spec.write_lse && lane_half() == 0) {
    p.lse[lse_offset(p, job.span, job.i_head, wave.query)] = row.lse();
  }

  o_scale *= row.normaliser() * scalar_of(p.descale_v, job.span.i_batch, job.i_head_kv, 1.f);
  if constexpr (spec.dropout) o_scale *= p.dropout_scale;
  if (is_fp8(spec.dtype_o) && p.scale_o) o_scale *= *p.scale_o;
  const int64_t first = row_offset(p.o, job.span.storage_batch, int64_t(job.span.q_row) + wave.query, job.i_head);
  uint8_t* o = static_cast<uint8_t*>(p.o.data) + first * size_bytes(spec.dtype_o);
  const int half = lane_half(thread_idx_here());
#pragma unroll
  for (int d = 0; d < C::d_blocks; ++d) {
#pragma unroll
    for (int i = 0; i < 16; i += kRun) {
      const int32_t dim = d * kEdge + acc_row(i, half);
      if (C::head_dim_v_padded != spec.head_dim_v && dim >= spec.head_dim_v) continue;
      const Acc& acc = wave.o[d];
      store_run_of_o<spec, tile.store>(o, dim, acc[i] * o_scale, acc[i + 1] * o_scale, acc[i + 2] * o_scale,
                                       acc[i + 3] * o_scale);
    }
  }
}

}  // namespace fmha::cdna
