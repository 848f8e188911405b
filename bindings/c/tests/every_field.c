// The C ABI as a C program meets it, on the CPU's backend. Each field of each struct is changed between
// the plan and the run, one at a time: the run must say its name and the number, and write nothing.
// Which fields have been tried is counted in bytes, so that a field that is added and not tried is found.

#include "../fmha.h"

#include <stdio.h>
#include <string.h>

enum { BATCH = 2, ROWS = 5, HEADS = 4, KV = 2, DIM = 8, PARTS = 3 };
enum { Q_ELEMS = BATCH * ROWS * HEADS * DIM, K_ELEMS = BATCH * ROWS * KV * DIM };
enum { LSE_ELEMS = BATCH * HEADS * ROWS };

static int failures = 0;
static int tried = 0;

#define CHECK(condition, ...)                  \
  do {                                         \
    if (!(condition)) {                        \
      ++failures;                              \
      printf("line %d: ", __LINE__);           \
      printf(__VA_ARGS__);                     \
      printf(" (%s)\n", fmha_last_error());    \
    }                                          \
  } while (0)

typedef enum Kind { INT64, UINT64, INT32, FLOAT, POINTER, TEXT, HOST_FLOAT, STRUCT, FREE } Kind;

typedef struct Field {
  const char *name;  // as the error says it
  size_t at, size;
  Kind kind;
} Field;

