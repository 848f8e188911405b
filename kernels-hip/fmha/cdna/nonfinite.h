// NaN and infinity in V, where the mask hides their keys from some queries of a tile.
//
// A masked key has P = 0, but the matrix unit still multiplies it with V, and 0 x NaN is NaN. So for tiles that the
// mask hides in part, and only for those, each wave scans V in LDS once. If a NaN or an infinity is found, which is
// rare, it is replaced by 0 in LDS, and after O is written it is added to those queries that do see its key.
#pragma once
#include <fmha/cdna/tile_step.h>
#include <fmha/isa/sync.h>

namespace fmha::cdna {

// The top bit of each element of a word whose value is not finite.
template <DType dtype>
FMHA_DEVICE uint32_t nonfinite_elems(uint32_t word) {
  constexpr uint32_t ones = size_bytes(dtype) == 2 ? 0x00010001 : 0x01010101;
  constexpr uint32_t tops = ones << (8 * size_bytes(dtype) - 1);
  if constexpr (dtype == DType::E4m3Fnuz || dtype == DType::E5m2Fnuz) {
    // FNUZ types have one NaN, the code of -0, and no infinity.
    return ~((word & ~tops) + ~tops) & word & tops;
  } else {
    constexpr uint32_t least = dtype == DType::F16    ? 0x7c00
                               : dtype == DType::Bf16 ? 0x7f80
                               : dtype == DType::E5m2 ? 0x7c
                                                      : 0x7f;
    constexpr uint32_t to_top = (tops / ones) - least;
    return ((word & ~tops) + to_top * ones) & tops;
  }
}

template <DType dtype>
FMHA_DEVICE uint32_t without_nonfinite(uint32_t word) {
  constexpr uint32_t bits = 8 * size_bytes(dtype);
  return word & ~((nonfinite_elems<dtype>(word) >> (bits - 1)) * ((1u << bits) - 1));
}

// Called by all waves once V of a partly masked tile is in LDS. Replaces NaN and infinity by 0; true if there were
// any.
template <CdnaSpec spec, CdnaTile tile>
FMHA_DEVICE bool zero_nonfinite(typename Config<spec, tile>::VMatrix& v) {
  using C = Config<spec, tile>;
  constexpr int num_frags = sizeof(v.bytes) / kFragBytes;
  Frag* const frags = reinterpret_cast<Frag*>(v.bytes);
  uint32_t found = 0;
#pragma unroll 4
  for (int at = lane_idx(); at < num_frags; at += kWaveSize) {
    const Frag frag = frags[at];
#pragma unroll
    for (int w = 0; w < 4; ++w) found |= nonfinite_elems<spec.dtype_v>(frag[w]);
  }
  // Every wave has scanned the same bytes, so the branch is uniform in the workgroup.
  if (v_cmp_ballot(found != 0) == 0) return false;
  s_barrier();
#pragma nounroll
  for (int at = thread_idx(); at < num_frags; at += C::num_threads) {
    Frag frag = frags[at];
#pragma unroll
    for (int w = 0; w < 4; ++w) frag[w] = without_nonfinite<spec.dtype_v>(frag[w]);
    frags[at] = frag;
  }
  s_barrier();
  return true;
}

}  // namespace fmha::cdna
