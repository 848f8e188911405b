// Many operations in one kernel each, so that the decoder meets many instructions.
#define GLOBAL extern "C" __attribute__((global))
typedef _Float16 f16x2 __attribute__((ext_vector_type(2)));
typedef float f32x2 __attribute__((ext_vector_type(2)));

GLOBAL void integers(const int *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  int a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2];
  int r = a * b + c;
  r ^= (a << (b & 31)) | ((unsigned)c >> (a & 31));
  r += a / (b | 1) + (int)((unsigned)b % ((unsigned)c | 1));
  r += __builtin_popcount(a) + __builtin_clz(b | 1) + __builtin_ctz(c | 1 << 30);
  long wide = (long)a * b + ((long)c << 20);
  r += (int)(wide >> 17) + (int)((unsigned long)wide / 1000);
  out[i] = r;
}

GLOBAL void floats(const float *in, float *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  float a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2];
  float r = __builtin_fmaf(a, b, c) + a / b;
  r += __builtin_fminf(a, __builtin_fabsf(b)) - __builtin_floorf(c) + __builtin_sqrtf(__builtin_fabsf(c));
  r += (float)(int)(a * 100.f) + (float)(unsigned)__builtin_fabsf(b * 7.f);
  double d = (double)a * b - (double)c;
  r += (float)(d * d) + (a < b ? c : -c);
  out[i] = r;
}

GLOBAL void quotients(const float *in, float *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  out[i] = in[3 * i] / in[3 * i + 1];
}

GLOBAL void halves(const f16x2 *in, f16x2 *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  f16x2 a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2];
  f16x2 r = a * b + c;
  r = __builtin_elementwise_max(r, a - b);
  r[0] += (_Float16)((float)b[1] * (float)c[0]);
  out[i] = r;
}

GLOBAL void shorts(const int *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  int a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2], low, high, least, most;
  asm("v_min3_u16 %0, %1, %2, %3" : "=v"(low) : "v"(a), "v"(b), "v"(c));
  asm("v_max3_u16 %0, %1, %2, %3" : "=v"(high) : "v"(a), "v"(b), "v"(c));
  asm("v_min3_i16 %0, %1, %2, %3" : "=v"(least) : "v"(a), "v"(b), "v"(c));
  asm("v_max3_i16 %0, %1, %2, %3" : "=v"(most) : "v"(a), "v"(b), "v"(c));
  out[i] = (low & 0xffff) + 3 * (high & 0xffff) + 5 * (least & 0xffff) + 7 * (most & 0xffff);
}

GLOBAL void lanes(const int *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  int a = in[i];
  int r = __builtin_amdgcn_ds_bpermute((i ^ 5) * 4, a);
  r += __builtin_amdgcn_ds_swizzle(a, 0x041f);
  r += __builtin_amdgcn_mov_dpp(a, 0xb1, 0xf, 0xf, true);
  r += __builtin_amdgcn_update_dpp(7, a, 0x111, 0xf, 0xf, false);
  r += __builtin_amdgcn_readlane(a, 9) + __builtin_amdgcn_readfirstlane(a);
  out[i] = r;
}

GLOBAL void atomics(int *counter, float *sum, const float *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  out[i] = __atomic_fetch_add(counter, i, __ATOMIC_RELAXED);
  [[clang::atomic(no_remote_memory, no_fine_grained_memory, ignore_denormal_mode)]] {
    __scoped_atomic_fetch_add(sum, in[i], __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  }
}
