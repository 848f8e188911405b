// Position in a ring of shared-memory slots.
#pragma once
#include <fmha/portable.h>

namespace fmha {

// A slot of a ring buffer, and the parity of its barriers.
template <int num_slots>
struct Slot {
  int32_t index = 0;
  uint32_t phase = 0;

  FMHA_DEVICE void advance() {
    if constexpr (num_slots == 1) {
      phase ^= 1;
    } else {
      index = index + 1 == num_slots ? 0 : index + 1;
      phase ^= index == 0;
    }
  }
  FMHA_DEVICE void advance_by(int32_t count) {
    const int32_t sum = index + count, rounds = sum / num_slots;
    index = sum - rounds * num_slots;
    phase ^= rounds & 1;
  }
};

}  // namespace fmha
