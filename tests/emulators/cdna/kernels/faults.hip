// Kernels with one planted fault each.
#define GLOBAL extern "C" __attribute__((global))
#define SHARED __attribute__((shared)) static

static __attribute__((device, always_inline)) void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

GLOBAL void right(const int *in, int *out) {
  SHARED int tile[128];
  int i = __builtin_amdgcn_workitem_id_x();
  tile[i] = in[i];
  barrier();
  out[i] = tile[127 - i];
}

GLOBAL void reads_past_the_end(const int *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  out[i] = in[i + 5];
}

GLOBAL void writes_before_the_start(const int *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  out[i - 3] = in[i];
}

GLOBAL void reads_unwritten_memory(const int *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  out[i] = out[127 - i] + in[i];
}

GLOBAL void reads_unwritten_lds(const int *in, int *out) {
  SHARED int tile[129];
  int i = __builtin_amdgcn_workitem_id_x();
  tile[i] = in[i];
  barrier();
  out[i] = tile[i + 1];
}

GLOBAL void leaves_lds(const int *in, int *out) {
  SHARED int tile[128];
  int i = __builtin_amdgcn_workitem_id_x();
  tile[i] = in[i];
  barrier();
  out[i] = tile[i + in[0]];
}

GLOBAL void races(const int *in, int *out) {
  SHARED int tile[128];
  int i = __builtin_amdgcn_workitem_id_x();
  tile[i] = 0;
  barrier();
  tile[i] = in[i];
  out[i] = ((volatile __attribute__((address_space(3))) int *)tile)[127 - i];
}

GLOBAL void waits_in_one_wave(const int *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  if (__builtin_amdgcn_readfirstlane(i) == 0) __builtin_amdgcn_s_barrier();
  out[i] = in[i];
}

GLOBAL void waits_in_some_lanes(const int *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x();
  if (in[i] & 1) __builtin_amdgcn_s_barrier();
  out[i] = in[i];
}

GLOBAL void uses_a_load_too_early(const int *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x(), x;
  asm volatile("global_load_dword %0, %1, %2\n v_add_u32 %0, 1, %0" : "=&v"(x) : "v"(i * 4), "s"(in));
  out[i] = x;
}

GLOBAL void uses_an_unwritten_register(const int *in, int *out) {
  int i = __builtin_amdgcn_workitem_id_x(), x;
  asm volatile("v_add_u32 %0, 1, v60" : "=v"(x) : : "v60");
  out[i] = x + in[i];
}

GLOBAL void stores_an_unwritten_register(const int *in, int *out) {
  int nothing;
  asm volatile("v_mov_b32 %0, v60" : "=v"(nothing) : : "v60");
  out[__builtin_amdgcn_workitem_id_x()] = nothing;
}

GLOBAL void reads_unwritten_private_memory(const int *in, int *out) {
  volatile int mine[2];
  int i = __builtin_amdgcn_workitem_id_x();
  mine[0] = in[i];
  out[i] = mine[1] + in[i];
}

// As a compiler spills a run of registers of which one holds nothing: no fault before `uses` asks for that one.
template <bool uses> static __attribute__((device, always_inline)) void spill(const int *in, int *out) {
  volatile int mine[2];
  int i = __builtin_amdgcn_workitem_id_x(), nothing;
  asm volatile("v_mov_b32 %0, v60" : "=v"(nothing) : : "v60");
  mine[0] = in[127 - i];
  mine[1] = nothing;
  out[i] = mine[0] + (uses ? mine[1] : 0);
}

GLOBAL void spills_an_unwritten_register(const int *in, int *out) { spill<false>(in, out); }
GLOBAL void uses_a_spilled_unwritten_register(const int *in, int *out) { spill<true>(in, out); }

GLOBAL void never_ends(const int *in, int *out) {
  while (true) asm volatile("s_nop 0");
}

GLOBAL void traps(const int *in, int *out) { __builtin_trap(); }

#ifndef __gfx90a__
// Four bytes a lane go straight to LDS; `wait` is what makes them safe to read.
template <bool wait> static __attribute__((device, always_inline)) void direct(const int *in, int *out) {
  SHARED int tile[128];
  int i = __builtin_amdgcn_workitem_id_x(), wave = __builtin_amdgcn_readfirstlane(i >> 6);
  auto from = __builtin_amdgcn_make_buffer_rsrc((void *)in, 0, 512, 0x00027000);
  __builtin_amdgcn_raw_ptr_buffer_load_lds(from, (__attribute__((address_space(3))) void *)&tile[wave * 64], 4, i * 4, 0, 0, 0);
  if (wait) asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
  asm volatile("s_barrier" ::: "memory");
  int x;
  asm volatile("ds_read_b32 %0, %1\n s_waitcnt lgkmcnt(0)" : "=v"(x) : "v"((127 - i) * 4 + (int)(long)(__attribute__((address_space(3))) int *)tile) : "memory");
  out[i] = x;
}
GLOBAL void direct_to_lds(const int *in, int *out) { direct<true>(in, out); }
GLOBAL void reads_a_direct_load_too_early(const int *in, int *out) { direct<false>(in, out); }
#endif
