// Place of a thread in its wave, and exchanges between lanes of a wave.
#pragma once
#include <fmha/isa/hip.h>

namespace fmha {

// Lanes of a wave: 32 on RDNA, 64 on CDNA.
constexpr int kWaveSize = kArch == Arch::Gfx1100 || kArch == Arch::Gfx1201 ? 32 : 64;

// needs: gfx90a. VGPR initialisation: work-item id X.
// https://llvm.org/docs/AMDGPUUsage.html#initial-kernel-execution-state
FMHA_DEVICE int thread_idx() { return __builtin_amdgcn_workitem_id_x(); }

// needs: gfx90a. SGPR initialisation: workgroup id X.
// https://llvm.org/docs/AMDGPUUsage.html#initial-kernel-execution-state
FMHA_DEVICE int workgroup_idx() { return __builtin_amdgcn_workgroup_id_x(); }

// needs: gfx90a. The first hidden argument, hidden_block_count_x: workgroups of the launch.
// https://llvm.org/docs/AMDGPUUsage.html#code-object-v5-metadata
FMHA_DEVICE int num_workgroups() { return *(const int FMHA_CONSTANT*)__builtin_amdgcn_implicitarg_ptr(); }

// needs: gfx90a. V_READFIRSTLANE_B32, CDNA3 ISA 12.8: for numbers that are equal in all lanes, so
// that they live in a scalar register.
FMHA_DEVICE int v_readfirstlane_b32(int x) { return __builtin_amdgcn_readfirstlane(x); }

// needs: gfx90a. V_READLANE_B32, CDNA3 ISA 12.10: the value of lane `lane`.
FMHA_DEVICE int v_readlane_b32(int x, int lane) { return __builtin_amdgcn_readlane(x, lane); }

// needs: gfx90a. DS_BPERMUTE_B32, CDNA3 ISA 12.12: the value of lane `lane`.
FMHA_DEVICE float ds_bpermute_b32(int lane, float x) {
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(lane * 4, __builtin_bit_cast(int, x)));
}

// needs: gfx90a. DS_BPERMUTE_B32, CDNA3 ISA 12.12: the value of lane `lane`, for integers.
FMHA_DEVICE int ds_bpermute_b32(int lane, int x) { return __builtin_amdgcn_ds_bpermute(lane * 4, x); }

// needs: gfx90a. DS_ADD_U32, CDNA3 ISA 12.12: adds to a word of LDS, whatever other lanes add.
FMHA_DEVICE void ds_add_u32(uint32_t& word, uint32_t x) {
  __hip_atomic_fetch_add(&word, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

// needs: gfx90a. GLOBAL_ATOMIC_ADD, CDNA3 ISA 12.15: adds to a word of memory, whatever other workgroups add.
FMHA_DEVICE void global_atomic_add(uint32_t& word, uint32_t x) {
  __hip_atomic_fetch_add(&word, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

#if defined(__gfx950__)
// needs: gfx950. V_PERMLANE32_SWAP_B32, CDNA4 ISA 12.8: returns {low halves of a and b, high halves of a and b}.
FMHA_DEVICE u32x2 v_permlane32_swap_b32(uint32_t a, uint32_t b) {
  auto r = __builtin_amdgcn_permlane32_swap(a, b, false, false);
  return u32x2{r[0], r[1]};
}
#endif

#if defined(__gfx950__)
// needs: gfx950. DS_READ_B64_TR_B16, CDNA4 ISA 12.12: 16 lanes read four rows of 16 elements of two bytes,
// eight bytes a lane, and each gets a column: lane l's element n is element l % 4 of lane 4 n + l / 4.
FMHA_DEVICE u32x2 ds_read_b64_tr_b16(const void FMHA_LDS* from) {
  using Column = __attribute__((vector_size(8))) short;
  return __builtin_bit_cast(u32x2, __builtin_amdgcn_ds_read_tr16_b64_v4i16((Column FMHA_LDS*)from));
}

// needs: gfx950. DS_READ_B64_TR_B8, CDNA4 ISA 12.12: 16 lanes read eight rows of 16 bytes, eight bytes a lane, and
// each gets a column: lane l's byte n is byte l % 8 of lane 2 n + l / 8.
FMHA_DEVICE u32x2 ds_read_b64_tr_b8(const void FMHA_LDS* from) {
  using Column = __attribute__((vector_size(8))) int;
  return __builtin_bit_cast(u32x2, __builtin_amdgcn_ds_read_tr8_b64_v2i32((Column FMHA_LDS*)from));
}
#endif

// needs: gfx90a. V_CMP with a scalar destination, CDNA3 ISA 12.9: a bit for each lane.
FMHA_DEVICE uint64_t v_cmp_ballot(bool x) {
#if defined(__gfx1100__) || defined(__gfx1201__)
  return __builtin_amdgcn_ballot_w32(x);
#else
  return __builtin_amdgcn_ballot_w64(x);
#endif
}

}  // namespace fmha