#define FIELD(type, field, kind) {#field, offsetof(type, field), sizeof(((type *)0)->field), kind}
#define TENSOR(type, field)                                                                       \
  {#field ".data", offsetof(type, field.data), sizeof(void *), FREE},                             \
      {#field ".batch_stride", offsetof(type, field.batch_stride), sizeof(int64_t), INT64},       \
      {#field ".seqlen_stride", offsetof(type, field.seqlen_stride), sizeof(int64_t), INT64},     \
      {#field ".head_stride", offsetof(type, field.head_stride), sizeof(int64_t), INT64},         \
      {#field ".dim_stride", offsetof(type, field.dim_stride), sizeof(int64_t), INT64}

static const Field CALL[] = {
    FIELD(FmhaCall, struct_bytes, UINT64),
    FIELD(FmhaCall, batch, INT64),
    FIELD(FmhaCall, seqlen_q, INT64),
    FIELD(FmhaCall, seqlen_k, INT64),
    FIELD(FmhaCall, num_heads_q, INT64),
    FIELD(FmhaCall, num_heads_kv, INT64),
    FIELD(FmhaCall, head_dim_qk, INT64),
    FIELD(FmhaCall, head_dim_v, INT64),
    FIELD(FmhaCall, total_q, INT64),
    FIELD(FmhaCall, total_k, INT64),
    FIELD(FmhaCall, page_size, INT64),
    FIELD(FmhaCall, num_pages, INT64),
    FIELD(FmhaCall, max_pages, INT64),
    TENSOR(FmhaCall, q),
    TENSOR(FmhaCall, k),
    TENSOR(FmhaCall, v),
    TENSOR(FmhaCall, o),
    TENSOR(FmhaCall, bias),
    FIELD(FmhaCall, lse, POINTER),
    FIELD(FmhaCall, keep_mask, POINTER),
    FIELD(FmhaCall, row_max, POINTER),
    FIELD(FmhaCall, head_max, POINTER),
    FIELD(FmhaCall, key_sum, POINTER),
    FIELD(FmhaCall, cu_seqlens_q, POINTER),
    FIELD(FmhaCall, cu_seqlens_k, POINTER),
    FIELD(FmhaCall, seqused_q, POINTER),
    FIELD(FmhaCall, seqused_k, POINTER),
    FIELD(FmhaCall, block_table, POINTER),
    FIELD(FmhaCall, alibi_slopes, POINTER),
    FIELD(FmhaCall, sink, POINTER),
    FIELD(FmhaCall, descale_q, POINTER),
    FIELD(FmhaCall, descale_k, POINTER),
    FIELD(FmhaCall, descale_v, POINTER),
    FIELD(FmhaCall, scale_o, POINTER),
    FIELD(FmhaCall, mask, TEXT),
    FIELD(FmhaCall, softmax_scale, HOST_FLOAT),
    FIELD(FmhaCall, softcap, HOST_FLOAT),
    FIELD(FmhaCall, stream, FREE),
    FIELD(FmhaCall, gradients, STRUCT),
    FIELD(FmhaCall, cache, STRUCT),
    FIELD(FmhaCall, part, STRUCT),
    FIELD(FmhaCall, code, STRUCT),
    FIELD(FmhaCall, lists, STRUCT),
    FIELD(FmhaCall, masks, STRUCT),
    FIELD(FmhaCall, block_scales, STRUCT),
    FIELD(FmhaCall, workspace, FREE),
    FIELD(FmhaCall, workspace_bytes, FREE),
    FIELD(FmhaCall, dropout_seed, FREE),
    FIELD(FmhaCall, dropout_offset, FREE),
    FIELD(FmhaCall, dropout_seeded, FREE),
    FIELD(FmhaCall, p_drop, FLOAT),
    FIELD(FmhaCall, dtype_qk, INT32),
    FIELD(FmhaCall, dtype_v, INT32),
    FIELD(FmhaCall, dtype_o, INT32),
    FIELD(FmhaCall, dtype_bias, INT32),
    FIELD(FmhaCall, v_layout, INT32),
    FIELD(FmhaCall, alibi_per_batch, INT32),
    FIELD(FmhaCall, descale_per_tensor, INT32),
    FIELD(FmhaCall, reserved, INT32),
};

static const Field GRADIENTS[] = {
    FIELD(FmhaGradients, struct_bytes, UINT64),
    TENSOR(FmhaGradients, dout),
    TENSOR(FmhaGradients, dq),
    TENSOR(FmhaGradients, dk),
    TENSOR(FmhaGradients, dv),
    TENSOR(FmhaGradients, dbias),
    FIELD(FmhaGradients, dlse, POINTER),
    FIELD(FmhaGradients, dsink, POINTER),
    FIELD(FmhaGradients, dtype_grad, INT32),
    FIELD(FmhaGradients, dtype_dbias, INT32),
};

static const Field CACHE[] = {
    FIELD(FmhaCache, struct_bytes, UINT64),
    FIELD(FmhaCache, seqlen_new, INT64),
    FIELD(FmhaCache, total_new, INT64),
    FIELD(FmhaCache, max_pos, INT64),
    TENSOR(FmhaCache, k_new),
    TENSOR(FmhaCache, v_new),
    FIELD(FmhaCache, cu_seqlens_new, POINTER),
    FIELD(FmhaCache, rotary_cos, POINTER),
    FIELD(FmhaCache, rotary_sin, POINTER),
    FIELD(FmhaCache, tree_mask, POINTER),
    FIELD(FmhaCache, rotary_dim, INT32),
    FIELD(FmhaCache, rotary_interleaved, INT32),
    FIELD(FmhaCache, dtype_rotary, INT32),
    FIELD(FmhaCache, dtype_cache, INT32),
    FIELD(FmhaCache, v_in_k, INT32),
    FIELD(FmhaCache, reserved, INT32),
};

static const Field PART[] = {
    FIELD(FmhaPart, struct_bytes, UINT64),
    FIELD(FmhaPart, position_q, INT64),
    FIELD(FmhaPart, position_k, INT64),
    FIELD(FmhaPart, seqlen_q, INT64),
    FIELD(FmhaPart, seqlen_k, INT64),
    FIELD(FmhaPart, batch, INT64),
    FIELD(FmhaPart, head, INT64),
    FIELD(FmhaPart, num_heads_q, INT64),
};

static const Field CODE[] = {
    FIELD(FmhaCode, struct_bytes, UINT64),
    FIELD(FmhaCode, score, TEXT),
    FIELD(FmhaCode, mask, TEXT),
    FIELD(FmhaCode, captured, POINTER),
    FIELD(FmhaCode, num_captured, INT64),
};

static const Field LISTS[] = {
    FIELD(FmhaLists, struct_bytes, UINT64),
    FIELD(FmhaLists, topk, INT64),
    FIELD(FmhaLists, indices, POINTER),
    FIELD(FmhaLists, batch_stride, INT64),
    FIELD(FmhaLists, seqlen_stride, INT64),
    FIELD(FmhaLists, head_stride, INT64),
    FIELD(FmhaLists, topk_length, POINTER),
    FIELD(FmhaLists, length_per_token, INT32),
    FIELD(FmhaLists, addresses, INT32),
    FIELD(FmhaLists, block, INT32),
    FIELD(FmhaLists, lse_without_sink, INT32),
};
static const Field MASKS[] = {
    FIELD(FmhaMasks, struct_bytes, UINT64),
    TENSOR(FmhaMasks, intervals),
    TENSOR(FmhaMasks, mask_bits),
    TENSOR(FmhaMasks, kv_num_blocks),
    TENSOR(FmhaMasks, kv_indices),
    TENSOR(FmhaMasks, full_kv_num_blocks),
    TENSOR(FmhaMasks, full_kv_indices),
    FIELD(FmhaMasks, endpoints, INT64),
    FIELD(FmhaMasks, intervals_heads, INT64),
    FIELD(FmhaMasks, mask_bits_heads, INT64),
    FIELD(FmhaMasks, lists_heads, INT64),
    FIELD(FmhaMasks, block_q, INT64),
    FIELD(FmhaMasks, block_k, INT64),
    FIELD(FmhaMasks, max_blocks, INT64),
    FIELD(FmhaMasks, full_max_blocks, INT64),
};

// One axis is read; the numbers and what belongs to further axes may be anything.
static const Field CAPTURED[] = {
    FIELD(FmhaCaptured, name, TEXT),
    FIELD(FmhaCaptured, data, POINTER),
    {"shape[0]", offsetof(FmhaCaptured, shape), sizeof(int64_t), INT64},
    {"shape", offsetof(FmhaCaptured, shape) + sizeof(int64_t), (FMHA_MAX_RANK - 1) * sizeof(int64_t), FREE},
    {"strides[0]", offsetof(FmhaCaptured, strides), sizeof(int64_t), INT64},
    {"strides", offsetof(FmhaCaptured, strides) + sizeof(int64_t), (FMHA_MAX_RANK - 1) * sizeof(int64_t), FREE},
    FIELD(FmhaCaptured, grad, POINTER),
    FIELD(FmhaCaptured, integer, FREE),
    FIELD(FmhaCaptured, real, FREE),
    FIELD(FmhaCaptured, num_dims, INT32),
    FIELD(FmhaCaptured, dtype_grad, INT32),
    FIELD(FmhaCaptured, reserved, INT32),
};

static const Field COMBINE[] = {
    FIELD(FmhaCombine, struct_bytes, UINT64),
    FIELD(FmhaCombine, num_parts, INT64),
    FIELD(FmhaCombine, batch, INT64),
    FIELD(FmhaCombine, seqlen_q, INT64),
    FIELD(FmhaCombine, num_heads_q, INT64),
    FIELD(FmhaCombine, head_dim_v, INT64),
    FIELD(FmhaCombine, parts, FREE),
    TENSOR(FmhaCombine, o),
    FIELD(FmhaCombine, lse, POINTER),
    FIELD(FmhaCombine, stream, FREE),
    FIELD(FmhaCombine, dtype_part, INT32),
    FIELD(FmhaCombine, dtype_o, INT32),
    FIELD(FmhaCombine, merge, INT32),
    FIELD(FmhaCombine, reserved, INT32),
};

// Every byte of the struct belongs to a field of the table.
static void covers(const char *name, const Field *fields, size_t count, size_t size) {
  unsigned char seen[1024] = {0};
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    for (size_t at = 0; at < fields[i].size; ++at) seen[fields[i].at + at] = 1;
  }
  for (size_t at = 0; at < size; ++at) bytes += seen[at];
  CHECK(bytes == size, "%s: fields of %zu of its %zu bytes are tried", name, bytes, size);
}

static float q[Q_ELEMS], k[K_ELEMS], v[K_ELEMS], o[Q_ELEMS], lse[LSE_ELEMS];
static float dout[Q_ELEMS], dq[Q_ELEMS], dk[K_ELEMS], dv[K_ELEMS];
static float part_o[PARTS][Q_ELEMS], part_lse[PARTS][LSE_ELEMS];
static float half = 0.5f, quarter = 0.25f;
static char other[64];

// Changes one field; the number or word that the error must say is in `said`.
static int spoil(void *call, const Field *field, char *said) {
  char *at = (char *)call + field->at;
  said[0] = 0;
  switch (field->kind) {
    case INT64:
    case UINT64: {
      int64_t value;
      memcpy(&value, at, sizeof value);
      value += 7;
      memcpy(at, &value, sizeof value);
      sprintf(said, " %lld", (long long)value);
      return 1;
    }
    case INT32: {
      int32_t value;
      memcpy(&value, at, sizeof value);
      value = value == 99 ? 98 : 99;
      memcpy(at, &value, sizeof value);
      sprintf(said, " %d", value);
      return 1;
    }
    case FLOAT:
      memcpy(at, &half, sizeof half);
      sprintf(said, " 0.5");
      return 1;
    case POINTER: {
      void *value;
      memcpy(&value, at, sizeof value);
      sprintf(said, value ? "null" : "given");
      value = value ? NULL : (void *)other;
      memcpy(at, &value, sizeof value);
      return 1;
    }
    case TEXT: {
      const char *value = "zz";
      memcpy(at, &value, sizeof value);
      sprintf(said, "zz");
      return 1;
    }
    case HOST_FLOAT: {
      const float *value = &quarter;
      memcpy(at, &value, sizeof value);
      sprintf(said, " 0.25");
      return 1;
    }
    case STRUCT: {
      void *value;
      memcpy(&value, at, sizeof value);
      sprintf(said, value ? "null" : "given");
      return 2;
    }
    case FREE: return 0;
  }
  return 0;
}

static FmhaTensor tensor(float *data, int heads) {
  FmhaTensor t = {0};
  t.data = data;
  t.batch_stride = (int64_t)ROWS * heads * DIM;
  t.seqlen_stride = (int64_t)heads * DIM;
  t.head_stride = DIM;
  t.dim_stride = 1;
  return t;
}

static FmhaCall good(void) {
  static const float scale = 0.3f;
  FmhaCall call = {0};
  call.struct_bytes = sizeof call;
  call.batch = BATCH;
  call.seqlen_q = call.seqlen_k = ROWS;
  call.num_heads_q = HEADS;
  call.num_heads_kv = KV;
  call.head_dim_qk = call.head_dim_v = DIM;
  call.q = tensor(q, HEADS);
  call.k = tensor(k, KV);
  call.v = tensor(v, KV);
  call.o = tensor(o, HEADS);
  call.lse = lse;
  call.mask = "b";
  call.softmax_scale = &scale;
  call.dtype_qk = call.dtype_v = call.dtype_o = FMHA_F32;
  return call;
}

static FmhaGradients good_gradients(void) {
  FmhaGradients gradients = {0};
  gradients.struct_bytes = sizeof gradients;
  gradients.dout = tensor(dout, HEADS);
  gradients.dq = tensor(dq, HEADS);
  gradients.dk = tensor(dk, KV);
  gradients.dv = tensor(dv, KV);
  gradients.dtype_grad = FMHA_F32;
  return gradients;
}

static FmhaCombine good_combine(FmhaPartial *parts) {
  FmhaCombine call = {0};
  call.struct_bytes = sizeof call;
  call.num_parts = PARTS;
  call.batch = BATCH;
  call.seqlen_q = ROWS;
  call.num_heads_q = HEADS;
  call.head_dim_v = DIM;
  for (int i = 0; i < PARTS; ++i) {
    parts[i].o = tensor(part_o[i], HEADS);
    parts[i].lse = part_lse[i];
  }
  call.parts = parts;
  call.o = tensor(o, HEADS);
  call.lse = lse;
  call.dtype_part = call.dtype_o = FMHA_F32;
  return call;
}

static void clear(void) {
  for (int i = 0; i < Q_ELEMS; ++i) o[i] = dq[i] = -77.0f;
  for (int i = 0; i < K_ELEMS; ++i) dk[i] = dv[i] = -77.0f;
  for (int i = 0; i < LSE_ELEMS; ++i) lse[i] = -77.0f;
}

static int untouched(void) {
  int same = 1;
  for (int i = 0; i < Q_ELEMS; ++i) same &= o[i] == -77.0f && dq[i] == -77.0f;
  for (int i = 0; i < K_ELEMS; ++i) same &= dk[i] == -77.0f && dv[i] == -77.0f;
  return same;
}

static void refused(int status, const char *name, const char *said) {
  ++tried;
  CHECK(status != 0, "%s: a changed field is taken", name);
  if (status) {
    const char *text = fmha_last_error();
    CHECK(strstr(text, name) != NULL, "%s is not named", name);
    CHECK(strstr(text, said) != NULL, "%s: `%s` is not said", name, said);
  }
  CHECK(untouched(), "%s: something was written", name);
}

static void forward_and_backward(const FmhaOptions *options) {
  FmhaPlan *forward = NULL, *backward = NULL;
  FmhaGradients gradients = good_gradients();
  FmhaCall call = good(), with = good();
  with.gradients = &gradients;
  CHECK(fmha_plan(&call, options, &forward) == 0, "forward is not planned");
  CHECK(fmha_plan(&with, options, &backward) == 0, "backward is not planned");
  FmhaCache no_cache = {0};
  no_cache.struct_bytes = sizeof no_cache;
  FmhaPart no_part = {0};
  no_part.struct_bytes = sizeof no_part;
  FmhaCode no_code = {0};
  no_code.struct_bytes = sizeof no_code;
  FmhaLists no_lists = {0};
  no_lists.struct_bytes = sizeof no_lists;
  FmhaMasks no_masks = {0};
  no_masks.struct_bytes = sizeof no_masks;
  FmhaBlockScales no_scales = {0};
  no_scales.struct_bytes = sizeof no_scales;
  if (!forward || !backward) return;
  CHECK(strstr(fmha_plan_text(forward), "kernel") != NULL, "a plan without a text");
  CHECK(fmha_run(forward, &call) == 0, "forward does not run");
  CHECK(o[0] == v[0], "the first query of a causal call sees the first key alone: %f", o[0]);
  CHECK(fmha_run(backward, &with) == 0, "backward does not run");
  CHECK(dv[0] == dv[0] && dv[0] != -77.0f, "no gradient: %f", dv[0]);

  char said[64];
  for (size_t i = 0; i < sizeof CALL / sizeof *CALL; ++i) {
    for (int kind = 0; kind < 2; ++kind) {
      FmhaCall bad = kind ? with : call;
      clear();
      switch (spoil(&bad, &CALL[i], said)) {
        case 0: continue;
        case 1: break;
        case 2:
          if (CALL[i].at == offsetof(FmhaCall, cache)) bad.cache = &no_cache;
          else if (CALL[i].at == offsetof(FmhaCall, part)) bad.part = &no_part;
          else if (CALL[i].at == offsetof(FmhaCall, code)) bad.code = &no_code;
          else if (CALL[i].at == offsetof(FmhaCall, lists)) bad.lists = &no_lists;
          else if (CALL[i].at == offsetof(FmhaCall, masks)) bad.masks = &no_masks;
          else if (CALL[i].at == offsetof(FmhaCall, block_scales)) bad.block_scales = &no_scales;
          else bad.gradients = kind ? NULL : &gradients;
          break;
      }
      refused(fmha_run(kind ? backward : forward, &bad), CALL[i].name, said);
    }
  }
  for (size_t i = 0; i < sizeof GRADIENTS / sizeof *GRADIENTS; ++i) {
    FmhaGradients bad = gradients;
    clear();
    if (!spoil(&bad, &GRADIENTS[i], said)) continue;
    FmhaCall bad_call = with;
    bad_call.gradients = &bad;
    refused(fmha_run(backward, &bad_call), GRADIENTS[i].name, said);
  }
  // A tensor that is null, and an optional one that was not planned.
  void *const data[] = {NULL};
  size_t tensors[] = {offsetof(FmhaCall, q.data), offsetof(FmhaCall, k.data), offsetof(FmhaCall, v.data),
                      offsetof(FmhaCall, o.data)};
  const char *names[] = {"q.data", "k.data", "v.data", "o.data"};
  for (int i = 0; i < 4; ++i) {
    FmhaCall bad = call;
    clear();
    memcpy((char *)&bad + tensors[i], data, sizeof *data);
    refused(fmha_run(forward, &bad), names[i], "null");
  }
  {
    FmhaCall bad = call;
    clear();
    bad.bias.data = other;
    refused(fmha_run(forward, &bad), "bias.data", "given");
  }
  // A scale of 0 is a scale: another one than the default, and a refusal where that was planned.
  const float zero = 0.0f;
  FmhaCall scaled = call;
  scaled.softmax_scale = NULL;
  FmhaPlan *by_default = NULL;
  CHECK(fmha_plan(&scaled, options, &by_default) == 0, "the default scale is not planned");
  scaled.softmax_scale = &zero;
  clear();
  refused(fmha_run(by_default, &scaled), "softmax_scale", " 0 ");
  FmhaPlan *flat = NULL;
  CHECK(fmha_plan(&scaled, options, &flat) == 0, "scale 0 is not planned");
  CHECK(fmha_run(flat, &scaled) == 0, "scale 0 does not run");
  CHECK(lse[1] > 0.693f && lse[1] < 0.694f, "scale 0: LSE of two keys is %f, not ln 2", lse[1]);
  // Scratch comes from the plan or from the caller, as the options said.
  FmhaCall scratch = call;
  scratch.workspace = other;
  scratch.workspace_bytes = sizeof other;
  clear();
  refused(fmha_run(forward, &scratch), "workspace", "given");
  scratch.workspace = NULL;
  refused(fmha_run(forward, &scratch), "workspace_bytes", " 64 ");
  FmhaOptions callers = *options;
  callers.caller_workspace = 1;
  FmhaPlan *shared = NULL;
  CHECK(fmha_plan(&call, &callers, &shared) == 0, "a plan without scratch of its own is not planned");
  CHECK(fmha_plan_workspace_bytes(shared) == 0, "the CPU's plan wants scratch");
  CHECK(fmha_plan_workspace_bytes(NULL) == 0, "no plan wants scratch");
  refused(fmha_run(shared, &scratch), "workspace_bytes", " 64 ");
  scratch.workspace = other;
  CHECK(fmha_run(shared, &scratch) == 0, "more scratch than is wanted is not taken");
  CHECK(fmha_run(shared, &call) == 0, "no scratch where none is wanted is not taken");
  fmha_drop(shared);
  // Kinds of plans do not mix.
  FmhaPartial parts[PARTS];
  FmhaCombine combine = good_combine(parts);
  clear();
  refused(fmha_run_combine(forward, &combine), "plan", "a plan of attention");
  fmha_drop(flat);
  fmha_drop(by_default);
  fmha_drop(backward);
  fmha_drop(forward);
}

// One new row a sequence, turned by a quarter; then each field of the cache changed.
static void appended(const FmhaOptions *options) {
  static float k_new[BATCH * KV * DIM], v_new[BATCH * KV * DIM], cosines[ROWS * DIM / 2], sines[ROWS * DIM / 2];
  static const int32_t used[BATCH] = {ROWS - 1, 2};
  for (int i = 0; i < BATCH * KV * DIM; ++i) k_new[i] = v_new[i] = (float)(i % 5) + 1.0f;
  for (int i = 0; i < ROWS * DIM / 2; ++i) sines[i] = 1.0f;
  FmhaCache cache = {0};
  cache.struct_bytes = sizeof cache;
  cache.seqlen_new = 1;
  cache.k_new = tensor(k_new, KV);
  cache.v_new = tensor(v_new, KV);
  cache.k_new.batch_stride = cache.v_new.batch_stride = KV * DIM;
  cache.max_pos = ROWS;
  cache.rotary_dim = DIM;
  cache.rotary_interleaved = 1;
  cache.rotary_cos = cosines;
  cache.rotary_sin = sines;
  cache.dtype_rotary = FMHA_F32;
  FmhaCall call = good();
  call.seqlen_q = 1;
  call.seqused_k = used;
  call.cache = &cache;
  FmhaPlan *plan = NULL;
  CHECK(fmha_plan(&call, options, &plan) == 0, "an append is not planned");
  if (!plan) return;
  CHECK(fmha_run(plan, &call) == 0, "an append does not run");
  const float *written = k + (ROWS - 1) * KV * DIM;
  CHECK(written[0] == -k_new[1] && written[1] == k_new[0], "a row is not turned: %f %f", written[0], written[1]);
  CHECK(v[(ROWS - 1) * KV * DIM] == v_new[0], "a value is not written: %f", v[(ROWS - 1) * KV * DIM]);
  char said[64];
  for (size_t i = 0; i < sizeof CACHE / sizeof *CACHE; ++i) {
    FmhaCache bad = cache;
    clear();
    if (!spoil(&bad, &CACHE[i], said)) continue;
    FmhaCall bad_call = call;
    bad_call.cache = &bad;
    refused(fmha_run(plan, &bad_call), CACHE[i].name, said);
  }
  clear();
  call.cache = NULL;
  refused(fmha_run(plan, &call), "cache", "null");
  fmha_drop(plan);
}

// The last queries of a sequence, as a part of it, give what they give inside it; then each field of the part changed.
static void parts_of_a_whole(const FmhaOptions *options) {
  enum { LAST = 2 };
  static float whole[Q_ELEMS];
  FmhaPart part = {0};
  part.struct_bytes = sizeof part;
  part.position_q = ROWS - LAST;
  part.seqlen_q = part.seqlen_k = ROWS;
  FmhaCall call = good();
  call.mask = "t";
  FmhaPlan *plan = NULL;
  CHECK(fmha_plan(&call, options, &plan) == 0 && fmha_run(plan, &call) == 0, "a whole does not run");
  memcpy(whole, o, sizeof whole);
  fmha_drop(plan);
  plan = NULL;
  call.seqlen_q = LAST;
  call.q.data = q + (ROWS - LAST) * HEADS * DIM;
  call.o.data = o + (ROWS - LAST) * HEADS * DIM;
  call.part = &part;
  clear();
  CHECK(fmha_plan(&call, options, &plan) == 0, "a part is not planned");
  if (!plan) return;
  CHECK(fmha_run(plan, &call) == 0, "a part does not run");
  for (int i = 0; i < Q_ELEMS; ++i) {
    int row = i / (HEADS * DIM) % ROWS;
    float away = o[i] - (row < ROWS - LAST ? -77.0f : whole[i]);
    CHECK(away < 1e-6f && away > -1e-6f, "element %d of a part is away by %f", i, away);
  }
  char said[64];
  for (size_t i = 0; i < sizeof PART / sizeof *PART; ++i) {
    FmhaPart bad = part;
    clear();
    spoil(&bad, &PART[i], said);
    FmhaCall bad_call = call;
    bad_call.part = &bad;
    refused(fmha_run(plan, &bad_call), PART[i].name, said);
  }
  clear();
  FmhaPart beyond = part;
  beyond.position_q = ROWS;
  call.part = &beyond;
  FmhaPlan *none = NULL;
  refused(fmha_plan(&call, options, &none), "position_q", "end at 7");
  fmha_drop(plan);
}

// Each token sees the last key that causal shows it, twice, and what is absent: O is that key's V. Then each field of
// the lists changed.
static void lists_of_a_call(const FmhaOptions *options) {
  static int32_t indices[BATCH * ROWS * KV * 3], lengths[BATCH];
  for (int i = 0; i < BATCH * ROWS * KV; ++i) {
    const int key = i / KV % ROWS;
    indices[3 * i] = indices[3 * i + 1] = key;
    indices[3 * i + 2] = ROWS;
  }
  for (int i = 0; i < BATCH; ++i) lengths[i] = 3;
  FmhaLists lists = {0};
  lists.struct_bytes = sizeof lists;
  lists.topk = 3;
  lists.indices = indices;
  lists.batch_stride = ROWS * KV * 3;
  lists.seqlen_stride = KV * 3;
  lists.head_stride = 3;
  lists.topk_length = lengths;
  FmhaCall call = good();
  call.lists = &lists;
  FmhaPlan *plan = NULL;
  CHECK(fmha_plan(&call, options, &plan) == 0, "lists are not planned");
  if (!plan) return;
  CHECK(fmha_run(plan, &call) == 0, "lists do not run");
  for (int row = 0; row < BATCH * ROWS; ++row) {
    const float away = o[row * HEADS * DIM] - v[row * KV * DIM];
    CHECK(away < 1e-6f && away > -1e-6f, "row %d is not the V of its key: %f", row, away);
  }
  char said[64];
  for (size_t i = 0; i < sizeof LISTS / sizeof *LISTS; ++i) {
    FmhaLists bad = lists;
    clear();
    if (!spoil(&bad, &LISTS[i], said)) continue;
    FmhaCall bad_call = call;
    bad_call.lists = &bad;
    refused(fmha_run(plan, &bad_call), LISTS[i].name, said);
  }
  fmha_drop(plan);
  // Gradients: each key's dV is the sum of dO over its rows.
  FmhaGradients gradients = good_gradients();
  call.gradients = &gradients;
  CHECK(fmha_plan(&call, options, &plan) == 0, "lists are not planned backward");
  CHECK(fmha_run(plan, &call) == 0, "lists do not run backward");
  lists.indices = NULL;
  clear();
  refused(fmha_run(plan, &call), "indices", "null, but 240 bytes are needed");
  fmha_drop(plan);
}

// A score and a mask as text: what they spell, the gradient of what is captured, then each field changed.
static void code_of_a_call(const FmhaOptions *options) {
  static float slopes[HEADS], dslopes[HEADS], whole[Q_ELEMS];
  FmhaCall call = good();
  FmhaPlan *plan = NULL;
  CHECK(fmha_plan(&call, options, &plan) == 0 && fmha_run(plan, &call) == 0, "causal does not run");
  memcpy(whole, o, sizeof whole);
  fmha_drop(plan);
  plan = NULL;
  FmhaCaptured captured = {0};
  captured.name = "slopes";
  captured.data = slopes;
  captured.shape[0] = HEADS;
  captured.strides[0] = 1;
  captured.num_dims = 1;
  FmhaCode code = {0};
  code.struct_bytes = sizeof code;
  code.score = "slopes: f32[_]; s + slopes[h] * (k - q)";
  code.mask = "k - seqlen_k <= q - seqlen_q";
  code.captured = &captured;
  code.num_captured = 1;
  call.mask = NULL;
  call.code = &code;
  clear();
  CHECK(fmha_plan(&call, options, &plan) == 0, "code is not planned");
  if (!plan) return;
  CHECK(fmha_run(plan, &call) == 0, "code does not run");
  for (int i = 0; i < Q_ELEMS; ++i) {
    float away = o[i] - whole[i];
    CHECK(away < 1e-6f && away > -1e-6f, "element %d of causal as code is away by %f", i, away);
  }
  fmha_drop(plan);
  plan = NULL;
  FmhaGradients gradients = good_gradients();
  captured.grad = dslopes;
  captured.dtype_grad = FMHA_F32;
  call.gradients = &gradients;
  dslopes[0] = -77.0f;
  CHECK(fmha_plan(&call, options, &plan) == 0, "code is not planned backward");
  if (!plan) return;
  CHECK(fmha_run(plan, &call) == 0, "code does not run backward");
  CHECK(dslopes[0] == dslopes[0] && dslopes[0] != 0.0f && dslopes[0] != -77.0f, "no gradient: %f", dslopes[0]);
  char said[64];
  for (size_t i = 0; i < sizeof CODE / sizeof *CODE; ++i) {
    FmhaCode bad = code;
    clear();
    spoil(&bad, &CODE[i], said);
    FmhaCall bad_call = call;
    bad_call.code = &bad;
    refused(fmha_run(plan, &bad_call), CODE[i].name, said);
  }
  for (size_t i = 0; i < sizeof CAPTURED / sizeof *CAPTURED; ++i) {
    FmhaCaptured bad = captured;
    clear();
    if (!spoil(&bad, &CAPTURED[i], said)) continue;
    FmhaCode bad_code = code;
    bad_code.captured = &bad;
    FmhaCall bad_call = call;
    bad_call.code = &bad_code;
    refused(fmha_run(plan, &bad_call), CAPTURED[i].name, said);
  }
  clear();
  code.mask = "k <= q or k <";
  FmhaPlan *none = NULL;
  refused(fmha_plan(&call, options, &none), "mask: column 14, the end", "a value is expected here");
  fmha_drop(plan);
}

// Masks as data that spell causal, forward and backward, then each field changed.
static void masks_of_a_call(const FmhaOptions *options) {
  static float whole[Q_ELEMS];
  static int32_t ends[2][ROWS], counts[ROWS], indices[ROWS][ROWS];
  static uint32_t words[ROWS];
  FmhaCall call = good();
  FmhaPlan *plan = NULL;
  CHECK(fmha_plan(&call, options, &plan) == 0 && fmha_run(plan, &call) == 0, "causal does not run");
  memcpy(whole, o, sizeof whole);
  fmha_drop(plan);
  plan = NULL;
  for (int row = 0; row < ROWS; ++row) {
    ends[1][row] = counts[row] = row + 1;
    words[row] = (2u << row) - 1;
    for (int i = 0; i < ROWS; ++i) indices[row][i] = i;
  }
  FmhaMasks masks = {0};
  masks.struct_bytes = sizeof masks;
  masks.endpoints = 2;
  masks.intervals_heads = masks.mask_bits_heads = masks.lists_heads = 1;
  masks.block_q = masks.block_k = 1;
  masks.max_blocks = ROWS;
  FmhaTensor by_rows = {ends, 0, 1, 2 * ROWS, ROWS}, of_words = {words, 0, 1, ROWS, 1};
  FmhaTensor of_counts = {counts, 0, 1, ROWS, 1}, of_indices = {indices, 0, ROWS, ROWS * ROWS, 1};
  masks.intervals = by_rows;
  masks.mask_bits = of_words;
  masks.kv_num_blocks = of_counts;
  masks.kv_indices = of_indices;
  FmhaGradients gradients = good_gradients();
  call.mask = NULL;
  call.masks = &masks;
  clear();
  CHECK(fmha_plan(&call, options, &plan) == 0, "masks are not planned");
  if (!plan) return;
  CHECK(fmha_run(plan, &call) == 0, "masks do not run");
  for (int i = 0; i < Q_ELEMS; ++i) {
    float away = o[i] - whole[i];
    CHECK(away < 1e-6f && away > -1e-6f, "element %d of causal as data is away by %f", i, away);
  }
  char said[64];
  for (size_t i = 0; i < sizeof MASKS / sizeof *MASKS; ++i) {
    FmhaMasks bad = masks;
    clear();
    if (!spoil(&bad, &MASKS[i], said)) continue;
    FmhaCall bad_call = call;
    bad_call.masks = &bad;
    refused(fmha_run(plan, &bad_call), MASKS[i].name, said);
  }
  const size_t data[] = {offsetof(FmhaMasks, intervals.data), offsetof(FmhaMasks, mask_bits.data),
                         offsetof(FmhaMasks, kv_num_blocks.data), offsetof(FmhaMasks, kv_indices.data)};
  const char *names[] = {"intervals.data", "mask_bits.data", "kv_num_blocks.data", "kv_indices.data"};
  for (size_t i = 0; i < sizeof data / sizeof *data; ++i) {
    FmhaMasks bad = masks;
    memset((char *)&bad + data[i], 0, sizeof(void *));
    FmhaCall bad_call = call;
    bad_call.masks = &bad;
    clear();
    refused(fmha_run(plan, &bad_call), names[i], "null");
  }
  fmha_drop(plan);
  plan = NULL;
  call.gradients = &gradients;
  CHECK(fmha_plan(&call, options, &plan) == 0, "masks are not planned backward");
  if (!plan) return;
  clear();
  CHECK(fmha_run(plan, &call) == 0, "masks do not run backward");
  CHECK(dv[0] == dv[0] && dv[0] != -77.0f, "no gradient: %f", dv[0]);
  fmha_drop(plan);
}

// Memory of a backend: what goes in comes out, and more than there is does not.
static void buffers(const FmhaOptions *options) {
  FmhaBuffer *buffer = NULL;
  float back[4] = {0};
  CHECK(fmha_buffer(options, sizeof back, &buffer) == 0, "no buffer");
  if (!buffer) return;
  CHECK(fmha_buffer_data(buffer) != NULL && fmha_buffer_data(NULL) == NULL, "a buffer without an address");
  CHECK(fmha_upload(buffer, q, sizeof back) == 0 && fmha_download(buffer, back, sizeof back) == 0, "no copies");
  CHECK(memcmp(back, q, sizeof back) == 0, "what came out is not what went in");
  clear();
  refused(fmha_upload(buffer, q, sizeof back + 1), "bytes", "17");
  refused(fmha_download(buffer, back, sizeof back + 1), "bytes", "17");
  refused(fmha_upload(buffer, NULL, 4), "from", "null");
  refused(fmha_download(buffer, NULL, 4), "to", "null");
  refused(fmha_upload(NULL, q, 4), "buffer", "null");
  refused(fmha_buffer(options, 4, NULL), "buffer", "null");
  fmha_drop_buffer(buffer);
  fmha_drop_buffer(NULL);
}

// Parts that are added, whose LSE nobody reads: alone, to what O holds, and none of them.
static void added(const FmhaOptions *options, FmhaCombine call) {
  FmhaPartial parts[PARTS];
  for (int i = 0; i < PARTS; ++i) {
    parts[i].o = tensor(part_o[i], HEADS);
    parts[i].lse = NULL;
  }
  call.parts = parts;
  for (int adds_to = 0; adds_to < 2; ++adds_to) {
    for (int count = 0; count <= PARTS; count += PARTS) {
      FmhaPlan *plan = NULL;
      call.merge = adds_to ? FMHA_ADD_TO : FMHA_SUM;
      call.num_parts = count;
      if (!count) call.parts = NULL;
      call.lse = lse;
      clear();
      refused(fmha_plan_combine(&call, options, &plan), "write_lse", "no LSE");
      call.lse = NULL;
      CHECK(fmha_plan_combine(&call, options, &plan) == 0, "a sum of %d parts is not planned", count);
      if (!plan) return;
      for (int i = 0; i < Q_ELEMS; ++i) o[i] = 0.5f;
      CHECK(fmha_run_combine(plan, &call) == 0, "a sum of %d parts does not run", count);
      for (int i = 0; i < Q_ELEMS; ++i) {
        float wanted = (adds_to ? 0.5f : 0.0f) + (float)count * part_o[0][i];
        CHECK(o[i] == wanted, "element %d of a sum of %d parts is %f, not %f", i, count, o[i], wanted);
      }
      call.merge = adds_to ? FMHA_SUM : FMHA_ADD_TO;
      clear();
      refused(fmha_run_combine(plan, &call), "merge", adds_to ? " 1 " : " 2 ");
      fmha_drop(plan);
      call.parts = parts;
    }
  }
  FmhaPlan *plan = NULL;
  call.merge = 3;
  refused(fmha_plan_combine(&call, options, &plan), "merge", " 3 ");
  call.merge = FMHA_SUM;
  call.reserved = 1;
  refused(fmha_plan_combine(&call, options, &plan), "reserved", " 1 ");
}

static void combine(const FmhaOptions *options) {
  FmhaPartial parts[PARTS];
  FmhaCombine call = good_combine(parts);
  FmhaPlan *plan = NULL;
  CHECK(fmha_plan_combine(&call, options, &plan) == 0, "combine is not planned");
  if (!plan) return;
  CHECK(fmha_run_combine(plan, &call) == 0, "combine does not run");
  // Three equal parts: their O, and ln 3 more.
  CHECK(o[9] - part_o[0][9] < 1e-6f && part_o[0][9] - o[9] < 1e-6f, "combined %f of %f", o[9], part_o[0][9]);
  CHECK(lse[3] > 1.0986f && lse[3] < 1.0987f, "LSE %f, not ln 3", lse[3]);
  char said[64];
  for (size_t i = 0; i < sizeof COMBINE / sizeof *COMBINE; ++i) {
    FmhaCombine bad = call;
    clear();
    // Parts beyond the array are refused before they are read: fewer is what can be tried here.
    if (i == 1) {
      bad.num_parts = PARTS - 1;
      sprintf(said, " %d", PARTS - 1);
    } else if (!spoil(&bad, &COMBINE[i], said)) {
      continue;
    }
    refused(fmha_run_combine(plan, &bad), COMBINE[i].name, said);
  }
  clear();
  parts[2].o.head_stride += 1;
  refused(fmha_run_combine(plan, &call), "parts[2].o.head_stride", " 9 ");
  parts[2].o.head_stride -= 1;
  parts[1].lse = NULL;
  refused(fmha_run_combine(plan, &call), "parts[1].lse", "null");
  FmhaCall attention = good();
  refused(fmha_run(plan, &attention), "plan", "a plan of combine");
  fmha_drop(plan);
  added(options, call);
}

// What a plan refuses by itself.
static void plans(const FmhaOptions *options) {
  FmhaPlan *plan = NULL;
#define REFUSED_PLAN(name, said, ...)                   \
  do {                                                  \
    FmhaCall call = good();                             \
    FmhaOptions how = *options;                         \
    (void)how;                                          \
    clear();                                            \
    __VA_ARGS__;                                        \
    refused(fmha_plan(&call, &how, &plan), name, said); \
  } while (0)
  REFUSED_PLAN("struct_bytes", " 8 ", call.struct_bytes = 8);
  REFUSED_PLAN("batch", " -3 ", call.batch = -3);
  REFUSED_PLAN("num_heads_q", " 3 ", call.num_heads_q = 3);
  REFUSED_PLAN("head_dim_qk", " 0 ", call.head_dim_qk = 0);
  REFUSED_PLAN("total_q", " 10 ", call.total_q = 10);
  REFUSED_PLAN("block_table", "page_size is 16", call.page_size = 16);
  REFUSED_PLAN("block_table", "page_size is 0", call.block_table = (int32_t *)other);
  REFUSED_PLAN("num_pages", " 4 ", call.num_pages = 4);
  REFUSED_PLAN("cu_seqlens_k", "page_size is 16", call.page_size = 16; call.cu_seqlens_k = (int32_t *)other);
  REFUSED_PLAN("dtype_qk", " 99 ", call.dtype_qk = 99);
  REFUSED_PLAN("dtype_v", "f16", call.dtype_v = FMHA_F16);
  REFUSED_PLAN("dtype_bias", " 1 ", call.dtype_bias = 1);
  REFUSED_PLAN("v_layout", " 2 ", call.v_layout = 2);
  REFUSED_PLAN("alibi_per_batch", " 1 ", call.alibi_per_batch = 1);
  REFUSED_PLAN("p_drop", " 1.5 ", call.p_drop = 1.5f);
  REFUSED_PLAN("mask", "zz", call.mask = "zz");
  REFUSED_PLAN("q.dim", " 2 ", call.q.dim_stride = 2);
  REFUSED_PLAN("descale_q", "f32", call.descale_q = &half);
  REFUSED_PLAN("struct_bytes", " 1 ", how.struct_bytes = 1);
  REFUSED_PLAN("tpu", "tpu", how.backend = "tpu");
  REFUSED_PLAN("no-such-kernel", "no-such-kernel", how.kernel = "no-such-kernel");
  REFUSED_PLAN("tile", "128", how.tile = "128");
  REFUSED_PLAN("allow_fallback", " 7 ", how.allow_fallback = 7);
  REFUSED_PLAN("accuracy", " 2 ", how.accuracy = 2);
  REFUSED_PLAN("deterministic", " 2 ", how.deterministic = 2);
  REFUSED_PLAN("batch_invariant", " -1 ", how.batch_invariant = -1);
  REFUSED_PLAN("row_invariant", " 2 ", how.row_invariant = 2);
  REFUSED_PLAN("check_lengths", " 5 ", how.check_lengths = 5);
  REFUSED_PLAN("caller_workspace", " 5 ", how.caller_workspace = 5);
  CHECK(plan == NULL, "a refused plan is set");
  FmhaCall call = good();
  refused(fmha_plan(NULL, options, &plan), "call", "null");
  refused(fmha_plan(&call, options, NULL), "plan", "null");
  refused(fmha_run(NULL, &call), "plan", "null");
  fmha_drop(NULL);
}

int main(void) {
  FmhaOptions options = {0};
  options.struct_bytes = sizeof options;
  options.backend = "cpu";
  for (int i = 0; i < Q_ELEMS; ++i) q[i] = dout[i] = part_o[0][i] = part_o[1][i] = part_o[2][i] = (float)(i % 11) / 8;
  for (int i = 0; i < K_ELEMS; ++i) k[i] = v[i] = (float)(i % 7) / 4 - 0.5f;
  covers("FmhaCall", CALL, sizeof CALL / sizeof *CALL, sizeof(FmhaCall));
  covers("FmhaGradients", GRADIENTS, sizeof GRADIENTS / sizeof *GRADIENTS, sizeof(FmhaGradients));
  covers("FmhaCache", CACHE, sizeof CACHE / sizeof *CACHE, sizeof(FmhaCache));
  covers("FmhaPart", PART, sizeof PART / sizeof *PART, sizeof(FmhaPart));
  covers("FmhaLists", LISTS, sizeof LISTS / sizeof *LISTS, sizeof(FmhaLists));
  covers("FmhaCode", CODE, sizeof CODE / sizeof *CODE, sizeof(FmhaCode));
  covers("FmhaMasks", MASKS, sizeof MASKS / sizeof *MASKS, sizeof(FmhaMasks));
  covers("FmhaCaptured", CAPTURED, sizeof CAPTURED / sizeof *CAPTURED, sizeof(FmhaCaptured));
  covers("FmhaCombine", COMBINE, sizeof COMBINE / sizeof *COMBINE, sizeof(FmhaCombine));
  plans(&options);
  forward_and_backward(&options);
  appended(&options);
  parts_of_a_whole(&options);
  code_of_a_call(&options);
  lists_of_a_call(&options);
  masks_of_a_call(&options);
  combine(&options);
  buffers(&options);
  printf("%d wrong structs tried, %d failures\n", tried, failures);
  return failures != 0;
}
