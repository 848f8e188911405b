// One matrix instruction of RDNA a kernel: lane l loads its operands from a[l], b[l], c[l] and stores d[l].
typedef _Float16 f16x8 __attribute__((ext_vector_type(8)));
typedef _Float16 f16x16 __attribute__((ext_vector_type(16)));
typedef short s16x8 __attribute__((ext_vector_type(8)));
typedef short s16x16 __attribute__((ext_vector_type(16)));
typedef int i32x2 __attribute__((ext_vector_type(2)));
typedef float f32x8 __attribute__((ext_vector_type(8)));

#define WMMA(name, AB, call)                                                                                      \
  extern "C" __attribute__((global)) void name(const AB *pa, const AB *pb, const f32x8 *pc, f32x8 *pd) {          \
    int l = __builtin_amdgcn_workitem_id_x();                                                                     \
    AB a = pa[l], b = pb[l];                                                                                      \
    f32x8 c = pc[l];                                                                                              \
    pd[l] = call;                                                                                                 \
  }

#ifdef __gfx1100__
WMMA(f16, f16x16, __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c))
WMMA(bf16, s16x16, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c))
#else
WMMA(f16, f16x8, __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c))
WMMA(bf16, s16x8, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(a, b, c))
WMMA(fp8, i32x2, __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(a, b, c))
WMMA(bf8, i32x2, __builtin_amdgcn_wmma_f32_16x16x16_bf8_bf8_w32_gfx12(a, b, c))
#endif

// Two waves pass values through LDS: its waits and its barrier are what a test leaves out in turn.
extern "C" __attribute__((global)) void exchange(const int *in, int *out) {
  __attribute__((shared)) static int tile[64];
  int i = __builtin_amdgcn_workitem_id_x();
  tile[i] = in[i];
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  out[i] = tile[63 - i] + in[0];
}

// Products of 64 bits with a constant whose top bit is set, of a scalar and of a lane's number.
extern "C" __attribute__((global)) void products(const unsigned *in, unsigned *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  unsigned long uniform = 0xD2511F53ul * in[0], own = 0xD2511F53ul * in[i];
  out[i] = (unsigned)(uniform >> 32) ^ (unsigned)uniform ^ (unsigned)(own >> 32);
}

// Lane i of a row gets lane 15 - i of the row beside.
extern "C" __attribute__((global)) void across(const int *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  out[i] = __builtin_amdgcn_permlanex16(in[i], in[i], 0x89abcdef, 0x01234567, false, false);
}

// Bytes and halves that all lanes read alike, with and without their signs, so far from the beginning as the last word says.
extern "C" __attribute__((global)) void parts(const int *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x(), from = in[31];
  int byte = ((const signed char *)in)[from + 3], half = ((const short *)in)[from + 3];
  unsigned plain = ((const unsigned char *)in)[from + 7], wide = ((const unsigned short *)in)[from + 5];
  out[i] = i == 0 ? byte : i == 1 ? (int)plain : i == 2 ? half : i == 3 ? (int)wide : in[i];
}
