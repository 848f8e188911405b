// Text that the rungs share: the call, addresses of its rows, and the softmax of a warp's fragment.
#pragma once
#include <fmha/mma/fragment.cuh>
#include <fmha/ptx/warp.cuh>

namespace ladder {

using namespace fmha;

// Arguments Q, K, V and O: [batch, seqlen, heads, dim] of bf16. seqlen is a multiple of 128.
struct Call {
  const uint16_t *q, *k, *v;
  uint16_t* o;
  int32_t seqlen, heads;
  int32_t l2_heads;  // heads whose K and V fit the L2 together
  float scale_log2;  // the softmax scale times log2(e): hardware has exp2, and exp(x) = exp2(x log2(e))
};

// Rows of one head in a tensor: `dim` elements each, `stride` apart.
struct Rows {
  int64_t first;
  int32_t stride;
};
template <int dim>
FMHA_DEVICE Rows rows_of_head(const Call& call, int32_t head) {
  const int32_t i_batch = head / call.heads, i_head = head % call.heads;
  return {(int64_t(i_batch) * call.seqlen * call.heads + i_head) * dim, call.heads * dim};
}

// Work of a CTA: the queries [first_query, first_query + rows) of a head. Tiles of one head are neighbours.
struct Work {
  int32_t head, first_query;
};
template <int rows>
FMHA_DEVICE Work work_of_cta(const Call& call) {
  const int32_t tiles = call.seqlen / rows;
  return {int32_t(blockIdx.x) / tiles, int32_t(blockIdx.x) % tiles * rows};
}

// Blocks of `keys` that a tile of queries sees: none beyond its last query, if the mask is causal.
template <int rows, int keys, bool causal>
FMHA_DEVICE int32_t blocks_of(const Call& call, int32_t first_query) {
  return ceil_div(causal ? first_query + rows : call.seqlen, keys);
}

FMHA_DEVICE float sum_of(float a, float b) { return a + b; }
FMHA_DEVICE float larger_of(float a, float b) { return fmaxf(a, b); }

// Reduction over `lanes` neighbouring lanes, a power of two.
template <int lanes, class Function>
FMHA_DEVICE float reduce(float value, Function function) {
#pragma unroll
  for (int mask = 1; mask < lanes; mask *= 2) value = function(value, ptx::shfl_xor(value, mask));
  return value;
}

// The two rows that a lane has of sixteen (fmha/mma/fragment.cuh), from block to block: S becomes P = exp2(S -
// maximum).
struct RowSoftmax {
  float row_max[2] = {-infinity(), -infinity()}, row_sum[2] = {0.f, 0.f};

  // Adds a block of scores. `first_row` and `first_key` are the warp's first query and the block's first key, needed
  // where the mask hides some keys.
  template <int n>
  FMHA_DEVICE static void hide(mma::Accumulator<n>& s, int32_t first_row, int32_t first_key) {
    const int32_t row = first_row + threadIdx.x % 32 / 4, key = first_key + mma::fragment_column();
#pragma unroll
    for (int e = 0; e < n / 2; ++e)
      if (key + s.column(e) > row + 8 * s.row(e)) s[e] = -infinity();
  }

  // Rescales O to the new maximum. In a causal tile's first block every row sees a key, so no maximum is -inf.
  template <int n, int dim>
  FMHA_DEVICE void step(mma::Accumulator<n>& s, mma::Accumulator<dim>& o, float scale_log2) {
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = row_max[r];
#pragma unroll
      for (int e = 0; e < n / 2; ++e)
        if (s.row(e) == r) largest = fmaxf(largest, s[e]);
      largest = reduce<4>(largest, larger_of);
      correction[r] = ptx::ex2_approx_ftz((row_max[r] - largest) * scale_log2);
      row_max[r] = largest;
      row_sum[r] *= correction[r];
    }
#pragma unroll
    for (int e = 0; e < n / 2; ++e) {
      const int r = s.row(e);
      s[e] = ptx::ex2_approx_ftz(s[e] * scale_log2 - row_max[r] * scale_log2);
      row_sum[r] += s[e];
    }
#pragma unroll
    for (int e = 0; e < dim / 2; ++e) o[e] *= correction[o.row(e)];
  }

  // Writes O / sum to the warp's sixteen rows in memory.
  template <int dim>
  FMHA_DEVICE void store(const mma::Accumulator<dim>& o, uint16_t* rows, int32_t stride) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = 1.f / reduce<4>(row_sum[r], sum_of);
      uint16_t* row = rows + int64_t(threadIdx.x % 32 / 4 + 8 * r) * stride + mma::fragment_column();
#pragma unroll
      for (int e = 2 * r; e < dim / 2; e += 4)
        *reinterpret_cast<uint32_t*>(row + o.column(e)) =
            ptx::cvt_rn_x2<DType::Bf16>(o[e] * factor, o[e + 1] * factor);
    }
  }
};

}  // namespace ladder
