// The list of a row (choose_row.h): a workgroup or several to a row.
#pragma once
#include <fmha/isa/lane.h>
#include <fmha/isa/sync.h>

#include <fmha/choose_row.h>  // behind the language's keywords

namespace fmha::choose {

struct ChooseGroup {
  static constexpr int32_t threads = 1024, count = kWaveSize;
  static FMHA_DEVICE int32_t thread() { return thread_idx(); }
  static FMHA_DEVICE int32_t index() { return thread_idx() % kWaveSize; }
  static FMHA_DEVICE int64_t number() { return workgroup_idx(); }
  static FMHA_DEVICE void barrier() { s_barrier(); }
  static FMHA_DEVICE uint64_t ballot(bool x) { return v_cmp_ballot(x); }
  static FMHA_DEVICE int32_t bits_in(uint64_t bits) { return __builtin_popcountll(bits); }
  static FMHA_DEVICE uint32_t from(uint32_t x, int32_t lane) { return uint32_t(ds_bpermute_b32(lane, int(x))); }
  static FMHA_DEVICE void add(uint32_t& word, uint32_t x) { ds_add_u32(word, x); }
  static FMHA_DEVICE void add_in_memory(uint32_t& word, uint32_t x) { global_atomic_add(word, x); }
};

}  // namespace fmha::choose
