// Buffer instructions: loads through a descriptor. A load beyond the descriptor's end gives 0.
#pragma once
#include <fmha/isa/hip.h>

namespace fmha {

using BufferDescriptor = __amdgpu_buffer_rsrc_t;

// An offset beyond the end of every descriptor that the kernels make.
constexpr int32_t kOutOfRange = -2147483647 - 1;

// needs: gfx90a. Buffer resource descriptor, CDNA3 ISA 9.1.5: raw (stride 0), 32-bit data format;
// `bytes` is less than 2^31.
FMHA_DEVICE BufferDescriptor buffer_descriptor(const void* base, int32_t bytes) {
  constexpr int kRawDword = 0x00027000;
  return __builtin_amdgcn_make_buffer_rsrc(const_cast<void*>(base), 0, bytes, kRawDword);
}

// needs: gfx90a. BUFFER_LOAD_DWORDX4, CDNA3 ISA 12.13; a dword beyond the end is 0.
FMHA_DEVICE u32x4 buffer_load_dwordx4(BufferDescriptor from, int32_t offset) {
  return __builtin_amdgcn_raw_buffer_load_b128(from, offset, 0, 0);
}

// needs: gfx90a. BUFFER_LOAD_DWORDX2, CDNA3 ISA 12.13; a dword beyond the end is 0.
FMHA_DEVICE u32x2 buffer_load_dwordx2(BufferDescriptor from, int32_t offset) {
  return __builtin_amdgcn_raw_buffer_load_b64(from, offset, 0, 0);
}

// needs: gfx90a. BUFFER_LOAD_DWORD, CDNA3 ISA 12.13; 0 beyond the end.
FMHA_DEVICE uint32_t buffer_load_dword(BufferDescriptor from, int32_t offset) {
  return __builtin_amdgcn_raw_buffer_load_b32(from, offset, 0, 0);
}

// needs: gfx90a. BUFFER_LOAD_USHORT, CDNA3 ISA 12.13; 0 beyond the end.
FMHA_DEVICE uint32_t buffer_load_ushort(BufferDescriptor from, int32_t offset) {
  return __builtin_amdgcn_raw_buffer_load_b16(from, offset, 0, 0);
}

// needs: gfx90a. BUFFER_LOAD_UBYTE, CDNA3 ISA 12.13; 0 beyond the end.
FMHA_DEVICE uint32_t buffer_load_ubyte(BufferDescriptor from, int32_t offset) {
  return __builtin_amdgcn_raw_buffer_load_b8(from, offset, 0, 0);
}

// needs: gfx90a. The address that LDS instructions know these bytes by: their offset (CDNA3 ISA 11.1).
FMHA_DEVICE uint32_t lds_address(const void* bytes) {
  return uint32_t(reinterpret_cast<__UINTPTR_TYPE__>((const FMHA_LDS uint8_t*)bytes));
}

#if defined(__gfx950__)
// needs: gfx950. BUFFER_LOAD_DWORDX4 with LDS = 1, CDNA4 ISA 9.1.9: lane l's 16 bytes go to LDS address `to` + 16 l,
// where `to` is equal in all lanes; zeros beyond the descriptor's end. Done when `s_waitcnt_vmcnt` says so. It is
// inline assembly, since after the builtin the compiler lets every read of LDS wait for it, whichever bytes are read.
FMHA_DEVICE void buffer_load_dwordx4_lds(BufferDescriptor from, int32_t offset, uint32_t to) {
  asm volatile(
      "s_nop 0\n\t"  // M0 is read a wait state after it is written
      "buffer_load_dwordx4 %1, %2, 0 offen lds"
      :
      : "{m0}"(to), "v"(offset), "s"(from)
      : "memory");
}
#endif

}  // namespace fmha
