// LDS reads that transpose: gfx950. Two words a lane go to LDS, in order; each 16 lanes read rows of 16 elements.
#define GLOBAL extern "C" __attribute__((global))
#define LDS __attribute__((address_space(3)))
typedef unsigned u32x2 __attribute__((vector_size(8)));
typedef int s32x2 __attribute__((vector_size(8)));
typedef short s16x4 __attribute__((vector_size(8)));

// A lane's eight bytes: of row `lane / lanes_per_row` of the 16 lanes' block.
template <int lanes_per_row>
__attribute__((device)) inline LDS char *own_part(LDS char *lds, int lane) {
  const int rows = 16 / lanes_per_row, block = lane / 16, in_block = lane % 16;
  return lds + (block * rows + in_block / lanes_per_row) * lanes_per_row * 8 + in_block % lanes_per_row * 8;
}

GLOBAL void bytes_transposed(const u32x2 *in, u32x2 *out) {
  __attribute__((shared)) u32x2 lds[64];
  int i = __builtin_amdgcn_workitem_id_x();
  lds[i] = in[i];
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  LDS char *from = own_part<2>((LDS char *)lds, i);
  out[i] = __builtin_bit_cast(u32x2, __builtin_amdgcn_ds_read_tr8_b64_v2i32((LDS s32x2 *)from));
}

GLOBAL void halves_transposed(const u32x2 *in, u32x2 *out) {
  __attribute__((shared)) u32x2 lds[64];
  int i = __builtin_amdgcn_workitem_id_x();
  lds[i] = in[i];
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  LDS char *from = own_part<4>((LDS char *)lds, i);
  out[i] = __builtin_bit_cast(u32x2, __builtin_amdgcn_ds_read_tr16_b64_v4i16((LDS s16x4 *)from));
}

// The same with nothing between the write and the read of another wave's bytes.
GLOBAL void transposed_too_early(const u32x2 *in, u32x2 *out) {
  __attribute__((shared)) u32x2 lds[128];
  int i = __builtin_amdgcn_workitem_id_x();
  lds[i] = in[i];
  __builtin_amdgcn_wave_barrier();
  LDS char *from = own_part<2>((LDS char *)lds, i % 64) + (1 - i / 64) * 512;
  out[i] = __builtin_bit_cast(u32x2, __builtin_amdgcn_ds_read_tr8_b64_v2i32((LDS s32x2 *)from));
}
