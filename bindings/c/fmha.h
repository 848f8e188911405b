#ifndef FMHA_H
#define FMHA_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// A chosen and loaded kernel with its scratch memory.
typedef struct FmhaPlan FmhaPlan;

// A tensor. Strides are in elements; head_dim has stride 1.
typedef struct FmhaTensor {
  // Device memory.
  void *data;
  // From sequence to sequence; 0 when packed. Paged K and V: from page to page.
  int64_t batch_stride;
  // From row to row.
  int64_t seqlen_stride;
  // From head to head.
  int64_t head_stride;
} FmhaTensor;

// One call. Optional pointers are null where they are not wanted.
typedef struct FmhaCall {
  // Sequences.
  int64_t batch;
  // Queries of a sequence; packed: of the longest.
  int64_t seqlen_q;
  // Keys of a sequence; packed: of the longest.
  int64_t seqlen_k;
  // Query heads, a multiple of num_heads_kv.
  int64_t num_heads_q;
  // Key and value heads.
  int64_t num_heads_kv;
  // Elements of a row of Q and K.
  int64_t head_dim_qk;
  // Elements of a row of V and O.
  int64_t head_dim_v;
  // Rows of a page; 0: K and V are not paged, the only value taken so far.
  int64_t page_size;
  // Q `[batch, seqlen_q, num_heads_q, head_dim_qk]`.
  struct FmhaTensor q;
  // K `[batch, seqlen_k, num_heads_kv, head_dim_qk]`.
  struct FmhaTensor k;
  // V `[batch, seqlen_k, num_heads_kv, head_dim_v]`.
  struct FmhaTensor v;
  // O `[batch, seqlen_q, num_heads_q, head_dim_v]`.
  struct FmhaTensor o;
  // Backward only.
  struct FmhaTensor dout;
  // Backward only.
  struct FmhaTensor dq;
  // Backward only.
  struct FmhaTensor dk;
  // Backward only.
  struct FmhaTensor dv;
  // `[batch, num_heads_q, seqlen_q]`, packed `[num_heads_q, total_q]`; null: not wanted.
  float *lse;
  // `[batch + 1]` on the device, or null; with cu_seqlens_k or not at all.
  const int32_t *cu_seqlens_q;
  // `[batch + 1]` on the device, or null.
  const int32_t *cu_seqlens_k;
  // `[batch, seqlen_k / page_size]`, or null.
  const int32_t *page_table;
  // `[batch, num_heads_kv]`, or null (1).
  const float *descale_q;
  // `[batch, num_heads_kv]`, or null (1).
  const float *descale_k;
  // `[batch, num_heads_kv]`, or null (1).
  const float *descale_v;
  // "0" (none), "t" and "b" (causal, top-left and bottom-right), "b:left,right" (window).
  const char *mask;
  // A CUstream of the device's primary context; null: the default stream.
  void *stream;
  // Multiplies Q K^T.
  float softmax_scale;
  // Of Q, K and V: 0 f16, 1 bf16, 2 e4m3fn.
  int32_t dtype;
  // Of O, counted likewise.
  int32_t dtype_o;
  // 0 forward, 1 backward (not taken so far).
  int32_t backward;
} FmhaCall;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Chooses and compiles a kernel; may take seconds, and waits for the stream of a packed call.
// Returns 0 and sets `*plan`, or not 0 (see `fmha_last_error`). A plan holds for the sizes, strides,
// types and present pointers of its call; packed, for its totals too. It runs on one stream at a time.
//
// # Safety
// `call` is null or a call whose `mask` is a C string and whose `cu_seqlens_*` are device memory;
// `plan` is null or writable.
int fmha_plan(const struct FmhaCall *call,
              struct FmhaPlan **plan);

// Queues the call on its stream and returns: it neither allocates on the device nor waits.
// Returns 0, or not 0 (see `fmha_last_error`) with nothing launched, unless the driver itself failed.
//
// # Safety
// `plan` is null or from `fmha_plan`; `call` is null or a call whose pointers are device memory as
// large as the plan's problem says, untouched by others until the work is done.
int fmha_run(const struct FmhaPlan *plan,
             const struct FmhaCall *call);

// Drops a plan whose work is done. Null is taken.
//
// # Safety
// `plan` is null or from `fmha_plan`, and not dropped before.
void fmha_drop(struct FmhaPlan *plan);

// What the last call on this thread that did not return 0 had to say; valid until the next such.
const char *fmha_last_error(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FMHA_H */
