// Runs `fmha/update_cache.h`, which appends new keys to a KV cache, on warps.
#pragma once
#include <fmha/update_cache.h>

namespace fmha::cache {

struct Warp {
  static constexpr int32_t count = 32;
  static FMHA_DEVICE int32_t index() { return threadIdx.x % count; }
  static FMHA_DEVICE int64_t thread() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
  static FMHA_DEVICE int64_t threads() { return int64_t(gridDim.x) * blockDim.x; }
  static FMHA_DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
  static FMHA_DEVICE float sum(float a, float b) { return __fadd_rn(a, b); }
  static FMHA_DEVICE float difference(float a, float b) { return __fsub_rn(a, b); }
};

}  // namespace fmha::cache
