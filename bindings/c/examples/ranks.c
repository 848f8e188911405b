// Attention over processes that each have some rows of the sequence: forward and gradients, held against one process.
//
//   cc ranks.c -o ranks $(pkg-config --cflags --libs fmha) -lm
//   ./ranks 0 2 127.0.0.1:29600 & ./ranks 1 2 127.0.0.1:29600; wait
//
// Arguments: rank, ranks, and where rank 0 listens (or file:PATH). A program on GPUs sets FmhaJoin.space to
// FMHA_NCCL and nccl_comm to its own communicator, names the device "cuda", and puts its stream into
// FmhaArgs.stream.

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

static FmhaStrides strides(Rows rows) {
  FmhaStrides strides = {(int64_t)rows.rows * rows.heads * DIM, (int64_t)rows.heads * DIM, DIM, 1};
  return strides;
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
  gradients.dout = gradients.dq = strides(t->q);
  gradients.dk = gradients.dv = strides(t->k);
  gradients.dtype_grad = FMHA_F32;
  return gradients;
}

// The sizes are the whole's, the strides those of the tensors that are given.
static FmhaProblem problem_of(const Tensors *t) {
  FmhaProblem problem = {0};
  problem.struct_bytes = sizeof problem;
  problem.batch = 1;
  problem.seqlen_q = problem.seqlen_k = ROWS;
  problem.num_heads_q = HEADS;
  problem.num_heads_kv = KV;
  problem.head_dim_qk = problem.head_dim_v = DIM;
  problem.q = problem.o = strides(t->q);
  problem.k = problem.v = strides(t->k);
  problem.write_lse = 1;
  problem.mask = "b";  // causal, over the whole sequence
  problem.dtype_qk = problem.dtype_v = problem.dtype_o = FMHA_F32;
  return problem;
}

static FmhaArgs forward_args(const Tensors *t) {
  FmhaArgs args = {0};
  args.struct_bytes = sizeof args;
  args.q = t->q.data;
  args.k = t->k.data;
  args.v = t->v.data;
  args.o = t->o.data;
  args.lse = t->lse;
  return args;
}

static FmhaArgs backward_args(const Tensors *t) {
  FmhaArgs args = forward_args(t);
  args.dout = t->dout.data;
  args.dq = t->dq.data;
  args.dk = t->dk.data;
  args.dv = t->dv.data;
  return args;
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

  FmhaRanks ranks = {0};
  ranks.struct_bytes = sizeof ranks;
  ranks.own_rows_q = mine.q.rows;
  ranks.own_rows_k = mine.k.rows;
  ranks.partition_q = ranks.partition_k = FMHA_ZIG_ZAG;

  FmhaDistPlan *forward, *backward;
  FmhaProblem problem = problem_of(&mine);
  FmhaArgs args = forward_args(&mine);
  check(fmha_dist_plan("cpu", &problem, &ranks, NULL, group, &forward));  // by all ranks together, once
  check(fmha_dist_run(forward, &args));                                   // as often as wanted
  if (join.rank == 0) printf("%s", fmha_dist_plan_text(forward));
  FmhaGradients part_gradients = gradients(&mine);
  problem.gradients = &part_gradients;
  args = backward_args(&mine);
  check(fmha_dist_plan("cpu", &problem, &ranks, NULL, group, &backward));
  check(fmha_dist_run(backward, &args));

  // One process that has all rows computes the reference.
  FmhaPlan *plan;
  problem = problem_of(&whole);
  args = forward_args(&whole);
  check(fmha_plan("cpu", &problem, NULL, &plan));
  check(fmha_run(plan, &args));
  fmha_drop(plan);
  FmhaGradients whole_gradients = gradients(&whole);
  problem.gradients = &whole_gradients;
  args = backward_args(&whole);
  check(fmha_plan("cpu", &problem, NULL, &plan));
  check(fmha_run(plan, &args));
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
