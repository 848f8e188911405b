// Runs `fmha/update_cache.h`, which appends new keys to a KV cache, on waves.
#pragma once
#include <fmha/isa/lane.h>
#include <fmha/isa/sched.h>
#include <fmha/update_cache.h>

namespace fmha::cache {

constexpr int32_t kUpdateThreads = 256;

struct Wave {
  static constexpr int32_t count = kWaveSize;
  static FMHA_DEVICE int32_t index() { return thread_idx() % count; }
  static FMHA_DEVICE int64_t thread() { return int64_t(workgroup_idx()) * kUpdateThreads + thread_idx(); }
  static FMHA_DEVICE int64_t threads() { return int64_t(num_workgroups()) * kUpdateThreads; }
  // The product is opaque; otherwise the compiler would contract it with the following sum to a multiply-add.
  static FMHA_DEVICE float product(float a, float b) {
    float rounded = a * b;
    opaque_in_vgpr(rounded);
    return rounded;
  }
  static FMHA_DEVICE float sum(float a, float b) { return a + b; }
  static FMHA_DEVICE float difference(float a, float b) { return a - b; }
};

}  // namespace fmha::cache
