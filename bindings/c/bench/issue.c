// What fmha_run itself costs the host, in nanoseconds, on a driver that does nothing; no GPU is needed, NVRTC is.
//
//   cargo build --release -p fmha-c
//   cc -O2 -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 bindings/c/bench/null_driver.c
//   cc -O2 -Ibindings/c -o issue bindings/c/bench/issue.c -ldl
//   LD_LIBRARY_PATH=. ./issue target/release/libfmha_c.so
//
// Instructions per call, on a machine that is not idle:
//   LD_LIBRARY_PATH=. valgrind --tool=callgrind --toggle-collect=fmha_run ./issue target/release/libfmha_c.so 1000
//
// On a GPU, in bursts of 20 calls that its queue holds, each waited for before the next; the least of them is the
// host's cost:
//   ./issue target/release/libfmha_c.so 0 20
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

int main(int count, char **words) {
  void *library = count > 1 ? dlopen(words[1], RTLD_NOW) : NULL;
  if (!library) return fprintf(stderr, "usage: issue libfmha_c.so [CALLS]: %s\n", dlerror()), 2;
  int (*make)(const char *, const FmhaProblem *, const FmhaOptions *, FmhaPlan **) = dlsym(library, "fmha_plan");
  int (*run)(const FmhaPlan *, const FmhaArgs *) = dlsym(library, "fmha_run");
  const char *(*error)(void) = dlsym(library, "fmha_last_error");
  int (*alloc)(const char *, uint64_t, FmhaBuffer **) = dlsym(library, "fmha_buffer");
  void *(*data)(const FmhaBuffer *) = dlsym(library, "fmha_buffer_data");
  int (*download)(const FmhaBuffer *, void *, uint64_t) = dlsym(library, "fmha_download");
  long calls = count > 2 ? atol(words[2]) : 1000000, burst = count > 3 ? atol(words[3]) : 0;

  const int rows[][4] = {{1, 128, 4, 64}, {2, 512, 16, 128}};
  for (int i = 0; i < 4; ++i) {
    int batch = rows[i / 2][0], seqlen = rows[i / 2][1], heads = rows[i / 2][2], dim = rows[i / 2][3];
    float scale = 0.125f;
    void *t[4];
    FmhaStrides dense = {(int64_t)seqlen * heads * dim, (int64_t)heads * dim, dim, 1};
    FmhaBuffer *last = NULL;
    for (int k = 0; k < 4; ++k) {
      size_t bytes = ((size_t)batch * seqlen * heads * dim * 2 + 255) / 256 * 256;
      if (burst && alloc(NULL, bytes, &last)) return fprintf(stderr, "%s\n", error()), 1;
      t[k] = burst ? data(last) : aligned_alloc(256, bytes);
    }
    FmhaProblem problem = {
        .struct_bytes = sizeof problem, .batch = batch, .seqlen_q = seqlen, .seqlen_k = seqlen,
        .num_heads_q = heads, .num_heads_kv = heads, .head_dim_qk = dim, .head_dim_v = dim,
        .q = dense, .k = dense, .v = dense, .o = dense, .mask = i % 2 ? "b" : "0", .softmax_scale = &scale,
        .dtype_qk = FMHA_BF16, .dtype_v = FMHA_BF16, .dtype_o = FMHA_BF16,
    };
    FmhaArgs args = {.struct_bytes = sizeof args, .q = t[0], .k = t[1], .v = t[2], .o = t[3]};
    FmhaPlan *plan;
    if (make(NULL, &problem, NULL, &plan)) return fprintf(stderr, "%s\n", error()), 1;
    double times[TIMES];
    long at_once = burst ? burst : calls / TIMES;
    for (int k = 0; k < TIMES; ++k) {
      char byte;
      if (burst && download(last, &byte, 1)) return fprintf(stderr, "%s\n", error()), 1;
      double start = nanoseconds();
      for (long n = 0; n < at_once; ++n) {
        if (run(plan, &args)) return fprintf(stderr, "%s\n", error()), 1;
      }
      times[k] = (nanoseconds() - start) / at_once;
    }
    qsort(times, TIMES, sizeof times[0], ascending);
    printf("B%d H%d S%d D%d %s: %.0f ns in the middle, %.0f at the least\n", batch, heads, seqlen, dim,
           i % 2 ? "causal" : "full", times[TIMES / 2], times[0]);
  }
}
