// The C ABI as a C program meets it, on the CPU's backend. Each field of each struct is made wrong, one at a time: the
// plan or the run must say its name and the value, and write nothing. Which fields have been tried is counted in bytes,
// so that a field that is added and not tried is found.

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

// SIZE is a number that is not negative, CODE one of a few, MORE a number that a run may not raise, POINTER an address
// that is there or not; FREE may be anything.
typedef enum Kind { SIZE, BYTES, STRIDE, CODE, MORE, PROBABILITY, NUMBER, POINTER, TEXT, FREE } Kind;

typedef struct Field {
  const char *name;  // as the error says it
  size_t at, size;
  Kind kind;
} Field;

#define FIELD(type, field, kind) {#field, offsetof(type, field), sizeof(((type *)0)->field), kind}
#define STRIDES(type, field, kind) {#field, offsetof(type, field), sizeof(FmhaStrides), kind}
// A struct with its size and nothing else.
#define NEW(type, name) type name = {.struct_bytes = sizeof(type)}
#define COUNT(fields) (sizeof(fields) / sizeof *(fields))

// Tables of fields that are named as the header names them, and that are wrong as others of their type.
#include "fields.h"

static const Field FmhaLists_FIELDS[] = {
    FIELD(FmhaLists, struct_bytes, BYTES),
    FIELD(FmhaLists, topk, SIZE),
    {"indices", offsetof(FmhaLists, batch_stride), 3 * sizeof(int64_t), STRIDE},
    FIELD(FmhaLists, length, CODE),
    FIELD(FmhaLists, addresses, CODE),
    FIELD(FmhaLists, block, FREE),
    FIELD(FmhaLists, lse_without_sink, CODE),
};

static const Field FmhaMasks_FIELDS[] = {
    FIELD(FmhaMasks, struct_bytes, BYTES),
    STRIDES(FmhaMasks, intervals, STRIDE),
    // Five keys are one word.
    {"mask_bits", offsetof(FmhaMasks, mask_bits), 3 * sizeof(int64_t), STRIDE},
    {"mask_bits", offsetof(FmhaMasks, mask_bits.dim_stride), sizeof(int64_t), FREE},
    // Counts have no axis behind that of the blocks.
    {"kv_num_blocks", offsetof(FmhaMasks, kv_num_blocks), 3 * sizeof(int64_t), STRIDE},
    {"kv_num_blocks", offsetof(FmhaMasks, kv_num_blocks.dim_stride), sizeof(int64_t), FREE},
    STRIDES(FmhaMasks, kv_indices, STRIDE),
    {"full_kv_num_blocks", offsetof(FmhaMasks, full_kv_num_blocks), 3 * sizeof(int64_t), STRIDE},
    {"full_kv_num_blocks", offsetof(FmhaMasks, full_kv_num_blocks.dim_stride), sizeof(int64_t), FREE},
    STRIDES(FmhaMasks, full_kv_indices, STRIDE),
    FIELD(FmhaMasks, endpoints, SIZE),
    FIELD(FmhaMasks, intervals_heads, SIZE),
    FIELD(FmhaMasks, mask_bits_heads, SIZE),
    FIELD(FmhaMasks, lists_heads, SIZE),
    FIELD(FmhaMasks, block_q, SIZE),
    FIELD(FmhaMasks, block_k, SIZE),
    FIELD(FmhaMasks, max_blocks, SIZE),
    FIELD(FmhaMasks, full_max_blocks, SIZE),
    FIELD(FmhaMasks, partial, CODE),
    FIELD(FmhaMasks, full, CODE),
};

static const Field FmhaBlockScales_FIELDS[] = {
    FIELD(FmhaBlockScales, struct_bytes, BYTES),
    // A row of Q and K is one block, as are the keys of V.
    {"block_scale_q", offsetof(FmhaBlockScales, q), 3 * sizeof(int64_t), STRIDE},
    {"block_scale_q", offsetof(FmhaBlockScales, q.dim_stride), sizeof(int64_t), FREE},
    {"block_scale_k", offsetof(FmhaBlockScales, k), 3 * sizeof(int64_t), STRIDE},
    {"block_scale_k", offsetof(FmhaBlockScales, k.dim_stride), sizeof(int64_t), FREE},
    {"block_scale_v", offsetof(FmhaBlockScales, v.batch_stride), sizeof(int64_t), STRIDE},
    {"block_scale_v", offsetof(FmhaBlockScales, v.seqlen_stride), sizeof(int64_t), FREE},
    {"block_scale_v", offsetof(FmhaBlockScales, v.head_stride), 2 * sizeof(int64_t), STRIDE},
    FIELD(FmhaBlockScales, format, CODE),
    FIELD(FmhaBlockScales, reserved, CODE),
};

// One axis is read; what belongs to further axes may be anything.
static const Field FmhaCaptured_FIELDS[] = {
    {"captured zz", offsetof(FmhaCaptured, name), sizeof(char *), TEXT},
    {"-3 is not in", offsetof(FmhaCaptured, shape), sizeof(int64_t), SIZE},
    {"shape", offsetof(FmhaCaptured, shape) + sizeof(int64_t), (FMHA_MAX_RANK - 1) * sizeof(int64_t), FREE},
    {"captured slopes: stride", offsetof(FmhaCaptured, strides), sizeof(int64_t), STRIDE},
    {"strides", offsetof(FmhaCaptured, strides) + sizeof(int64_t), (FMHA_MAX_RANK - 1) * sizeof(int64_t), FREE},
    FIELD(FmhaCaptured, num_dims, CODE),
    FIELD(FmhaCaptured, dtype_grad, CODE),
    FIELD(FmhaCaptured, write_grad, CODE),
    FIELD(FmhaCaptured, reserved, CODE),
};

