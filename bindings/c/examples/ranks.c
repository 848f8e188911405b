// Attention over processes that each have some rows of the sequence: forward and gradients, held against one process.
//
//   cc ranks.c -o ranks $(pkg-config --cflags --libs fmha) -lm
//   ./ranks 0 2 127.0.0.1:29600 & ./ranks 1 2 127.0.0.1:29600; wait
//
// Arguments: rank, ranks, and where rank 0 listens (or file:PATH). A program on GPUs sets FmhaJoin.space to
// FMHA_NCCL and nccl_comm to its own communicator, FmhaOptions.backend to "cuda", and its stream into
// FmhaCall.stream.

#include <fmha.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 51, HEADS = 4, KV = 2, DIM = 16 };  // 51 rows: some ranks have more than others

static void check(int status) {
  if (status == 0) return;
  fprintf(stderr, "%s\n", fmha_last_error());  // the rank, the field, the number; the same on every rank
  exit(1);
}

// Rows of some heads: of the whole, or of one rank.
typedef struct Rows {
  int heads, rows;
  float *data;
} Rows;

static Rows zeros(int heads, int rows) {
  Rows made = {heads, rows, calloc((size_t)rows * heads * DIM + 1, sizeof(float))};
  return made;
}

static Rows noise(int heads, uint32_t seed) {
  Rows made = zeros(heads, ROWS);
  for (int i = 0; i < ROWS * heads * DIM; ++i) {
    seed = seed * 1664525u + 1013904223u;
    made.data[i] = (float)(int32_t)seed / 2147483648.0f;
  }
  return made;
}

// A rank's rows of the whole.
static Rows own(Rows whole, const FmhaRun *runs, int64_t num_runs) {
  Rows made = zeros(whole.heads, 0);
  for (int64_t i = 0; i < num_runs; ++i) made.rows += (int)(runs[i].end - runs[i].begin);
  size_t row = (size_t)whole.heads * DIM;
  made = zeros(whole.heads, made.rows);
  float *to = made.data;
  for (int64_t i = 0; i < num_runs; ++i) {
    size_t count = (size_t)(runs[i].end - runs[i].begin) * row;
    memcpy(to, whole.data + (size_t)runs[i].begin * row, count * sizeof(float));
    to += count;
  }
  return made;
}

static FmhaTensor tensor(Rows rows) {
  FmhaTensor tensor = {0};
  tensor.data = rows.data;
  tensor.batch_stride = (int64_t)rows.rows * rows.heads * DIM;
  tensor.seqlen_stride = (int64_t)rows.heads * DIM;
  tensor.head_stride = DIM;
  tensor.dim_stride = 1;
  return tensor;
}

// Q, K, V and dO; what is computed of them.
typedef struct Tensors {
  Rows q, k, v, dout, o, dq, dk, dv;
  float *lse;
} Tensors;

static Tensors with_results(Rows q, Rows k, Rows v, Rows dout) {
  Tensors t = {q, k, v, dout, zeros(HEADS, q.rows), zeros(HEADS, q.rows), zeros(KV, k.rows), zeros(KV, k.rows), NULL};
  t.lse = calloc((size_t)q.rows * HEADS + 1, sizeof(float));
  return t;
}

static FmhaGradients gradients(const Tensors *t) {
  FmhaGradients gradients = {0};
  gradients.struct_bytes = sizeof gradients;
  gradients.dout = tensor(t->dout);
  gradients.dq = tensor(t->dq);
  gradients.dk = tensor(t->dk);
  gradients.dv = tensor(t->dv);
  gradients.dtype_grad = FMHA_F32;
  return gradients;
}

// The sizes are the whole's, the tensors those that are given.
static FmhaCall call(const Tensors *t) {
  FmhaCall call = {0};
  call.struct_bytes = sizeof call;
  call.batch = 1;
  call.seqlen_q = call.seqlen_k = ROWS;
  call.num_heads_q = HEADS;
  call.num_heads_kv = KV;
  call.head_dim_qk = call.head_dim_v = DIM;
  call.q = tensor(t->q);
  call.k = tensor(t->k);
  call.v = tensor(t->v);
  call.o = tensor(t->o);
  call.lse = t->lse;
  call.mask = "b";  // causal, over the whole sequence
  call.dtype_qk = call.dtype_v = call.dtype_o = FMHA_F32;
  return call;
}

static double distance(Rows a, Rows b) {
  double worst = 0;
  for (int i = 0; i < a.rows * a.heads * DIM; ++i) worst = fmax(worst, fabs(a.data[i] - b.data[i]));
  return worst;
}

int main(int count, char **words) {
  if (count != 4) {
    fprintf(stderr, "usage: ranks RANK RANKS ADDRESS\n");
    return 2;
  }
  FmhaJoin join = {0};
  join.struct_bytes = sizeof join;
  join.rank = atoi(words[1]);
  join.size = atoi(words[2]);
  join.address = words[3];
  join.timeout_seconds = 30;
  FmhaGroup *group;
  check(fmha_dist_join(&join, &group));

  FmhaRun runs[2];
  int64_t num_runs;
  check(fmha_dist_rows(FMHA_ZIG_ZAG, ROWS, join.size, join.rank, runs, &num_runs));
  Tensors whole = with_results(noise(HEADS, 1), noise(KV, 2), noise(KV, 3), noise(HEADS, 4));
  Tensors mine = with_results(own(whole.q, runs, num_runs), own(whole.k, runs, num_runs), own(whole.v, runs, num_runs),
                              own(whole.dout, runs, num_runs));

  FmhaOptions options = {0};
  options.struct_bytes = sizeof options;
  options.backend = "cpu";
  FmhaRanks ranks = {0};
  ranks.struct_bytes = sizeof ranks;
  ranks.own_rows_q = mine.q.rows;
  ranks.own_rows_k = mine.k.rows;
  ranks.partition_q = ranks.partition_k = FMHA_ZIG_ZAG;

  FmhaDistPlan *forward, *backward;
  FmhaCall part = call(&mine);
  check(fmha_dist_plan(&part, &ranks, &options, group, &forward));  // by all ranks together, once
  check(fmha_dist_run(forward, &part));                             // as often as wanted
  if (join.rank == 0) printf("%s", fmha_dist_plan_text(forward));
  FmhaGradients part_gradients = gradients(&mine);
  part.gradients = &part_gradients;
  check(fmha_dist_plan(&part, &ranks, &options, group, &backward));
  check(fmha_dist_run(backward, &part));

  // One process that has all rows computes the reference.
  FmhaPlan *plan;
  FmhaCall alone = call(&whole);
  check(fmha_plan(&alone, &options, &plan));
  check(fmha_run(plan, &alone));
  fmha_drop(plan);
  FmhaGradients whole_gradients = gradients(&whole);
  alone.gradients = &whole_gradients;
  check(fmha_plan(&alone, &options, &plan));
  check(fmha_run(plan, &alone));
  fmha_drop(plan);

  Rows results[4] = {mine.o, mine.dq, mine.dk, mine.dv}, wanted[4] = {whole.o, whole.dq, whole.dk, whole.dv};
  double worst = 0;
  for (int i = 0; i < 4; ++i) worst = fmax(worst, distance(results[i], own(wanted[i], runs, num_runs)));
  int right = worst < 1e-4;
  printf("rank %d: %d of %d rows, largest distance %.1e: %s\n", (int)join.rank, mine.q.rows, ROWS, worst,
         right ? "PASS" : "FAIL");
  fmha_dist_drop(forward);
  fmha_dist_drop(backward);
  fmha_dist_leave(group);
  return !right;
}
