// Loads of global memory of elements and words.
#pragma once
#include <fmha/isa/sched.h>

namespace fmha {

// Words of 4 bytes at an address that is only known to be a multiple of 4.
template <int words>
using OnDwords __attribute__((aligned(4))) = Vec<uint32_t, words>;

template <class T>
FMHA_DEVICE T load_global(const uint8_t* from) {
  return *(const T FMHA_GLOBAL*)(const FMHA_GLOBAL uint8_t*)from;
}

// An element of 1 or 2 bytes.
template <int bytes>
FMHA_DEVICE uint32_t load_code(const uint8_t* from) {
  if constexpr (bytes == 1) return load_global<uint8_t>(from);
  return load_global<uint16_t>(from);
}

}  // namespace fmha
