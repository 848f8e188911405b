// What fmha_run itself costs the host, in nanoseconds, on a driver that does nothing; no GPU is needed, NVRTC is.
//
//   cargo build --release -p fmha-c
//   cc -O2 -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 bindings/c/bench/null_driver.c
//   cc -O2 -Ibindings/c -o issue bindings/c/bench/issue.c -ldl
//   LD_LIBRARY_PATH=. ./issue target/release/libfmha_c.so
//
// The same without a quiet machine, in instructions a call:
//   LD_LIBRARY_PATH=. valgrind --tool=callgrind --toggle-collect=fmha_run ./issue target/release/libfmha_c.so 1000
//
// Build with CARGO_INCREMENTAL unset: an incremental build inlines less, and a call takes a third longer.

#define _POSIX_C_SOURCE 199309L

#include "fmha.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { TIMES = 101 };

static double nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e9 + now.tv_nsec;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static FmhaTensor tensor(size_t batch, size_t rows, size_t heads, size_t dim) {
  size_t bytes = (batch * rows * heads * dim * 2 + 255) / 256 * 256;
  int64_t row = heads * dim;
  return (FmhaTensor){aligned_alloc(256, bytes), rows * row, row, dim, 1};
}

int main(int count, char **words) {
  void *library = count > 1 ? dlopen(words[1], RTLD_NOW) : NULL;
  if (!library) return fprintf(stderr, "usage: issue libfmha_c.so [CALLS]: %s\n", dlerror()), 2;
  int (*plan_call)(const FmhaCall *, const FmhaOptions *, FmhaPlan **) = dlsym(library, "fmha_plan");
  int (*run)(const FmhaPlan *, const FmhaCall *) = dlsym(library, "fmha_run");
  const char *(*error)(void) = dlsym(library, "fmha_last_error");
  long calls = count > 2 ? atol(words[2]) : 1000000;

  const int rows[][4] = {{1, 128, 4, 64}, {2, 512, 16, 128}};
  for (int i = 0; i < 4; ++i) {
    int batch = rows[i / 2][0], seqlen = rows[i / 2][1], heads = rows[i / 2][2], dim = rows[i / 2][3];
    float scale = 0.125f;
    FmhaTensor t[4];
    for (int k = 0; k < 4; ++k) t[k] = tensor(batch, seqlen, heads, dim);
    FmhaCall call = {
        .struct_bytes = sizeof call, .batch = batch, .seqlen_q = seqlen, .seqlen_k = seqlen,
        .num_heads_q = heads, .num_heads_kv = heads, .head_dim_qk = dim, .head_dim_v = dim,
        .q = t[0], .k = t[1], .v = t[2], .o = t[3], .mask = i % 2 ? "b" : "0", .softmax_scale = &scale,
        .dtype_qk = FMHA_BF16, .dtype_v = FMHA_BF16, .dtype_o = FMHA_BF16,
    };
    FmhaPlan *plan;
    if (plan_call(&call, NULL, &plan)) return fprintf(stderr, "%s\n", error()), 1;
    double times[TIMES];
    for (int k = 0; k < TIMES; ++k) {
      double start = nanoseconds();
      for (long n = 0; n < calls / TIMES; ++n) {
        if (run(plan, &call)) return fprintf(stderr, "%s\n", error()), 1;
      }
      times[k] = (nanoseconds() - start) / (calls / TIMES);
    }
    qsort(times, TIMES, sizeof times[0], ascending);
    printf("B%d H%d S%d D%d %s: %.0f ns in the middle, %.0f at the least\n", batch, heads, seqlen, dim,
           i % 2 ? "causal" : "full", times[TIMES / 2], times[0]);
  }
}
