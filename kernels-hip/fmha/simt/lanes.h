// Lanes of the kernels in `fmha/simt`: the lanes of a wave. A wave has one row, and each lane one element at a time.
#pragma once
#include <fmha/isa/lane.h>
#include <fmha/rows.h>

namespace fmha::simt {

constexpr int kWavesPerGroup = kRowThreads / kWaveSize;

struct Wave {
  static constexpr int32_t count = kWaveSize;
  static FMHA_DEVICE int32_t index() { return thread_idx() % kWaveSize; }
  static FMHA_DEVICE uint64_t ballot(bool x) { return v_cmp_ballot(x); }
  static FMHA_DEVICE float from(float x, int32_t lane) { return ds_bpermute_b32(lane, x); }
};
using Lanes = Wave;

FMHA_DEVICE int64_t row_of_wave() {
  return int64_t(workgroup_idx()) * kWavesPerGroup + v_readfirstlane_b32(thread_idx() / kWaveSize);
}

// Calls `row` for the wave's row, if there is one.
template <class Row>
FMHA_DEVICE void for_each_row(int64_t num_rows, Row row) {
  const int64_t at = row_of_wave();
  if (at < num_rows) row(at);
}

// Calls `element` for the lane's element, if there is one.
template <class Element>
FMHA_DEVICE void for_each_element(int64_t num_elements, Element element) {
  const int64_t at = row_of_wave() * kWaveSize + thread_idx() % kWaveSize;
  if (at < num_elements) element(at);
}

}  // namespace fmha::simt
