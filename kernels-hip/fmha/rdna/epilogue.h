// Conversion of a wave's sums to O and LSE.
#pragma once
#include <fmha/isa/sync.h>
#include <fmha/rdna/tile_step.h>

namespace fmha::rdna {

constexpr int kRun = 4;  // elements of O that are stored at once

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

// Stores O from registers: head_dim_v and every stride of O are multiples of a run.
template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE void store_runs(const Wave<spec, tile>& wave, const CdnaParams& p, const Job& job, float o_scale) {
  const bool is_inside = wave.query < job.span.seqlen_q;
  with_dtype_o<spec>(p, [&](auto dtype) __attribute__((always_inline)) {
    constexpr int bytes = size_bytes(dtype.value);
    uint8_t* const o = static_cast<uint8_t*>(p.fwd.o.data) + output_row(job.span, job.i_head, wave.query).o(p.fwd) * bytes;
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
      with_dtype_o<spec>(p, [&](auto dtype) __attribute__((always_inline)) {
        store_elem<dtype.value>(p.fwd.o.data, output_row(job.span, job.i_head, query).o(p.fwd) + dim, x);
      });
    }
    lds_in_order();
  }
}

template <CdnaSpec spec, RdnaTile tile>
FMHA_DEVICE void epilogue(Wave<spec, tile>& wave, typename Config<spec, tile>::Lds& lds, const CdnaParams& params,
                          const Job& job) {
  OnlineRow row = wave.row;
  row.row_sum += other_half(row.row_sum);
  const bool writes = wave.query < job.span.seqlen_q && lane_half() == 0;
  const float o_scale = end_of_row<spec>(params.fwd, job, row, p_scale_log2<spec, tile>(job), wave.query, writes);
  if constexpr (tile.store == StorePath::Vector) store_runs<spec, tile>(wave, params, job, o_scale);
  else store_elements<spec, tile>(wave, lds, params, job, o_scale);
}

}  // namespace fmha::rdna