static const Field FmhaCapturedArgs_FIELDS[] = {
    {"captured slopes.data", offsetof(FmhaCapturedArgs, data), sizeof(void *), POINTER},
    {"captured slopes.grad", offsetof(FmhaCapturedArgs, grad), sizeof(void *), POINTER},
    FIELD(FmhaCapturedArgs, integer, FREE),
    FIELD(FmhaCapturedArgs, real, FREE),
    FIELD(FmhaCapturedArgs, reserved, CODE),
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

static float q[Q_ELEMS], k[K_ELEMS], v[K_ELEMS], o[Q_ELEMS], lse[LSE_ELEMS], bias[ROWS * ROWS];
static float dout[Q_ELEMS], dq[Q_ELEMS], dk[K_ELEMS], dv[K_ELEMS], dbias[ROWS * ROWS];
static float part_o[PARTS][Q_ELEMS], part_lse[PARTS][LSE_ELEMS];
static char other[64];

// Ways in which a field can be wrong: a stride on each axis, anything else once.
static size_t ways(const Field *field) {
  return field->kind == FREE ? 0 : field->kind == STRIDE ? field->size / sizeof(int64_t) : 1;
}

// Makes one field wrong; what the error must say is in `said`.
static void spoil(void *of, const Field *field, size_t way, char *said) {
  static const float nan = 0.0f / 0.0f, above = 1.5f;
  static const float *const no_number = &nan;
  static const char *const no_text = "zz";
  char *at = (char *)of + field->at + way * sizeof(int64_t);
  int64_t number = 0;
  int32_t code = 99;
  void *pointer = NULL;
  switch (field->kind) {
    case SIZE:
    case STRIDE:
      number = field->kind == SIZE ? -3 : -1;
      memcpy(at, &number, sizeof number);
      sprintf(said, "%lld", (long long)number);
      break;
    case BYTES:
    case MORE:
      memcpy(&number, at, sizeof number);
      number += field->kind == BYTES ? -8 : 7;
      memcpy(at, &number, sizeof number);
      sprintf(said, " %lld", (long long)number);
      break;
    case CODE:
      memcpy(at, &code, sizeof code);
      sprintf(said, "99");
      break;
    case PROBABILITY:
      memcpy(at, &above, sizeof above);
      sprintf(said, " 1.5");
      break;
    case NUMBER:
      memcpy(at, &no_number, sizeof no_number);
      sprintf(said, "NaN");
      break;
    case POINTER:
      memcpy(&pointer, at, sizeof pointer);
      sprintf(said, pointer ? "null" : "given");
      pointer = pointer ? NULL : other;
      memcpy(at, &pointer, sizeof pointer);
      break;
    case TEXT:
      memcpy(at, &no_text, sizeof no_text);
      sprintf(said, "zz");
      break;
    case FREE: break;
  }
}

static FmhaStrides strides(int heads) {
  FmhaStrides s = {(int64_t)ROWS * heads * DIM, (int64_t)heads * DIM, DIM, 1};
  return s;
}

static FmhaProblem good(void) {
  static const float scale = 0.3f;
  NEW(FmhaProblem, problem);
  problem.batch = BATCH;
  problem.seqlen_q = problem.seqlen_k = ROWS;
  problem.num_heads_q = HEADS;
  problem.num_heads_kv = KV;
  problem.head_dim_qk = problem.head_dim_v = DIM;
  problem.q = problem.o = strides(HEADS);
  problem.k = problem.v = strides(KV);
  problem.write_lse = 1;
  problem.mask = "b";
  problem.softmax_scale = &scale;
  problem.dtype_qk = problem.dtype_v = problem.dtype_o = FMHA_F32;
  return problem;
}

static FmhaArgs good_args(void) {
  NEW(FmhaArgs, args);
  args.q = q;
  args.k = k;
  args.v = v;
  args.o = o;
  args.lse = lse;
  return args;
}

static FmhaGradients good_gradients(void) {
  NEW(FmhaGradients, gradients);
  gradients.dout = gradients.dq = strides(HEADS);
  gradients.dk = gradients.dv = strides(KV);
  gradients.dtype_grad = FMHA_F32;
  return gradients;
}

static FmhaArgs with_gradients(FmhaArgs args) {
  args.dout = dout;
  args.dq = dq;
  args.dk = dk;
  args.dv = dv;
  return args;
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
  for (int i = 0; i < LSE_ELEMS; ++i) same &= lse[i] == -77.0f;
  return same;
}

static void refused(int status, const char *name, const char *said) {
  ++tried;
  CHECK(status != 0, "%s: a wrong field is taken", name);
  if (status) {
    const char *text = fmha_last_error();
    CHECK(strstr(text, name) != NULL, "%s is not named", name);
    CHECK(strstr(text, said) != NULL, "%s: `%s` is not said", name, said);
  }
  CHECK(untouched(), "%s: something was written", name);
}

// The status of a call whose error has to say a name besides its field's.
static int names(const char *name, int status) {
  CHECK(strstr(fmha_last_error(), name) != NULL, "%s is not named", name);
  return status;
}

static FmhaPlan *planned(const FmhaProblem *problem, const char *what) {
  FmhaPlan *plan = NULL;
  CHECK(fmha_plan("cpu", problem, NULL, &plan) == 0, "%s: not planned", what);
  return plan;
}

// Plans and runs, and drops the plan.
static void ran(const FmhaProblem *problem, const FmhaArgs *args, const char *what) {
  FmhaPlan *plan = planned(problem, what);
  CHECK(fmha_run(plan, args) == 0, "%s: does not run", what);
  fmha_drop(plan);
}

// Makes each field of `given` wrong, in a copy that is `bad`, and tries the call.
#define REFUSES(type, given, call)                                    \
  do {                                                                \
    char said[64];                                                    \
    for (size_t i = 0; i < COUNT(type##_FIELDS); ++i) {               \
      for (size_t way = 0; way < ways(&type##_FIELDS[i]); ++way) {    \
        type bad = (given);                                           \
        clear();                                                      \
        spoil(&bad, &type##_FIELDS[i], way, said);                    \
        refused(call, type##_FIELDS[i].name, said);                   \
      }                                                               \
    }                                                                 \
  } while (0)

// Makes a plan, which has to be refused and not set, where a part of the problem is for this time another one.
static int plan_with(const FmhaProblem *problem, void *part, const void *bad, size_t size) {
  char saved[1024];
  FmhaPlan *none = NULL;
  memcpy(saved, part, size);
  memcpy(part, bad, size);
  const int status = fmha_plan("cpu", problem, NULL, &none);
  memcpy(part, saved, size);
  CHECK(none == NULL, "a refused plan is set");
  return status;
}

#define PLANS_REFUSE(type, part) REFUSES(type, part, plan_with(&problem, &part, &bad, sizeof bad))

// Makes each argument wrong, and runs.
static void runs_refuse(const FmhaPlan *plan, const FmhaArgs *args) {
  REFUSES(FmhaArgs, *args, fmha_run(plan, &bad));
}

static void forward_and_backward(void) {
  FmhaProblem problem = good();
  problem.bias_kind = FMHA_BIAS_ELEMENTWISE;
  problem.dtype_bias = FMHA_F32;
  problem.bias.seqlen_stride = ROWS;
  problem.bias.dim_stride = 1;
  FmhaArgs args = good_args();
  args.bias = bias;
  FmhaPlan *plan = planned(&problem, "forward");
  CHECK(strstr(fmha_plan_text(plan), "kernel") != NULL, "a plan without a text");
  CHECK(fmha_run(plan, &args) == 0, "forward does not run");
  CHECK(o[0] == v[0], "the first query of a causal call sees the first key alone: %f", o[0]);
  PLANS_REFUSE(FmhaProblem, problem);
  runs_refuse(plan, &args);
  fmha_drop(plan);

  FmhaGradients gradients = good_gradients();
  gradients.write_dbias = 1;
  gradients.dtype_dbias = FMHA_F32;
  gradients.dbias = problem.bias;
  problem.gradients = &gradients;
  args = with_gradients(args);
  args.dbias = dbias;
  plan = planned(&problem, "backward");
  CHECK(fmha_run(plan, &args) == 0, "backward does not run");
  CHECK(dv[0] == dv[0] && dv[0] != -77.0f, "no gradient: %f", dv[0]);
  PLANS_REFUSE(FmhaGradients, gradients);
  runs_refuse(plan, &args);
  fmha_drop(plan);
}

// A scale of 0 is a scale: another one than the default.
static void scales(void) {
  const float zero = 0.0f;
  FmhaProblem problem = good();
  FmhaArgs args = good_args();
  problem.softmax_scale = &zero;
  ran(&problem, &args, "scale 0");
  CHECK(lse[1] > 0.693f && lse[1] < 0.694f, "scale 0: LSE of two keys is %f, not ln 2", lse[1]);
}

// Scratch comes from the plan or from the caller, as the options said.
static void scratch(void) {
  FmhaProblem problem = good();
  FmhaArgs args = good_args(), brings = args;
  brings.workspace = other;
  brings.workspace_bytes = sizeof other;
  FmhaPlan *own = planned(&problem, "a plan with scratch of its own"), *shared = NULL;
  clear();
  refused(fmha_run(own, &brings), "workspace", "given");
  fmha_drop(own);
  NEW(FmhaOptions, options);
  options.caller_workspace = 1;
  CHECK(fmha_plan("cpu", &problem, &options, &shared) == 0, "a plan without scratch of its own is not planned");
  CHECK(fmha_plan_workspace_bytes(shared) == 0, "the CPU's plan wants scratch");
  CHECK(fmha_plan_workspace_bytes(NULL) == 0, "no plan wants scratch");
  CHECK(fmha_run(shared, &brings) == 0, "more scratch than is wanted is not taken");
  CHECK(fmha_run(shared, &args) == 0, "no scratch where none is wanted is not taken");
  brings.workspace = NULL;
  clear();
  refused(fmha_run(shared, &brings), "workspace_bytes", " 64 ");
  fmha_drop(shared);
}

// Two new rows a sequence, turned by a quarter.
static void appended(void) {
  enum { NEW = 2, NEW_ELEMS = BATCH * NEW * KV * DIM, OLD = ROWS - NEW };
  static float k_new[NEW_ELEMS], v_new[NEW_ELEMS], cosines[ROWS * DIM / 2], sines[ROWS * DIM / 2];
  static const int32_t used[BATCH] = {OLD, 1};
  for (int i = 0; i < NEW_ELEMS; ++i) k_new[i] = v_new[i] = (float)(i % 5) + 1.0f;
  for (int i = 0; i < ROWS * DIM / 2; ++i) sines[i] = 1.0f;
  NEW(FmhaCache, cache);
  cache.seqlen_new = NEW;
  cache.k_new = cache.v_new = strides(KV);
  cache.k_new.batch_stride = cache.v_new.batch_stride = NEW * KV * DIM;
  cache.max_pos = ROWS;
  cache.rotary_dim = DIM;
  cache.rotary_interleaved = 1;
  cache.dtype_rotary = FMHA_F32;
  FmhaProblem problem = good();
  problem.seqlen_q = 1;
  problem.seqused_k = 1;
  problem.cache = &cache;
  FmhaArgs args = good_args();
  args.seqused_k = used;
  args.k_new = k_new;
  args.v_new = v_new;
  args.rotary_cos = cosines;
  args.rotary_sin = sines;
  FmhaPlan *plan = planned(&problem, "an append");
  CHECK(fmha_run(plan, &args) == 0, "an append does not run");
  const float *written = k + OLD * KV * DIM;
  CHECK(written[0] == -k_new[1] && written[1] == k_new[0], "a row is not turned: %f %f", written[0], written[1]);
  CHECK(v[OLD * KV * DIM] == v_new[0], "a value is not written: %f", v[OLD * KV * DIM]);
  PLANS_REFUSE(FmhaCache, cache);
  runs_refuse(plan, &args);
  fmha_drop(plan);
}

// The last queries of a sequence, as a part of it, give what they give inside it.
static void parts_of_a_whole(void) {
  enum { LAST = 2 };
  static float whole[Q_ELEMS];
  NEW(FmhaPart, part);
  part.position_q = ROWS - LAST;
  part.seqlen_q = part.seqlen_k = ROWS;
  FmhaProblem problem = good();
  problem.mask = "t";
  FmhaArgs args = good_args();
  ran(&problem, &args, "a whole");
  memcpy(whole, o, sizeof whole);
  problem.seqlen_q = LAST;
  args.q = q + (ROWS - LAST) * HEADS * DIM;
  args.o = o + (ROWS - LAST) * HEADS * DIM;
  problem.part = &part;
  clear();
  ran(&problem, &args, "a part");
  for (int i = 0; i < Q_ELEMS; ++i) {
    int row = i / (HEADS * DIM) % ROWS;
    float away = o[i] - (row < ROWS - LAST ? -77.0f : whole[i]);
    CHECK(away < 1e-6f && away > -1e-6f, "element %d of a part is away by %f", i, away);
  }
  PLANS_REFUSE(FmhaPart, part);
  part.position_q = ROWS;
  FmhaPlan *none = NULL;
  clear();
  refused(fmha_plan("cpu", &problem, NULL, &none), "position_q", "end at 7");
}

// Each token sees the last key that causal shows it, twice, and what is absent: O is that key's V.
static void lists_of_a_call(void) {
  static int32_t indices[BATCH * ROWS * KV * 3], lengths[BATCH];
  for (int i = 0; i < BATCH * ROWS * KV; ++i) {
    const int key = i / KV % ROWS;
    indices[3 * i] = indices[3 * i + 1] = key;
    indices[3 * i + 2] = ROWS;
  }
  for (int i = 0; i < BATCH; ++i) lengths[i] = 3;
  NEW(FmhaLists, lists);
  lists.topk = 3;
  lists.batch_stride = ROWS * KV * 3;
  lists.seqlen_stride = KV * 3;
  lists.head_stride = 3;
  lists.length = FMHA_LENGTH_PER_SEQUENCE;
  FmhaProblem problem = good();
  problem.lists = &lists;
  FmhaArgs args = good_args();
  args.indices = indices;
  args.topk_length = lengths;
  FmhaPlan *plan = planned(&problem, "lists");
  CHECK(fmha_run(plan, &args) == 0, "lists do not run");
  for (int row = 0; row < BATCH * ROWS; ++row) {
    const float away = o[row * HEADS * DIM] - v[row * KV * DIM];
    CHECK(away < 1e-6f && away > -1e-6f, "row %d is not the V of its key: %f", row, away);
  }
  PLANS_REFUSE(FmhaLists, lists);
  runs_refuse(plan, &args);
  fmha_drop(plan);
  // Gradients: each key's dV is the sum of dO over its rows.
  FmhaGradients gradients = good_gradients();
  problem.gradients = &gradients;
  args = with_gradients(args);
  ran(&problem, &args, "lists backward");
}

// Each row sees the keys of its causal mask in the first cache, and the same keys again in a second by its intervals:
// every weight is halved, and O stays. Lists of the second's keys are refused as those of the first.
static void second_of_a_call(void) {
  static float whole[Q_ELEMS];
  static int32_t ends[2][ROWS], indices[BATCH * ROWS * KV];
  FmhaProblem problem = good();
  FmhaArgs args = good_args();
  ran(&problem, &args, "causal");
  memcpy(whole, o, sizeof whole);
  for (int row = 0; row < ROWS; ++row) ends[1][row] = row + 1;
  NEW(FmhaMasks, masks);
  FmhaStrides by_rows = {0, 1, 2 * ROWS, ROWS};
  masks.endpoints = 2;
  masks.intervals_heads = 1;
  masks.intervals = by_rows;
  NEW(FmhaSecond, second);
  second.seqlen_k = ROWS;
  second.k = second.v = strides(KV);
  second.masks = &masks;
  NEW(FmhaSecondArgs, second_args);
  second_args.k = k;
  second_args.v = v;
  second_args.intervals = ends[0];
  problem.second = &second;
  args.second = &second_args;
  clear();
  FmhaPlan *plan = planned(&problem, "a second cache");
  CHECK(fmha_run(plan, &args) == 0, "a second cache does not run");
  for (int i = 0; i < Q_ELEMS; ++i) {
    const float away = o[i] - whole[i];
    CHECK(away < 1e-5f && away > -1e-5f, "element %d is not that of one cache: %f", i, away);
  }
  PLANS_REFUSE(FmhaSecond, second);
  runs_refuse(plan, &args);
  FmhaArgs at = args;
  REFUSES(FmhaSecondArgs, second_args, (at.second = &bad, names("second", fmha_run(plan, &at))));
  fmha_drop(plan);
  FmhaPlan *none = NULL;
  masks.mask_bits_heads = 1;
  refused(fmha_plan("cpu", &problem, NULL, &none), "second.masks.mask_bits_heads", "intervals alone");
  NEW(FmhaLists, lists);
  lists.topk = 1;
  lists.batch_stride = ROWS * KV;
  lists.seqlen_stride = KV;
  lists.head_stride = 1;
  second.masks = NULL;
  second.lists = &lists;
  second_args.intervals = NULL;
  second_args.indices = indices;
  plan = planned(&problem, "lists of a second cache");
  CHECK(fmha_run(plan, &args) == 0, "lists of a second cache do not run");
  CHECK(o[0] - v[0] < 1e-6f && v[0] - o[0] < 1e-6f, "the first row sees the first key twice: %f", o[0]);
  clear();
  second_args.indices = NULL;
  refused(fmha_run(plan, &args), "second.indices", "null");
  lists.topk = -1;
  refused(fmha_plan("cpu", &problem, NULL, &none), "second.topk", "-1");
  fmha_drop(plan);
}

// A score and a mask as text: what they spell, and the gradient of what is captured.
static void code_of_a_call(void) {
  static float slopes[HEADS], dslopes[HEADS], whole[Q_ELEMS];
  FmhaProblem problem = good();
  FmhaArgs args = good_args();
  ran(&problem, &args, "causal");
  memcpy(whole, o, sizeof whole);
  FmhaCaptured captured = {0};
  captured.name = "slopes";
  captured.shape[0] = HEADS;
  captured.strides[0] = 1;
  captured.num_dims = 1;
  FmhaCapturedArgs captured_args = {0};
  captured_args.data = slopes;
  NEW(FmhaCode, code);
  code.score = "slopes: f32[_]; s + slopes[h] * (k - q)";
  code.mask = "k - seqlen_k <= q - seqlen_q";
  code.captured = &captured;
  code.num_captured = 1;
  problem.mask = NULL;
  problem.code = &code;
  args.captured = &captured_args;
  clear();
  ran(&problem, &args, "code");
  for (int i = 0; i < Q_ELEMS; ++i) {
    float away = o[i] - whole[i];
    CHECK(away < 1e-6f && away > -1e-6f, "element %d of causal as code is away by %f", i, away);
  }
  FmhaGradients gradients = good_gradients();
  captured.write_grad = 1;
  captured.dtype_grad = FMHA_F32;
  captured_args.grad = dslopes;
  problem.gradients = &gradients;
  args = with_gradients(args);
  dslopes[0] = -77.0f;
  FmhaPlan *plan = planned(&problem, "code backward");
  CHECK(fmha_run(plan, &args) == 0, "code does not run backward");
  CHECK(dslopes[0] == dslopes[0] && dslopes[0] != 0.0f && dslopes[0] != -77.0f, "no gradient: %f", dslopes[0]);
  PLANS_REFUSE(FmhaCode, code);
  PLANS_REFUSE(FmhaCaptured, captured);
  runs_refuse(plan, &args);
  FmhaArgs at = args;
  REFUSES(FmhaCapturedArgs, captured_args, (at.captured = &bad, fmha_run(plan, &at)));
  code.mask = "k <= q or k <";
  FmhaPlan *none = NULL;
  refused(fmha_plan("cpu", &problem, NULL, &none), "mask: column 14, the end", "a value is expected here");
  fmha_drop(plan);
}

// An object that is built from the masks of a call, read in their place.
static void built_masks(const FmhaPlan *plan, const FmhaArgs *tensors, const float *whole) {
  FmhaMaskObject *object = NULL;
  FmhaArgs args = good_args();
  clear();
  CHECK(fmha_mask_object(plan, NULL, &args, &object) == 0, "no mask object");
  args.built = object;
  refused(fmha_run(plan, &args), "mask", "built 0 times");
  refused(fmha_build_mask(object, plan, &args), "built", "given");
  refused(fmha_build_mask(NULL, plan, tensors), "object", "null");
  refused(fmha_build_mask(object, NULL, tensors), "plan", "null");
  refused(fmha_build_mask(object, plan, NULL), "args", "null");
  refused(fmha_mask_object(plan, NULL, NULL, &object), "args", "null");
  refused(fmha_mask_object(plan, NULL, tensors, NULL), "object", "null");
  refused(fmha_mask_object(NULL, plan, tensors, &object), "backward", "a plan of forward");
  CHECK(fmha_build_mask(object, plan, tensors) == 0, "a mask object is not built");
  CHECK(fmha_run(plan, &args) == 0, "a mask object does not run");
  for (int i = 0; i < Q_ELEMS; ++i) {
    float away = o[i] - whole[i];
    CHECK(away < 1e-6f && away > -1e-6f, "element %d of built masks is away by %f", i, away);
  }
  FmhaProblem plain = good();
  FmhaPlan *without = planned(&plain, "no masks");
  clear();
  refused(fmha_run(without, &args), "built", "given");
  fmha_drop(without);
  fmha_drop_mask_object(object);
  fmha_drop_mask_object(NULL);
}

// Masks as data that spell causal, forward and backward.
static void masks_of_a_call(void) {
  static float whole[Q_ELEMS];
  static int32_t ends[2][ROWS], counts[ROWS], full_counts[ROWS], indices[ROWS][ROWS];
  static uint32_t words[ROWS];
  FmhaProblem problem = good();
  FmhaArgs args = good_args();
  ran(&problem, &args, "causal");
  memcpy(whole, o, sizeof whole);
  for (int row = 0; row < ROWS; ++row) {
    ends[1][row] = counts[row] = row + 1;
    words[row] = (2u << row) - 1;
    for (int i = 0; i < ROWS; ++i) indices[row][i] = i;
  }
  NEW(FmhaMasks, masks);
  masks.endpoints = 2;
  // All heads have the same.
  masks.intervals_heads = masks.mask_bits_heads = masks.lists_heads = HEADS;
  masks.block_q = masks.block_k = 1;
  masks.partial = masks.full = 1;
  masks.max_blocks = masks.full_max_blocks = ROWS;
  FmhaStrides by_rows = {0, 1, 0, ROWS}, of_words = {0, 1, 0, 1};
  FmhaStrides of_counts = {0, 1, 0, 1}, of_indices = {0, ROWS, 0, 1};
  masks.intervals = by_rows;
  masks.mask_bits = of_words;
  masks.kv_num_blocks = masks.full_kv_num_blocks = of_counts;
  masks.kv_indices = masks.full_kv_indices = of_indices;
  args.intervals = ends[0];
  args.mask_bits = words;
  args.kv_num_blocks = counts;
  args.full_kv_num_blocks = full_counts;
  args.kv_indices = args.full_kv_indices = indices[0];
  problem.mask = NULL;
  problem.masks = &masks;
  clear();
  FmhaPlan *plan = planned(&problem, "masks");
  CHECK(fmha_run(plan, &args) == 0, "masks do not run");
  for (int i = 0; i < Q_ELEMS; ++i) {
    float away = o[i] - whole[i];
    CHECK(away < 1e-6f && away > -1e-6f, "element %d of causal as data is away by %f", i, away);
  }
  PLANS_REFUSE(FmhaMasks, masks);
  runs_refuse(plan, &args);
  built_masks(plan, &args, whole);
  fmha_drop(plan);
  FmhaGradients gradients = good_gradients();
  problem.gradients = &gradients;
  args = with_gradients(args);
  clear();
  ran(&problem, &args, "masks backward");
  CHECK(dv[0] == dv[0] && dv[0] != -77.0f, "no gradient: %f", dv[0]);
}

// E4M3 elements of 1 with scales of 1: O is 1.
static void scales_by_blocks(void) {
  static uint8_t ones[Q_ELEMS], scales[Q_ELEMS];
  memset(ones, 0x38, sizeof ones);
  memset(scales, 127, sizeof scales);
  NEW(FmhaBlockScales, block_scales);
  FmhaStrides of_q = {ROWS * HEADS, HEADS, 1, 1}, of_k = {ROWS * KV, KV, 1, 1};
  block_scales.format = FMHA_MXFP8_E4M3;
  block_scales.q = of_q;
  block_scales.k = of_k;
  block_scales.v = strides(KV);
  FmhaProblem problem = good();
  problem.block_scales = &block_scales;
  FmhaArgs args = good_args();
  args.q = ones;
  args.k = args.v = ones;
  args.block_scale_q = args.block_scale_k = args.block_scale_v = scales;
  FmhaPlan *plan = planned(&problem, "scales by blocks");
  CHECK(fmha_run(plan, &args) == 0, "scales by blocks do not run");
  CHECK(o[9] > 0.999f && o[9] < 1.001f, "scales by blocks: O is %f, not 1", o[9]);
  PLANS_REFUSE(FmhaBlockScales, block_scales);
  runs_refuse(plan, &args);
  fmha_drop(plan);
}

// Memory of a device: what goes in comes out, and more than there is does not.
static void buffers(void) {
  FmhaBuffer *buffer = NULL;
  float back[4] = {0};
  CHECK(fmha_buffer("cpu", sizeof back, &buffer) == 0, "no buffer");
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
  refused(fmha_buffer("cpu", 4, NULL), "buffer", "null");
  refused(fmha_buffer("tpu", 4, &buffer), "tpu", "tpu");
  fmha_drop_buffer(buffer);
  fmha_drop_buffer(NULL);
}

static FmhaCombineProblem good_combine(void) {
  NEW(FmhaCombineProblem, problem);
  problem.num_parts = PARTS;
  problem.batch = BATCH;
  problem.seqlen_q = ROWS;
  problem.num_heads_q = HEADS;
  problem.head_dim_v = DIM;
  problem.part = problem.o = strides(HEADS);
  problem.dtype_part = problem.dtype_o = FMHA_F32;
  problem.write_lse = 1;
  return problem;
}

static FmhaPlan *planned_combine(const FmhaCombineProblem *problem, const char *what) {
  FmhaPlan *plan = NULL;
  CHECK(fmha_plan_combine("cpu", problem, NULL, &plan) == 0, "%s: not planned", what);
  return plan;
}

// Parts that are added, whose LSE nobody reads: alone, to what O holds, and none of them.
static void added(void) {
  FmhaPartial parts[PARTS];
  for (int i = 0; i < PARTS; ++i) {
    parts[i].o = part_o[i];
    parts[i].lse = NULL;
  }
  FmhaCombineProblem problem = good_combine();
  NEW(FmhaCombineArgs, args);
  args.o = o;
  FmhaPlan *none = NULL;
  problem.merge = FMHA_SUM;
  clear();
  refused(fmha_plan_combine("cpu", &problem, NULL, &none), "write_lse", "no LSE");
  problem.write_lse = 0;
  for (int adds_to = 0; adds_to < 2; ++adds_to) {
    for (int count = 0; count <= PARTS; count += PARTS) {
      problem.merge = adds_to ? FMHA_ADD_TO : FMHA_SUM;
      problem.num_parts = count;
      args.parts = count ? parts : NULL;
      FmhaPlan *plan = planned_combine(&problem, "a sum");
      for (int i = 0; i < Q_ELEMS; ++i) o[i] = 0.5f;
      CHECK(fmha_run_combine(plan, &args) == 0, "a sum of %d parts does not run", count);
      for (int i = 0; i < Q_ELEMS; ++i) {
        float wanted = (adds_to ? 0.5f : 0.0f) + (float)count * part_o[0][i];
        CHECK(o[i] == wanted, "element %d of a sum of %d parts is %f, not %f", i, count, o[i], wanted);
      }
      fmha_drop(plan);
    }
  }
}

static void combine(void) {
  FmhaPartial parts[PARTS];
  for (int i = 0; i < PARTS; ++i) {
    parts[i].o = part_o[i];
    parts[i].lse = part_lse[i];
  }
  FmhaCombineProblem problem = good_combine();
  NEW(FmhaCombineArgs, args);
  args.parts = parts;
  args.o = o;
  args.lse = lse;
  FmhaPlan *plan = planned_combine(&problem, "combine");
  CHECK(fmha_run_combine(plan, &args) == 0, "combine does not run");
  // Three equal parts: their O, and ln 3 more.
  CHECK(o[9] - part_o[0][9] < 1e-6f && part_o[0][9] - o[9] < 1e-6f, "combined %f of %f", o[9], part_o[0][9]);
  CHECK(lse[3] > 1.0986f && lse[3] < 1.0987f, "LSE %f, not ln 3", lse[3]);
  FmhaPlan *none = NULL;
  REFUSES(FmhaCombineProblem, problem, fmha_plan_combine("cpu", &bad, NULL, &none));
  REFUSES(FmhaCombineArgs, args, fmha_run_combine(plan, &bad));
  clear();
  parts[1].lse = NULL;
  refused(fmha_run_combine(plan, &args), "parts[1].lse", "null");
  parts[2].o = NULL;
  parts[1].lse = part_lse[1];
  refused(fmha_run_combine(plan, &args), "parts[2].o", "null");
  // Kinds of plans do not mix.
  FmhaArgs attention = good_args();
  refused(fmha_run(plan, &attention), "plan", "a plan of combine");
  fmha_drop(plan);
  FmhaProblem whole = good();
  plan = planned(&whole, "attention");
  refused(fmha_run_combine(plan, &args), "plan", "a plan of attention");
  fmha_drop(plan);
  problem.write_lse = 0;
  parts[2].o = part_o[2];
  plan = planned_combine(&problem, "combine without LSE");
  refused(fmha_run_combine(plan, &args), "lse", "given");
  fmha_drop(plan);
}

// Makes each field of a choice and of its arguments wrong.
static void choice_refuses(const FmhaChooseProblem *problem, const FmhaPlan *plan, const FmhaChooseArgs *args) {
  FmhaPlan *none = NULL;
  REFUSES(FmhaChooseProblem, *problem, fmha_plan_choose("cpu", &bad, NULL, &none));
  REFUSES(FmhaChooseArgs, *args, fmha_run_choose(plan, &bad));
}

// An indexer's two greatest keys of each row, and then the same by its scores, which are given.
static void choose(void) {
  static float weights[BATCH * ROWS * 2], scores[BATCH * ROWS * ROWS];
  static int32_t indices[BATCH * ROWS * 2], again[BATCH * ROWS * 2];
  for (int i = 0; i < BATCH * ROWS * 2; ++i) weights[i] = 1.0f;
  NEW(FmhaChooseProblem, problem);
  problem.batch = BATCH;
  problem.seqlen_q = problem.seqlen_k = ROWS;
  problem.topk = problem.num_heads = 2;
  problem.head_dim = DIM;
  problem.dtype_q = problem.dtype_k = FMHA_F32;
  problem.write_scores = 1;
  NEW(FmhaChooseArgs, args);
  args.q = q;
  args.k = k;
  args.weights = weights;
  args.indices = indices;
  args.scores = o;
  FmhaPlan *plan = NULL;
  CHECK(fmha_plan_choose("cpu", &problem, NULL, &plan) == 0, "a choice is not planned");
  CHECK(fmha_run_choose(plan, &args) == 0, "a choice does not run");
  memcpy(scores, o, sizeof scores);
  CHECK(indices[0] == 0 && indices[1] == -1, "the first row has one candidate: %d %d", indices[0], indices[1]);
  CHECK(scores[1] < -1e30f, "a later key scores %f", scores[1]);
  choice_refuses(&problem, plan, &args);
  FmhaArgs attention = good_args();
  refused(fmha_run(plan, &attention), "plan", "a plan of a choice");
  fmha_drop(plan);
  NEW(FmhaChooseProblem, given);
  given.batch = BATCH;
  given.seqlen_q = given.seqlen_k = ROWS;
  given.topk = 2;
  NEW(FmhaChooseArgs, given_args);
  given_args.given = scores;
  given_args.indices = again;
  plan = NULL;
  CHECK(fmha_plan_choose("cpu", &given, NULL, &plan) == 0, "a choice of given scores is not planned");
  CHECK(fmha_run_choose(plan, &given_args) == 0, "a choice of given scores does not run");
  CHECK(memcmp(indices, again, sizeof indices) == 0, "given scores choose other keys");
  choice_refuses(&given, plan, &given_args);
  fmha_drop(plan);
}

// An indexer's loss and its gradients, over lists of the first two keys.
static void index_loss(void) {
  static float weights[BATCH * ROWS * 2], loss[BATCH * ROWS], target[BATCH * ROWS * 2];
  static int32_t indices[BATCH * ROWS * 2];
  for (int i = 0; i < BATCH * ROWS * 2; ++i) {
    weights[i] = 1.0f;
    indices[i] = i % 2;
    target[i] = 1.0f + i % 2;
  }
  NEW(FmhaIndexLoss, call);
  call.batch = BATCH;
  call.seqlen_q = call.seqlen_k = ROWS;
  call.topk = call.num_heads = 2;
  call.head_dim = DIM;
  call.q = q;
  call.k = k;
  call.weights = weights;
  call.indices = indices;
  call.target = target;
  call.loss = loss;
  call.dq = dq;
  call.dk = dk;
  call.dtype_q = call.dtype_k = FMHA_F32;
  CHECK(fmha_index_loss("cpu", &call) == 0, "an indexer's loss is not computed");
  for (int i = 0; i < BATCH * ROWS; ++i) CHECK(loss[i] >= -1e-6f, "a loss is %f", loss[i]);
  clear();
  refused(fmha_index_loss("cuda:x", &call), "device", "cuda:x");
  uint64_t scratch = 7;
  CHECK(fmha_index_loss_workspace("cpu", &call, &scratch) == 0 && scratch == 0, "the CPU wants scratch");
  REFUSES(FmhaIndexLoss, call, fmha_index_loss("cpu", &bad));
}

// Contiguous strides.
static FmhaStrides packed(int rows, int heads, int dim) {
  FmhaStrides s = {(int64_t)rows * heads * dim, (int64_t)heads * dim, dim, 1};
  return s;
}

// A tensor in NVFP4, its scale written, and then with that scale given.
static void quantize(void) {
  // Of K's numbers, in rows of two blocks: a stride of an axis of one is nobody's.
  enum { LOW = 2, LONG = K_ELEMS / (BATCH * LOW * KV), PAIRS = (LONG + 1) / 2, BLOCKS = (LONG + 15) / 16 };
  static uint8_t elements[BATCH * LOW * KV * PAIRS], again[BATCH * LOW * KV * PAIRS];
  static uint8_t scales[BATCH * LOW * KV * BLOCKS];
  float scale = 0.0f, most = 0.0f;
  for (int i = 0; i < K_ELEMS; ++i) most = k[i] > most ? k[i] : -k[i] > most ? -k[i] : most;
  NEW(FmhaQuantizeProblem, problem);
  problem.batch = BATCH;
  problem.seqlen = LOW;
  problem.num_heads = KV;
  problem.dim = LONG;
  problem.x = packed(LOW, KV, LONG);
  problem.elements = packed(LOW, KV, PAIRS);
  problem.scales = packed(LOW, KV, BLOCKS);
  problem.dtype = FMHA_F32;
  problem.format = FMHA_NVFP4;
  problem.scale_of_tensor = FMHA_SCALE_WRITTEN;
  NEW(FmhaQuantizeArgs, args);
  args.x = k;
  args.elements = elements;
  args.scales = scales;
  args.written_scale = &scale;
  FmhaPlan *plan = NULL, *none = NULL;
  for (int way_of_scale = 0; way_of_scale < 2; ++way_of_scale) {
    CHECK(fmha_plan_quantize("cpu", &problem, NULL, &plan) == 0, "a conversion is not planned");
    CHECK(fmha_run_quantize(plan, &args) == 0, "a conversion does not run");
    REFUSES(FmhaQuantizeProblem, problem, fmha_plan_quantize("cpu", &bad, NULL, &none));
    REFUSES(FmhaQuantizeArgs, args, fmha_run_quantize(plan, &bad));
    FmhaArgs attention = good_args();
    refused(fmha_run(plan, &attention), "plan", "a plan of a conversion");
    fmha_drop(plan);
    plan = NULL;
    problem.scale_of_tensor = FMHA_SCALE_GIVEN;
    args.written_scale = NULL;
    args.tensor_scale = &scale;
    args.elements = again;
  }
  CHECK(scale > 0.9999f * most / 2688 && scale < 1.0001f * most / 2688, "scale %g of %g", scale, most);
  CHECK(memcmp(elements, again, sizeof elements) == 0, "a given scale makes other elements");
}

// What a plan refuses beside numbers that are no numbers of their field.
static void plans(void) {
  FmhaPlan *plan = NULL;
#define REFUSED_PLAN(name, said, ...)                             \
  do {                                                            \
    FmhaProblem problem = good();                                 \
    clear();                                                      \
    __VA_ARGS__;                                                  \
    refused(fmha_plan("cpu", &problem, NULL, &plan), name, said); \
  } while (0)
  REFUSED_PLAN("num_heads_q", " 3 ", problem.num_heads_q = 3);
  REFUSED_PLAN("head_dim_qk", " 0 ", problem.head_dim_qk = 0);
  REFUSED_PLAN("packed_k", "page_size is 16", problem.page_size = 16; problem.packed_k = 1);
  REFUSED_PLAN("dtype_v", "f16", problem.dtype_v = FMHA_F16);
  REFUSED_PLAN("dtype_bias", " 1 ", problem.dtype_bias = 1);
  REFUSED_PLAN("q.dim", " 2 ", problem.q.dim_stride = 2);
  REFUSED_PLAN("descale_q", "f32", problem.descale_q = FMHA_DESCALE_PER_KV_HEAD);
  FmhaProblem problem = good();
  FmhaArgs args = good_args();
  char said[64];
  for (size_t i = 0; i < COUNT(FmhaOptions_FIELDS); ++i) {
    const Field *field = &FmhaOptions_FIELDS[i];
    NEW(FmhaOptions, options);
    clear();
    spoil(&options, field, 0, said);
    refused(fmha_plan("cpu", &problem, &options, &plan), field->kind == TEXT ? "zz" : field->name, said);
  }
  CHECK(plan == NULL, "a refused plan is set");
  refused(fmha_plan("tpu", &problem, NULL, &plan), "tpu", "tpu");
  refused(fmha_plan("cpu", NULL, NULL, &plan), "problem", "null");
  refused(fmha_plan("cpu", &problem, NULL, NULL), "plan", "null");
  refused(fmha_run(NULL, &args), "plan", "null");
  plan = planned(&problem, "a good problem");
  refused(fmha_run(plan, NULL), "args", "null");
  fmha_drop(plan);
  fmha_drop(NULL);
}

int main(void) {
  for (int i = 0; i < Q_ELEMS; ++i) q[i] = dout[i] = part_o[0][i] = part_o[1][i] = part_o[2][i] = (float)(i % 11) / 8;
  for (int i = 0; i < K_ELEMS; ++i) k[i] = v[i] = (float)(i % 7) / 4 - 0.5f;
#define COVERS(type) covers(#type, type##_FIELDS, COUNT(type##_FIELDS), sizeof(type))
  COVERS(FmhaLists);
  COVERS(FmhaMasks);
  COVERS(FmhaBlockScales);
  COVERS(FmhaCaptured);
  COVERS(FmhaCapturedArgs);
  plans();
  forward_and_backward();
  scales();
  scratch();
  appended();
  parts_of_a_whole();
  code_of_a_call();
  lists_of_a_call();
  second_of_a_call();
  masks_of_a_call();
  scales_by_blocks();
  combine();
  added();
  choose();
  index_loss();
  quantize();
  buffers();
  printf("%d wrong structs tried, %d failures\n", tried, failures);
  return failures != 0;
}
