// The products of wide heads: a warpgroup's 64 rows, operands in chunks one after another.
#pragma once
#include <fmha/ptx/matrix.cuh>
#include <fmha/ptx/shared.cuh>
#include <fmha/sm90/mla/config.cuh>

namespace fmha::mla {

using Scores = mma::Accumulator<kKeys>;
using Probs = mma::RegisterTile<uint16_t, kKeys>;

constexpr int kDepth = mma::kDepth<uint16_t>;

// Computes d (+)= sign * A B^T over `chunks` chunks: issues wgmma, which the caller groups and waits for.
template <DType dtype, int sign, int chunks, class Chunk>
FMHA_DEVICE void issue_abt(Scores& d, const Chunk* a, const Chunk* b, bool adds) {
  constexpr int steps_per_chunk = kSpan / kDepth;
  const mma::Descriptor a0 = mma::descriptor<Chunk::span_bytes>(a->offset(), 16);
  const mma::Descriptor b0 = mma::descriptor<Chunk::span_bytes>(b->offset(), 16);
#pragma unroll
  for (int step = 0; step < chunks * steps_per_chunk; ++step) {
    const uint32_t at = step / steps_per_chunk * Chunk::chunk_bytes + step % steps_per_chunk * 32;
    ptx::wgmma_mma_async_ss<dtype, sign, 0, 0>(d.elems, a0.plus_bytes(at).bits(), b0.plus_bytes(at).bits(), adds || step != 0);
  }
}

// o += P V over half of a block's keys, P in registers, V a half of its columns. Starts, does not wait.
template <DType dtype, class Output, class Chunk>
FMHA_DEVICE void start_own(Output& o, const Probs& p, const Chunk* v, int half) {
  constexpr int steps = kKeys / kDepth / 2;
  const mma::Descriptor v0 = mma::descriptor<Chunk::span_bytes>(v->offset(), Chunk::chunk_bytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = half * steps; step < (half + 1) * steps; ++step)
    ptx::wgmma_mma_async_rs<dtype, 1, 1>(o.elems, p.elems[step], v0.plus_bytes(step * kDepth * Chunk::span_bytes).bits(), true);
  ptx::wgmma_commit_group();
}

// o += P V over all keys, of a P that the other warpgroup has left in shared memory.
template <DType dtype, class Output, class Chunk>
FMHA_DEVICE void start_other(Output& o, const Chunk& p, const Chunk* v) {
  const mma::Descriptor p0 = mma::descriptor<Chunk::span_bytes>(p.offset(), 16);
  const mma::Descriptor v0 = mma::descriptor<Chunk::span_bytes>(v->offset(), Chunk::chunk_bytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeys / kDepth; ++step)
    ptx::wgmma_mma_async_ss<dtype, 1, 0, 1>(o.elems, p0.plus_bytes(step * 32).bits(),
                                            v0.plus_bytes(step * kDepth * Chunk::span_bytes).bits(), true);
  ptx::wgmma_commit_group();
}

// Stores P into a chunk, where the products of the other warpgroup read it.
template <class Chunk>
FMHA_DEVICE void store_probs(const Chunk& to, const Probs& p) {
  const int32_t lane = threadIdx.x % 32, row = threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
    ptx::stmatrix_x4(to.address() + fmha::mma::word_offset<Chunk>(row, step * 16 + lane / 16 * 8), p.elems[step]);
}

}  // namespace fmha::mla
