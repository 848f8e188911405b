// A small forward attention, for the emulator's own tests: f16, head dim 64, one wave a 32-row query tile, four waves a
// workgroup, K and V staged through LDS by all of them, next tile prefetched into registers.
//   S^T = K Q^T   (32x32x8 MFMA: A = K from LDS, B = Q in registers)
//   O^T = V^T P^T (A = V^T from LDS, B = P straight from S's registers)
typedef _Float16 f16;
typedef f16 f16x4 __attribute__((ext_vector_type(4)));
typedef f16 f16x8 __attribute__((ext_vector_type(8)));
typedef float f32x16 __attribute__((ext_vector_type(16)));

constexpr int kHeadDim = 64, kTile = 32, kThreads = 256;
// Rows are padded so that neighbouring rows begin in different banks.
constexpr int kRow = kHeadDim + 8, kColumn = kTile + 4;

static __attribute__((device)) __attribute__((always_inline)) void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

static __attribute__((device)) __attribute__((always_inline)) float other_half(float x) {
  int lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((lane ^ 32) * 4, __builtin_bit_cast(int, x)));
}

// q, o: [num_q, 64]; k, v: [num_k, 64]; num_k a multiple of 32, num_q of 128; lse: [num_q], natural log.
extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads)))
void attention(const f16 *q, const f16 *k, const f16 *v, f16 *o, float *lse, int num_k, float scale_log2) {
  __attribute__((shared)) static f16 k_tile[kTile * kRow];
  __attribute__((shared)) static f16 v_tile[kHeadDim * kColumn];
  const int thread = __builtin_amdgcn_workitem_id_x(), lane = thread & 63, half = lane >> 5, column = lane & 31;
  const int row = __builtin_amdgcn_workgroup_id_x() * 128 + (thread >> 6) * 32 + column;

  f16x4 q_frag[kHeadDim / 8];
  for (int i = 0; i < kHeadDim / 8; i++) q_frag[i] = *(const f16x4 *)&q[row * kHeadDim + i * 8 + half * 4];

  f32x16 acc[2] = {};
  float row_max = -__builtin_inff(), row_sum = 0;

  // Each thread carries eight elements of K and of V.
  const int load_row = thread / 8, load_column = thread % 8 * 8;
  f16x8 k_next = *(const f16x8 *)&k[load_row * kHeadDim + load_column];
  f16x8 v_next = *(const f16x8 *)&v[load_row * kHeadDim + load_column];

  for (int start = 0; start < num_k; start += kTile) {
    barrier();
    *(f16x8 *)&k_tile[load_row * kRow + load_column] = k_next;
    for (int i = 0; i < 8; i++) v_tile[(load_column + i) * kColumn + load_row] = v_next[i];
    barrier();
    if (start + kTile < num_k) {
      k_next = *(const f16x8 *)&k[(start + kTile + load_row) * kHeadDim + load_column];
      v_next = *(const f16x8 *)&v[(start + kTile + load_row) * kHeadDim + load_column];
    }

    f32x16 s = {};
    for (int i = 0; i < kHeadDim / 8; i++)
      s = __builtin_amdgcn_mfma_f32_32x32x8f16(*(const f16x4 *)&k_tile[column * kRow + i * 8 + half * 4], q_frag[i], s, 0, 0, 0);

    float tile_max = s[0];
    for (int i = 1; i < 16; i++) tile_max = __builtin_fmaxf(tile_max, s[i]);
    tile_max = __builtin_fmaxf(tile_max, other_half(tile_max));
    const float new_max = __builtin_fmaxf(row_max, tile_max);
    const float rescale = __builtin_amdgcn_exp2f((row_max - new_max) * scale_log2);
    row_max = new_max;

    f16x4 p[4];
    float tile_sum = 0;
    for (int i = 0; i < 16; i++) {
      const float e = __builtin_amdgcn_exp2f((s[i] - new_max) * scale_log2);
      tile_sum += e;
      p[i / 4][i % 4] = (f16)e;
    }
    row_sum = row_sum * rescale + tile_sum;
    for (int d = 0; d < 2; d++) {
      acc[d] *= rescale;
      for (int i = 0; i < 4; i++)
        acc[d] = __builtin_amdgcn_mfma_f32_32x32x8f16(*(const f16x4 *)&v_tile[(d * 32 + column) * kColumn + i * 8 + half * 4], p[i], acc[d], 0, 0, 0);
    }
  }

  row_sum += other_half(row_sum);
  const float inverse = __builtin_amdgcn_rcpf(row_sum);
  for (int d = 0; d < 2; d++)
    for (int g = 0; g < 4; g++) {
      f16x4 out;
      for (int i = 0; i < 4; i++) out[i] = (f16)(acc[d][g * 4 + i] * inverse);
      *(f16x4 *)&o[row * kHeadDim + d * 32 + g * 8 + half * 4] = out;
    }
  if (half == 0) lse[row] = (row_max * scale_log2 + __builtin_amdgcn_logf(row_sum)) * 0.69314718f;
}
