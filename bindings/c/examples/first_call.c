// Attention from C: eight query heads over two key and value heads, causal, in bf16, on any device.
//
//   cc first_call.c -o first_call $(pkg-config --cflags --libs fmha) -lm
//   ./first_call            the best device there is; or `cpu`, `cuda`, `cuda:1`, `rocm`
//
// A program with tensors of its own puts their addresses and its stream into FmhaArgs, and needs no FmhaBuffer.

#include <fmha.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 64, HEADS = 8, KV = 2, DIM = 64 };
enum { Q_ELEMS = ROWS * HEADS * DIM, K_ELEMS = ROWS * KV * DIM };

static void check(int status) {
  if (status == 0) return;
  fprintf(stderr, "%s\n", fmha_last_error());  // whose fault, which field, which number
  exit(1);
}

static uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Numbers between -1 and 1, the same on every machine.
static void fill(uint16_t *to, int count, uint32_t seed) {
  for (int i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    to[i] = to_bf16((float)(int32_t)seed / 2147483648.0f);
  }
}

// [1, ROWS, heads, DIM], the rows of a head side by side with the other heads'.
static FmhaStrides strides(int heads) {
  FmhaStrides strides = {(int64_t)ROWS * heads * DIM, (int64_t)heads * DIM, DIM, 1};
  return strides;
}

// The largest distance of `o` from attention written out in double.
static double error_of(const uint16_t *q, const uint16_t *k, const uint16_t *v, const uint16_t *o) {
  double worst = 0;
  for (int head = 0; head < HEADS; ++head) {
    int kv = head / (HEADS / KV);
    for (int i = 0; i < ROWS; ++i) {
      double p[ROWS], sum = 0;
      for (int j = 0; j <= i; ++j) {
        double score = 0;
        for (int d = 0; d < DIM; ++d) {
          score += (double)from_bf16(q[(i * HEADS + head) * DIM + d]) * from_bf16(k[(j * KV + kv) * DIM + d]);
        }
        sum += p[j] = exp(score / sqrt(DIM));
      }
      for (int d = 0; d < DIM; ++d) {
        double right = 0;
        for (int j = 0; j <= i; ++j) right += p[j] / sum * from_bf16(v[(j * KV + kv) * DIM + d]);
        worst = fmax(worst, fabs(from_bf16(o[(i * HEADS + head) * DIM + d]) - right));
      }
    }
  }
  return worst;
}

int main(int count, char **words) {
  static uint16_t q[Q_ELEMS], k[K_ELEMS], v[K_ELEMS], o[Q_ELEMS];
  fill(q, Q_ELEMS, 1);
  fill(k, K_ELEMS, 2);
  fill(v, K_ELEMS, 3);

  const char *device = count > 1 ? words[1] : "auto";
  FmhaBuffer *buffers[4];
  check(fmha_buffer(device, sizeof q, &buffers[0]));
  check(fmha_buffer(device, sizeof k, &buffers[1]));
  check(fmha_buffer(device, sizeof v, &buffers[2]));
  check(fmha_buffer(device, sizeof o, &buffers[3]));
  check(fmha_upload(buffers[0], q, sizeof q));
  check(fmha_upload(buffers[1], k, sizeof k));
  check(fmha_upload(buffers[2], v, sizeof v));

  FmhaProblem problem = {0};  // what is not set is off
  problem.struct_bytes = sizeof problem;
  problem.batch = 1;
  problem.seqlen_q = problem.seqlen_k = ROWS;
  problem.num_heads_q = HEADS;
  problem.num_heads_kv = KV;
  problem.head_dim_qk = problem.head_dim_v = DIM;
  problem.q = problem.o = strides(HEADS);
  problem.k = problem.v = strides(KV);
  problem.mask = "b";  // causal, the last query sees the last key
  problem.dtype_qk = problem.dtype_v = problem.dtype_o = FMHA_BF16;

  FmhaArgs args = {0};
  args.struct_bytes = sizeof args;
  args.q = fmha_buffer_data(buffers[0]);
  args.k = fmha_buffer_data(buffers[1]);
  args.v = fmha_buffer_data(buffers[2]);
  args.o = fmha_buffer_data(buffers[3]);

  FmhaPlan *plan;
  check(fmha_plan(device, &problem, NULL, &plan));  // chooses a kernel, once for each problem
  check(fmha_run(plan, &args));                     // queues it, as often as wanted
  check(fmha_download(buffers[3], o, sizeof o));
  printf("%s\n", fmha_plan_text(plan));

  fmha_drop(plan);
  for (int i = 0; i < 4; ++i) fmha_drop_buffer(buffers[i]);

  double worst = error_of(q, k, v, o);
  int right = worst < 0.01;  // bf16 has 8 bits: twice its half step below 1 is 0.004
  printf("largest error %.4f: %s\n", worst, right ? "PASS" : "FAIL");
  return !right;
}
