// The scores of one block computed again from memory, by a warpgroup that has overwritten them with exponentials
// that overflowed f32, and whose K slot has been released. Rare (the row's maximum has to be 2^100 above the
// running one), so plain: fragments element by element.
#pragma once
#include <fmha/common/widen.cuh>
#include <fmha/ptx/fp8.cuh>
#include <fmha/ptx/matrix.cuh>
#include <fmha/seq.h>
#include <fmha/sm90/fwd/config.cuh>

namespace fmha::sm90 {

// Type in which scores are recomputed. 8-bit elements are converted to f16, which holds them exactly.
FMHA_DEVICE constexpr DType recompute_type(DType dtype) { return is_fp8(dtype) ? DType::F16 : dtype; }

// Loads two neighbouring elements of a row, packed; elements beyond `dim` are zeros. It has no branch
// (common/recompute_row.cuh says why).
template <DType dtype>
FMHA_DEVICE uint32_t load_pair(const View& x, int64_t row, int32_t column, int32_t dim) {
  constexpr int bits = 8 * size_bytes(dtype);
  const Storage<dtype>* data = static_cast<const Storage<dtype>*>(x.data) + row;
  const uint32_t low = data[min(column, dim - 1)], high = data[min(column + 1, dim - 1)];
  const uint32_t pair = (column < dim ? low : 0) | (column + 1 < dim ? high << bits : 0);
  if constexpr (dtype == DType::E4m3Fn) return ptx::cvt_rn_f16x2_e4m3x2(pair);
  if constexpr (dtype == DType::E5m2) return ptx::prmt(pair, 0, 0x1404);
  return pair;
}

// Loads two neighbouring elements of a key. Elements of an 8-bit cache are widened to Q's 16-bit type and multiplied by
// their descale.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE uint32_t load_key_pair(const View& x, int64_t row, int32_t column, float factor) {
  constexpr int32_t dim = spec.head_dim_qk;
  if constexpr (!widens_cache(spec, tile)) {
    return load_pair<spec.dtype_qk>(x, row, column, dim);
  } else {
    const uint8_t* data = static_cast<const uint8_t*>(x.data) + row;
    const uint32_t low = data[min(column, dim - 1)], high = data[min(column + 1, dim - 1)];
    const uint32_t pair = fmha::widen_pair<tile.stored, spec.dtype_qk, true>(low | high << 8, factor);
    return (column < dim ? pair & 0xffffu : 0) | (column + 1 < dim ? pair & 0xffff0000u : 0);
  }
}

// Rotates an array of registers: moves the first `count` elements behind the last.
template <int count, int n>
FMHA_DEVICE void rotate(mma::Accumulator<n>& s) {
  const mma::Accumulator<n> before = s;
#pragma unroll
  for (int e = 0; e < s.num_elems; ++e) s[e] = before[(e + count) % s.num_elems];
}

// Computes S of the thread's rows `row` and `row + 8`, in the accumulator's layout, which is that of mma.sync; all of
// the block's keys are the sequence's.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void recompute_scores(const FwdParams& p, const Work& work, int32_t row, int32_t block,
                             mma::Accumulator<tile.block_n>& s) {
  constexpr int32_t dim = spec.head_dim_qk;
  constexpr DType dtype = recompute_type(spec.dtype_qk);
  const int32_t column = mma::fragment_column();
  int64_t q_row[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t packed_row = row + 8 * r, query = query_of<tile>(p, packed_row);
    const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - query * p.gqa_ratio : work.i_head;
    // Rows beyond the sequence read the last row instead; their results are not stored.
    q_row[r] = row_offset(p.q, work.storage_batch, work.q_row + min(query, work.seqlen_q - 1), i_head);
  }
  const int32_t first_key = block * tile.block_n + threadIdx.x % 32 / 4;
  constexpr bool paged = spec.kv_layout == KvKind::Paged;
  const SeqSpan span = {work.i_batch, work.storage_batch, work.q_row, work.seqlen_q, work.k_row, work.seqlen_k};
  const auto row_of = [&](int32_t j) { return row_offset(p.k, kv_row(p, spec.kv_layout, span, j), work.i_head_kv); };
  const int64_t first_k_row = paged ? 0 : row_offset(p.k, work.storage_batch, work.k_row + first_key, work.i_head_kv);
  const float factor = widens_cache(spec, tile) ? scalar_of(p.descale_k, work.i_batch, work.i_head_kv, 1.f) : 1.f;
  s.clear();
  // A loop that is not unrolled cannot index registers: sixteen keys at a time are rotated to the front of S, and
  // are back in their place after each step.
#pragma unroll 1
  for (int32_t step = 0; step < ceil_div(dim, mma::kDepth<Storage<dtype>>); ++step) {
    const int32_t d = step * mma::kDepth<Storage<dtype>> + column;
    const uint32_t a[4] = {load_pair<spec.dtype_qk>(p.q, q_row[0], d, dim), load_pair<spec.dtype_qk>(p.q, q_row[1], d, dim),
                           load_pair<spec.dtype_qk>(p.q, q_row[0], d + 8, dim), load_pair<spec.dtype_qk>(p.q, q_row[1], d + 8, dim)};
    int64_t k_row = first_k_row;
#pragma unroll 1
    for (int32_t c = 0; c < tile.block_n / 16; ++c) {
      if constexpr (paged) k_row = row_of(first_key + 16 * c);
      const int64_t next = paged ? row_of(first_key + 16 * c + 8) : k_row + 8 * p.k.row;
      const auto key = [&](int64_t at, int32_t column) { return load_key_pair<spec, tile>(p.k, at, column, factor); };
      const uint32_t b[2][2] = {{key(k_row, d), key(k_row, d + 8)}, {key(next, d), key(next, d + 8)}};
      ptx::mma_m16n8k16<dtype>(&s.elems[0], a, b[0]);
      ptx::mma_m16n8k16<dtype>(&s.elems[4], a, b[1]);
      rotate<8>(s);
      k_row = next + 8 * p.k.row;
    }
  }
  if constexpr (spec.negative_scale) {
#pragma unroll
    for (int e = 0; e < s.num_elems; ++e) s[e] = -s[e];
  }
}

}  // namespace fmha::sm90
