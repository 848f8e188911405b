// A score and a mask of your own from C: documents that see themselves alone, and distances that cost by learned slopes
// under a soft-cap. Forward, and the gradient of the slopes.
//
//   cc score_and_mask.c -o score_and_mask $(pkg-config --cflags --libs fmha) -lm
//   ./score_and_mask            on the CPU, in its own memory

#include <fmha.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 24, HEADS = 2, DIM = 16, ELEMS = ROWS * HEADS * DIM };

static const float CAP = 5.0f;

static void check(int status) {
  if (status == 0) return;
  fprintf(stderr, "%s\n", fmha_last_error());  // of a text the word and its column, of a capture its name and field
  exit(1);
}

// Numbers between -1 and 1, the same on every machine.
static void fill(float *to, int count, uint32_t seed) {
  for (int i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    to[i] = (float)(int32_t)seed / 2147483648.0f;
  }
}

// The sum of all of O, in double, by slopes of which one is moved by `step`: O where `o` is not null.
static double sum_of_o(const float *q, const float *k, const float *v, const int32_t *ids, const float *slopes,
                       int moved, double step, double *o) {
  double all = 0;
  for (int head = 0; head < HEADS; ++head) {
    double slope = slopes[head] + (head == moved ? step : 0);
    for (int i = 0; i < ROWS; ++i) {
      double p[ROWS], sum = 0;
      for (int j = 0; j <= i; ++j) {
        double score = 0;
        for (int d = 0; d < DIM; ++d) {
          score += (double)q[(i * HEADS + head) * DIM + d] * k[(j * HEADS + head) * DIM + d];
        }
        score = CAP * tanh((score / sqrt(DIM) + slope * (j - i)) / CAP);
        sum += p[j] = ids[i] == ids[j] ? exp(score) : 0;
      }
      for (int d = 0; d < DIM; ++d) {
        double value = 0;
        for (int j = 0; j <= i; ++j) value += p[j] / sum * v[(j * HEADS + head) * DIM + d];
        all += value;
        if (o) o[(i * HEADS + head) * DIM + d] = value;
      }
    }
  }
  return all;
}

int main(void) {
  static float q[ELEMS], k[ELEMS], v[ELEMS], o[ELEMS], dout[ELEMS], dq[ELEMS], dk[ELEMS], dv[ELEMS], lse[HEADS * ROWS];
  static double right[ELEMS];
  fill(q, ELEMS, 1);
  fill(k, ELEMS, 2);
  fill(v, ELEMS, 3);
  int32_t ids[ROWS];
  float slopes[HEADS] = {0.25f, 0.0625f}, dslopes[HEADS];
  for (int i = 0; i < ROWS; ++i) ids[i] = i / 10;
  for (int i = 0; i < ELEMS; ++i) dout[i] = 1.0f;

  FmhaCaptured captured[3] = {{0}};
  captured[0].name = "slopes";
  captured[0].num_dims = 1;
  captured[0].shape[0] = HEADS;
  captured[0].strides[0] = 1;
  captured[1].name = "ids";
  captured[1].num_dims = 1;
  captured[1].shape[0] = ROWS;
  captured[1].strides[0] = 1;
  captured[2].name = "cap";
  FmhaCapturedArgs captured_args[3] = {{0}};
  captured_args[0].data = slopes;
  captured_args[1].data = ids;
  captured_args[2].real = CAP;  // a number: another one compiles nothing

  FmhaCode code = {0};
  code.struct_bytes = sizeof code;
  code.score = "slopes: f32[_]; cap: float; cap * tanh((s + slopes[h] * (k - q)) / cap)";
  code.mask = "ids: i32[_]; ids[q] == ids[k] and k <= q";
  code.captured = captured;
  code.num_captured = 3;

  const FmhaStrides dense = {ELEMS, HEADS * DIM, DIM, 1};  // [1, ROWS, HEADS, DIM]
  FmhaProblem problem = {0};                               // what is not set is off
  problem.struct_bytes = sizeof problem;
  problem.batch = 1;
  problem.seqlen_q = problem.seqlen_k = ROWS;
  problem.num_heads_q = problem.num_heads_kv = HEADS;
  problem.head_dim_qk = problem.head_dim_v = DIM;
  problem.q = problem.k = problem.v = problem.o = dense;
  problem.write_lse = 1;
  problem.dtype_qk = problem.dtype_v = problem.dtype_o = FMHA_F32;
  problem.code = &code;
  FmhaArgs args = {0};
  args.struct_bytes = sizeof args;
  args.q = q;
  args.k = k;
  args.v = v;
  args.o = o;
  args.lse = lse;
  args.captured = captured_args;

  FmhaPlan *plan;
  check(fmha_plan("cpu", &problem, NULL, &plan));
  check(fmha_run(plan, &args));
  fmha_drop(plan);

  FmhaGradients gradients = {0};
  gradients.struct_bytes = sizeof gradients;
  gradients.dout = gradients.dq = gradients.dk = gradients.dv = dense;
  gradients.dtype_grad = FMHA_F32;
  problem.gradients = &gradients;
  captured[0].write_grad = 1;
  captured[0].dtype_grad = FMHA_F32;
  args.dout = dout;
  args.dq = dq;
  args.dk = dk;
  args.dv = dv;
  captured_args[0].grad = dslopes;
  check(fmha_plan("cpu", &problem, NULL, &plan));
  check(fmha_run(plan, &args));
  fmha_drop(plan);

  double worst = 0, step = 1e-4;
  sum_of_o(q, k, v, ids, slopes, -1, 0, right);
  for (int i = 0; i < ELEMS; ++i) worst = fmax(worst, fabs(o[i] - right[i]));
  for (int head = 0; head < HEADS; ++head) {
    double above = sum_of_o(q, k, v, ids, slopes, head, step, NULL);
    double below = sum_of_o(q, k, v, ids, slopes, head, -step, NULL);
    worst = fmax(worst, fabs(dslopes[head] - (above - below) / (2 * step)) / 10);
  }
  int passes = worst < 1e-5;
  printf("largest error %.1e, gradients of slopes %.3f and %.3f: ", worst, dslopes[0], dslopes[1]);
  printf("%s\n", passes ? "PASS" : "FAIL");
  return !passes;
}
