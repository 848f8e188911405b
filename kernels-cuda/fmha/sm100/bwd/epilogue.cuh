// Stores dV and dK of the CTA's keys, scaled, from tensor memory to memory. Each compute warpgroup stores one gradient,
// a thread a key; in a CTA that has only one gradient, each stores half of its columns.
#pragma once
#include <fmha/ptx/barrier.cuh>
#include <fmha/ptx/tcgen05.cuh>
#include <fmha/ptx/tmem.cuh>
#include <fmha/ptx/warp.cuh>
#include <fmha/simt/bwd.h>
#include <fmha/sm100/bwd/work.cuh>
#include <fmha/sm100/common/store_columns.cuh>

namespace fmha::sm100::bwd {

// Stores columns [first, end) of a row of a gradient of `dim` columns, whose sums are at `sums` in tensor memory, or
// zeros where no query has added. A whole warp calls it. Returns whether all values are finite.
template <BwdSpec spec, Sm100BwdTile tile, int dim, int first = 0, int end = product_dim(dim)>
FMHA_DEVICE bool store_gradient(const View& view, int64_t at, uint32_t sums, bool has_sums, float factor, bool there) {
  constexpr int chunk = 32;
  float zero = 0.f;  // NaN once a number is not finite
#pragma unroll
  for (int c = first; c < end; c += chunk) {
    float x[chunk] = {};
    if (has_sums) {
      uint32_t words[chunk];
      ptx::tcgen05_ld(words, sums + c);
      ptx::tcgen05_wait_ld();
      ptx::tcgen05_loaded(words);
#pragma unroll
      for (int e = 0; e < chunk; ++e) {
        x[e] = float_of(words[e]) * factor;
        zero = fmaf(x[e], 0.f, zero);
      }
    }
    store_columns<spec.dtype_grad, tile.vector_store>(view.data, at + c, x, dim - c, there);
  }
  return zero == 0.f;
}

// Stores half of a gradient's columns.
template <BwdSpec spec, Sm100BwdTile tile, int dim>
FMHA_DEVICE bool store_half(const View& view, int64_t at, uint32_t sums, bool has_sums, float factor, bool there,
                            int32_t half) {
  constexpr int middle = round_up(product_dim(dim) / 2, 32);
  if (half == 0) return store_gradient<spec, tile, dim, 0, middle>(view, at, sums, has_sums, factor, there);
  return store_gradient<spec, tile, dim, middle>(view, at, sums, has_sums, factor, there);
}

// Stores a tile's dK or dV. Rows that a NaN or infinity behind the mask has reached are recomputed, pair by pair, under
// `masks` beside the band.
template <BwdSpec spec, Sm100BwdTile tile, Part part, class Masks>
FMHA_DEVICE void store_keys(const BwdParams& p, Smem<spec, tile, part>& smem, uint32_t tmem, const Work& work,
                            int32_t half, const Masks& masks) {
  using Tmem = TmemPlan<spec, part>;
  const int32_t row = threadIdx.x % kBlock, key = work.keys.begin + row, warp = row / 32;
  const bool there = key < work.keys.end, has_sums = work.num_steps > 0;
  if (has_sums) {
    ptx::mbarrier_wait_parity(smem.grads_full, 0);
    ptx::tcgen05_fence_after_thread_sync();
  }
  const auto place = [&](const View& view) {
    return row_offset(view, kv_row(p.fwd, spec.fwd.kv_layout, work.span, there ? key : work.keys.begin), work.i_head_kv);
  };
  const float scale = p.fwd.softmax_scale;
  bool finite;
  if constexpr (part == Part::Dv) {
    finite = store_half<spec, tile, spec.fwd.head_dim_v>(p.dv, place(p.dv), tmem + Tmem::dv, has_sums, 1.f, there,
                                                         half);
  } else if constexpr (part == Part::DkDq) {
    finite = store_half<spec, tile, spec.fwd.head_dim_qk>(p.dk, place(p.dk), tmem + Tmem::dk, has_sums, scale, there,
                                                          half);
  } else if (half == 0) {
    finite = store_gradient<spec, tile, spec.fwd.head_dim_v>(p.dv, place(p.dv), tmem + Tmem::dv, has_sums, 1.f, there);
  } else {
    finite = store_gradient<spec, tile, spec.fwd.head_dim_qk>(p.dk, place(p.dk), tmem + Tmem::dk, has_sums, scale,
                                                              there);
  }
  ptx::tcgen05_fence_before_thread_sync();
  __syncwarp();
  ptx::mbarrier_arrive_if(smem.done, threadIdx.x % 32 == 0);
  if constexpr (spec.fwd.mask != MaskKind::Full) {
    const uint32_t found = __ballot_sync(ptx::kAllLanes, there && !finite);
    if (threadIdx.x % 32 == 0) smem.found[half][warp] = found;
    ptx::bar_sync<32 * kComputeWarps>(kComputeBarrier);
    // Rows with a NaN or an infinity are recomputed by the warps that store dV, or the first columns: they recompute
    // both gradients, or the one that the CTA has.
    constexpr KeyRow made = part == Part::All ? KeyRow::Both : part == Part::Dv ? KeyRow::Dv : KeyRow::Dk;
    uint32_t rows = half == 0 ? smem.found[0][warp] | smem.found[1][warp] : 0;
#pragma unroll 1
    for (; rows != 0; rows &= rows - 1)
      bwd_key_row<spec, simt::Warp, false, AllQueries, Masks, made>(
          p, work.span, work.i_head_kv, work.keys.begin + 32 * warp + __ffs(rows) - 1, AllQueries{}, masks);
  }
}

}  // namespace fmha::sm100::bwd
