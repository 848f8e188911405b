// O and LSE of a finished tile, from registers to memory.
#pragma once
#include <fmha/common/output_row.cuh>
#include <fmha/common/recompute_row.cuh>
#include <fmha/sm90/common/fragment.cuh>
#include <fmha/sm90/fwd/config.cuh>
#include <fmha/sm90/fwd/softmax.cuh>

namespace fmha::sm90 {

// Computes those of a warp's 16 rows again that any lane suspects. `row` is the thread's first in its tile. The rows have
// been stored, as they were, before the warp's last synchronisation.
template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void recompute_rows(const FwdParams& p, const Work& work, int32_t row, const bool (&suspect)[2]) {
  const int32_t first_row = row - threadIdx.x % 32 / 4;
  const SeqSpan span = {work.i_batch, work.storage_batch, work.q_row, work.seqlen_q, work.k_row, work.seqlen_k};
  const uint32_t lanes[2] = {ptx::vote_ballot(suspect[0]), ptx::vote_ballot(suspect[1])};
#pragma unroll 1
  for (int32_t within = 0; within < 16; ++within) {
    const uint32_t quad = (within < 8 ? lanes[0] : lanes[1]) >> within % 8 * 4 & 15;
    if (!ptx::uniform(quad)) continue;
    const int32_t packed_row = ptx::uniform(first_row + within);
    const int32_t i = query_of<tile>(p, packed_row);
    const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
    RecomputedRow<spec> recomputed{p, span, i_head, i};
    recomputed.run();
  }
}

// A thread's elements of row r of sixteen columns of O, from element `first` on: of a V that was turned, four neighbouring
// dimensions; else the first two and two of the next 8-column group.
template <bool turned, int n>
FMHA_DEVICE void four_of(const mma::Accumulator<n>& o, int first, int r, float factor, float (&x)[4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int group = turned ? k % 2 : k / 2, within = turned ? k / 2 : k % 2;
    x[k] = o[first + 4 * group + 2 * r + within] * factor;
  }
}

// A row's part, 16 bytes at a time, of 16-bit elements. `out` is where the row begins.
template <FwdSpec spec, bool turned, int n>
FMHA_DEVICE void store_vectors(uint16_t* out, const mma::Accumulator<n>& o, int r, float factor, bool stored) {
  const int32_t quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < n / 8; c += 4) {
    uint32_t words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[4];
      four_of<turned>(o, 4 * c + 8 * half, r, factor, x);
      words[2 * half] = ptx::cvt_rn_x2<spec.dtype_o>(x[0], x[1]);
      words[2 * half + 1] = ptx::cvt_rn_x2<spec.dtype_o>(x[2], x[3]);
    }
    int32_t column;
    if constexpr (turned) {
      // Of two sixteens the even lanes take the first and the odd ones the second, each from its neighbour.
      const bool odd = quad_lane & 1;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t received = ptx::shfl_xor(odd ? words[k] : words[2 + k], 1);
        (odd ? words[k] : words[2 + k]) = received;
      }
      column = 8 * c + (odd ? 16 : 0) + 4 * (quad_lane & 2);
    } else {
      quad_transpose(words);
      column = 8 * (c + quad_lane);
    }
    ptx::st_global_v4_b32_if(out + column, words, stored && column < spec.head_dim_v);
  }
}

// A row's part of FP8 elements, four or two bytes at a time.
template <FwdSpec spec, bool turned, int n>
FMHA_DEVICE void store_bytes(uint8_t* out, const mma::Accumulator<n>& o, int r, float factor, bool stored) {
  const int32_t quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int first = 0; first < o.num_elems; first += 8) {
    float x[4];
    four_of<turned>(o, first, r, factor, x);
    const uint32_t word = ptx::cvt_rn_satfinite_x4<spec.dtype_o>(x[0], x[1], x[2], x[3]);
    const bool inside = stored && 2 * first < spec.head_dim_v;  // which is whole sixteens
    if constexpr (turned) {
      ptx::st_global_b32_if(out + 2 * first + 4 * quad_lane, word, inside);
    } else {
      uint8_t* pair = out + 2 * first + 2 * quad_lane;
      ptx::st_global_u16_if(reinterpret_cast<uint16_t*>(pair), uint16_t(word), inside);
      ptx::st_global_u16_if(reinterpret_cast<uint16_t*>(pair + 8), uint16_t(word >> 16), inside);
    }
  }
}

