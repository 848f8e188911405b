// The list of a row (choose_row.h): a CTA or several to a row.
#pragma once
#include <fmha/choose_row.h>
#include <fmha/ptx/collective.cuh>

namespace fmha::choose {

struct ChooseCta {
  static constexpr int32_t threads = 1024, count = 32;
  static FMHA_DEVICE int32_t thread() { return int32_t(threadIdx.x); }
  static FMHA_DEVICE int32_t index() { return int32_t(threadIdx.x) % count; }
  static FMHA_DEVICE int64_t number() { return blockIdx.x; }
  static FMHA_DEVICE void barrier() { __syncthreads(); }
  static FMHA_DEVICE uint32_t ballot(bool x) { return ptx::vote_ballot(x); }
  static FMHA_DEVICE int32_t bits_in(uint32_t bits) { return __popc(bits); }
  static FMHA_DEVICE uint32_t from(uint32_t x, int32_t lane) { return ptx::shfl_idx(x, lane); }
  static FMHA_DEVICE void add(uint32_t& word, uint32_t x) { atomicAdd(&word, x); }
  static FMHA_DEVICE void add_in_memory(uint32_t& word, uint32_t x) { atomicAdd(&word, x); }
};

}  // namespace fmha::choose
