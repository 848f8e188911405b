// 1. Tiled: 64 queries share what is read of K and V.
//
// Changes   a CTA of 256 threads brings 64 keys to shared memory and computes 64 x 64 scores from them. A thread has four
//           rows and four columns, so that eight numbers read serve sixteen products.
// Why       of K and V each byte from memory now serves 64 queries: 64 FLOPs a byte, and neither L1 nor L2 bounds it.
// On paper  128 f32 multiply-adds a clock and multiprocessor: 61 TFLOP/s of an H200. Eight loads and sixteen conversions
//           stand beside 32 multiply-adds of S, and eight and eight beside 32 of O: 61 % of what is issued is
//           arithmetic, 37 TFLOP/s.
// Measured  22.4, 2.6 times the step before: nothing computes while a block is brought.
//
// A row of a tile has one word more than it needs: keys that lie side by side are then in different banks.
#pragma once
#include <ladder/common.cuh>

namespace ladder {

constexpr int kQueries = 64, kKeys = 64;

template <int dim>
struct Smem {
  static constexpr int words = dim / 2 + 1;
  uint32_t q[kQueries][words], k[kKeys][words], v[kKeys][words];
  float p[kQueries][kKeys + 1];
};

template <int dim>
FMHA_DEVICE void load(uint32_t (&to)[64][dim / 2 + 1], const uint16_t* from, int32_t stride) {
#pragma unroll 4
  for (int32_t at = threadIdx.x; at < 64 * dim / 2; at += blockDim.x) {
    const int32_t row = at / (dim / 2), word = at % (dim / 2);
    to[row][word] = *reinterpret_cast<const uint32_t*>(from + int64_t(row) * stride + 2 * word);
  }
}

template <int dim, bool causal>
FMHA_DEVICE void attention(const Call& call) {
  extern __shared__ __align__(16) unsigned char raw[];
  Smem<dim>& smem = *reinterpret_cast<Smem<dim>*>(raw);
  const Work work = work_of_cta<kQueries>(call);
  const Rows rows = rows_of_head<dim>(call, work.head);
  // A thread has rows 4 y .. 4 y + 3, columns x, x + 16, ... of S, and words x, x + 16, ... of O.
  const int32_t x = threadIdx.x % 16, y = threadIdx.x / 16;
  constexpr int words = dim / 32;
  float o[4][2 * words] = {}, row_max[4], row_sum[4] = {};
#pragma unroll
  for (int r = 0; r < 4; ++r) row_max[r] = -infinity();

  load<dim>(smem.q, call.q + rows.first + int64_t(work.first_query) * rows.stride, rows.stride);
  const int32_t num_blocks = blocks_of<kQueries, kKeys, causal>(call, work.first_query);
#pragma unroll 1
  for (int32_t block = 0; block < num_blocks; ++block) {
    const int64_t first_key = rows.first + int64_t(block) * kKeys * rows.stride;
    __syncthreads();  // all have read the block before
    load<dim>(smem.k, call.k + first_key, rows.stride);
    load<dim>(smem.v, call.v + first_key, rows.stride);
    __syncthreads();

    float s[4][4] = {};
#pragma unroll 4
    for (int32_t d = 0; d < dim / 2; ++d) {
      float q[4][2], k[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::unpack_x2<DType::Bf16>(smem.q[4 * y + i][d], q[i][0], q[i][1]);
        ptx::unpack_x2<DType::Bf16>(smem.k[x + 16 * i][d], k[i][0], k[i][1]);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[r][c] += q[r][0] * k[c][0] + q[r][1] * k[c][1];
    }

#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float largest = row_max[r], sum = 0.f;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const bool hidden = causal && block * kKeys + x + 16 * c > work.first_query + 4 * y + r;
        s[r][c] = hidden ? -infinity() : s[r][c] * call.scale_log2;
        largest = fmaxf(largest, s[r][c]);
      }
      largest = reduce<16>(largest, larger_of);
      const float correction = ptx::ex2_approx_ftz(row_max[r] - largest);
      row_max[r] = largest;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float p = ptx::ex2_approx_ftz(s[r][c] - largest);
        smem.p[4 * y + r][x + 16 * c] = p;
        sum += p;
      }
      row_sum[r] = row_sum[r] * correction + sum;
#pragma unroll
      for (int c = 0; c < 2 * words; ++c) o[r][c] *= correction;
    }
    __syncwarp();  // a row's P is written and read by one half of one warp

#pragma unroll 4
    for (int32_t key = 0; key < kKeys; ++key) {
      float v[2 * words];
#pragma unroll
      for (int w = 0; w < words; ++w)
        ptx::unpack_x2<DType::Bf16>(smem.v[key][x + 16 * w], v[2 * w], v[2 * w + 1]);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float p = smem.p[4 * y + r][key];
#pragma unroll
        for (int c = 0; c < 2 * words; ++c) o[r][c] += p * v[c];
      }
    }
  }

#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float factor = 1.f / reduce<16>(row_sum[r], sum_of);
    uint16_t* row = call.o + rows.first + int64_t(work.first_query + 4 * y + r) * rows.stride;
#pragma unroll
    for (int w = 0; w < words; ++w)
      *reinterpret_cast<uint32_t*>(row + 2 * (x + 16 * w)) =
          ptx::cvt_rn_x2<DType::Bf16>(o[r][2 * w] * factor, o[r][2 * w + 1] * factor);
  }
}

}  // namespace ladder