// The same element by element, of any type.
template <FwdSpec spec, bool turned, int n>
FMHA_DEVICE void store_elements(void* data, int64_t at, const mma::Accumulator<n>& o, int r, float factor, bool stored) {
  const int32_t quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int first = 0; first < o.num_elems; first += 8) {
    float x[4];
    four_of<turned>(o, first, r, factor, x);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int32_t column = 2 * first + (turned ? 4 * quad_lane + k : k / 2 * 8 + 2 * quad_lane + k % 2);
      store_o<spec.dtype_o>(data, at + column, x[k], stored && column < spec.head_dim_v);
    }
  }
}

template <FwdSpec spec, Sm90Tile tile>
FMHA_DEVICE void epilogue(const FwdParams& p, const Work& work, int32_t row, RowStats (&rows)[2], float scale_log2, float offset_log2,
                          mma::Accumulator<padded_dim(spec.head_dim_v)>& o) {
  using RowSoftmax = Softmax<tile, p_offset_log2(spec, tile)>;
  constexpr bool turned = turns_v(spec, tile);
  const int32_t quad_lane = threadIdx.x % 4;
  bool suspect[2] = {false, false};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t packed_row = row + 8 * r, i = query_of<tile>(p, packed_row);
    const int32_t i_head = tile.pack_gqa ? work.i_head + packed_row - i * p.gqa_ratio : work.i_head;
    const bool stored = i < work.seqlen_q;
    const float row_sum = quad_reduce(rows[r].row_sum, [](float a, float b) { return a + b; });
    // Where the two differ beyond rounding, the row is computed again.
    const float max_log2 = RowSoftmax::shift_of(rows[r].row_max, scale_log2) + offset_log2;
    RowResult result = finish_row<spec>(p, {max_log2, __fmul_rn(max_log2, kLn2)}, row_sum, stored ? i_head : 0);
    if constexpr (is_fp8(spec.dtype_v)) result.factor *= scalar_of(p.descale_v, work.i_batch, work.i_head_kv, 1.f);
    if constexpr (is_fp8(spec.dtype_o)) result.factor *= p.scale_o ? *p.scale_o : 1.f;
    if constexpr (spec.dropout) result.factor *= p.dropout_scale;
    suspect[r] = stored && RowSoftmax::is_too_large(rows[r].row_max, scale_log2);
    // A row that sees no key (LSE -inf) is among them: its O is to be 0, but 0 times a hidden NaN of V is NaN.
    if constexpr (may_be_non_finite(spec)) suspect[r] |= stored && has_non_finite(o, r) && result.lse < infinity();
    const int64_t at = work.storage_batch * p.o.batch + int64_t(work.q_row + i) * p.o.row + i_head * p.o.head;

    if constexpr (tile.vector_store && is_fp8(spec.dtype_o)) {
      store_bytes<spec, turned>(static_cast<uint8_t*>(p.o.data) + at, o, r, result.factor, stored);
    } else if constexpr (tile.vector_store) {
      store_vectors<spec, turned>(static_cast<uint16_t*>(p.o.data) + at, o, r, result.factor, stored);
    } else {
      store_elements<spec, turned>(p.o.data, at, o, r, result.factor, stored);
    }
    if constexpr (spec.write_lse) {
      float* out = p.lse + work.storage_batch * p.lse_batch + i_head * p.lse_head + work.q_row + i;
      ptx::st_global_f32_if(out, result.lse, stored && quad_lane == 0);
    }
  }
  __syncwarp();
  if (__any_sync(ptx::kAllLanes, suspect[0] || suspect[1])) recompute_rows<spec, tile>(p, work, row, suspect);
}

}  // namespace fmha::sm90
