// Attention from C: eight query heads over two key and value heads, causal, in bf16, on any device.
//
//   cc first_call.c -o first_call $(pkg-config --cflags --libs fmha) -lm
//   ./first_call            the best device there is; or `cpu`, `cuda`, `cuda:1`, `rocm`
//
// A program with tensors of its own puts their addresses into `data` and its stream into `call.stream`, and needs
// no FmhaBuffer.

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
static FmhaTensor tensor(FmhaBuffer *buffer, int heads) {
  FmhaTensor tensor = {0};
  tensor.data = fmha_buffer_data(buffer);
  tensor.batch_stride = (int64_t)ROWS * heads * DIM;
  tensor.seqlen_stride = (int64_t)heads * DIM;
  tensor.head_stride = DIM;
  tensor.dim_stride = 1;
  return tensor;
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

  FmhaOptions options = {0};
  options.struct_bytes = sizeof options;
  options.backend = count > 1 ? words[1] : "auto";

  FmhaBuffer *buffers[4];
  check(fmha_buffer(&options, sizeof q, &buffers[0]));
  check(fmha_buffer(&options, sizeof k, &buffers[1]));
  check(fmha_buffer(&options, sizeof v, &buffers[2]));
  check(fmha_buffer(&options, sizeof o, &buffers[3]));
  check(fmha_upload(buffers[0], q, sizeof q));
  check(fmha_upload(buffers[1], k, sizeof k));
  check(fmha_upload(buffers[2], v, sizeof v));

  FmhaCall call = {0};  // what is not set is off
  call.struct_bytes = sizeof call;
  call.batch = 1;
  call.seqlen_q = call.seqlen_k = ROWS;
  call.num_heads_q = HEADS;
  call.num_heads_kv = KV;
  call.head_dim_qk = call.head_dim_v = DIM;
  call.q = tensor(buffers[0], HEADS);
  call.k = tensor(buffers[1], KV);
  call.v = tensor(buffers[2], KV);
  call.o = tensor(buffers[3], HEADS);
  call.mask = "b";  // causal, the last query sees the last key
  call.dtype_qk = call.dtype_v = call.dtype_o = FMHA_BF16;

  FmhaPlan *plan;
  check(fmha_plan(&call, &options, &plan));  // chooses a kernel, once for calls of this shape
  check(fmha_run(plan, &call));              // queues it, as often as wanted
  check(fmha_download(buffers[3], o, sizeof o));
  printf("%s\n", fmha_plan_text(plan));

  fmha_drop(plan);
  for (int i = 0; i < 4; ++i) fmha_drop_buffer(buffers[i]);

  double worst = error_of(q, k, v, o);
  int right = worst < 0.01;  // bf16 has 8 bits: twice its half step below 1 is 0.004
  printf("largest error %.4f: %s\n", worst, right ? "PASS" : "FAIL");
  return !right;
}
