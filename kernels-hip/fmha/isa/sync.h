// Waits and barriers.
#pragma once
#include <fmha/isa/hip.h>

namespace fmha {

// needs: gfx90a. S_BARRIER, CDNA3 ISA 4.4: all waves of the workgroup arrive; LDS writes before it
// are seen after it.
FMHA_DEVICE void s_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// needs: gfx90a. S_BARRIER, CDNA3 ISA 4.4, for waves that exchange data by LDS only: writes to other memory may not be
// visible to other waves. RDNA's waves may be on two compute units, so that s_barrier waits for all memory and empties
// the nearest cache (BUFFER_GL0_INV, RDNA3 ISA 16.15; GLOBAL_INV, RDNA4 ISA 16.16); this one does neither. Compilers
// before 19 have one fence.
FMHA_DEVICE void s_barrier_of_lds() {
#if __clang_major__ >= 19
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
#else
  s_barrier();
#endif
}

// needs: gfx90a. No instruction: LDS serves a wave's accesses in order (CDNA3 ISA 4.4, LGKM_CNT), so it is enough
// that the compiler keeps earlier accesses before later ones.
FMHA_DEVICE void lds_in_order() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// needs: gfx90a. S_WAITCNT, CDNA3 ISA 4.4: until at most `loads` vector memory loads are under way.
template <int loads>
FMHA_DEVICE void s_waitcnt_vmcnt() {
  static_assert(loads >= 0 && loads < 64, "vmcnt has six bits");
  constexpr int kNoExpWait = 7 << 4, kNoLgkmWait = 15 << 8;
  __builtin_amdgcn_s_waitcnt((loads & 15) | (loads >> 4) << 14 | kNoExpWait | kNoLgkmWait);
}

// needs: gfx90a. S_WAITCNT, CDNA3 ISA 4.4: until at most `accesses` of LDS and scalar memory are under way.
template <int accesses>
FMHA_DEVICE void s_waitcnt_lgkmcnt() {
  static_assert(accesses >= 0 && accesses < 16, "lgkmcnt has four bits");
  constexpr int kNoVmWait = 15 | 3 << 14, kNoExpWait = 7 << 4;
  __builtin_amdgcn_s_waitcnt(accesses << 8 | kNoVmWait | kNoExpWait);
}

}  // namespace fmha
