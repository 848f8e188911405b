/* The functions that programs of the CUTLASS DSL call in place of the CUDA runtime, over the driver double.
 *
 * A library that is loaded is not looked at: a kernel is found by its name in the PTX files of CUTE_DSL_DUMP_DIR. */
#include <dirent.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  unsigned grid[3], block[3];
  size_t shared_bytes;
  void *stream;
  void *attributes;
  unsigned num_attributes;
} RuntimeConfig;

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void *stream;
  void *attributes;
  unsigned num_attributes;
} DriverConfig;

static void *driver(const char *name) {
  static void *library;
  if (!library && !(library = dlopen(getenv("FA4_DRIVER"), RTLD_NOW))) {
    fprintf(stderr, "FA4_DRIVER: %s\n", dlerror());
    exit(2);
  }
  void *function = dlsym(library, name);
  if (!function) fprintf(stderr, "the driver double has no %s\n", name);
  return function;
}

#define CALL(name, types, ...) ((int (*) types)driver(name)) (__VA_ARGS__)

int fa4_open(void) {
  void *context = NULL;
  int status = CALL("cuInit", (unsigned), 0);
  if (!status) status = CALL("cuDevicePrimaryCtxRetain", (void **, int), &context, 0);
  return status ? status : CALL("cuCtxSetCurrent", (void *), context);
}

uint64_t fa4_alloc(size_t bytes) {
  uint64_t address = 0;
  return CALL("cuMemAlloc_v2", (uint64_t *, size_t), &address, bytes) ? 0 : address;
}

int fa4_upload(uint64_t to, const void *from, size_t bytes) {
  return CALL("cuMemcpyHtoD_v2", (uint64_t, const void *, size_t), to, from, bytes);
}

int fa4_download(void *to, uint64_t from, size_t bytes) {
  return CALL("cuMemcpyDtoH_v2", (void *, uint64_t, size_t), to, from, bytes);
}

/* The text of a PTX file that has an entry of that name. */
static char *text_of(const char *kernel) {
  const char *folder = getenv("CUTE_DSL_DUMP_DIR");
  DIR *dir = folder ? opendir(folder) : NULL;
  if (!dir) return NULL;
  char entry[4096], path[4096], *found = NULL;
  snprintf(entry, sizeof entry, ".entry %s(", kernel);
  for (struct dirent *file; !found && (file = readdir(dir));) {
    if (!strstr(file->d_name, ".ptx")) continue;
    snprintf(path, sizeof path, "%s/%s", folder, file->d_name);
    FILE *in = fopen(path, "rb");
    if (!in) continue;
    fseek(in, 0, SEEK_END);
    size_t bytes = (size_t)ftell(in);
    rewind(in);
    char *text = calloc(bytes + 1, 1);
    if (text && fread(text, 1, bytes, in) == bytes && strstr(text, entry)) found = text;
    else free(text);
    fclose(in);
  }
  closedir(dir);
  return found;
}

int _cudaLibraryLoadData(void **library, const void *code) {
  *library = (void *)(code ? code : (const void *)1);
  return 0;
}

int _cudaLibraryUnload(void *library) { return library ? 0 : 1; }

int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  char *text = text_of(name);
  void *module = NULL;
  (void)library;
  if (!text) {
    fprintf(stderr, "no PTX of %s\n", name);
    return 500;
  }
  int status = CALL("cuModuleLoadData", (void **, const void *), &module, text);
  free(text);
  return status ? status : CALL("cuModuleGetFunction", (void **, void *, const char *), kernel, module, name);
}

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  (void)device;
  return CALL("cuFuncSetAttribute", (void *, int, int), kernel, attribute, value);
}

int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
  return _cudaKernelSetAttributeForDevice(kernel, attribute, value, 0);
}

int _cudaLaunchKernelEx(const RuntimeConfig *config, void *kernel, void **arguments) {
  DriverConfig same = {{config->grid[0], config->grid[1], config->grid[2]},
                       {config->block[0], config->block[1], config->block[2]},
                       (unsigned)config->shared_bytes, NULL, config->attributes, config->num_attributes};
  if (getenv("FA4_VERBOSE"))
    fprintf(stderr, "launch: grid %u %u %u, block %u, %zu bytes, %u attributes\n", config->grid[0], config->grid[1],
            config->grid[2], config->block[0], config->shared_bytes, config->num_attributes);
  return CALL("cuLaunchKernelEx", (const DriverConfig *, void *, void **, void **), &same, kernel, arguments, NULL);
}

int _cudaGetDevice(int *device) { return *device = 0; }

int _cudaSetDevice(int device) { return device ? 101 : 0; }

int _cudaGetDeviceCount(int *count) { return *count = 1, 0; }

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  return CALL("cuDeviceGetAttribute", (int *, int, int), value, attribute, device);
}

int _cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dims,
                            const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                            int swizzle, int promotion, int fill) {
  return CALL("cuTensorMapEncodeTiled",
              (void *, int, unsigned, void *, const uint64_t *, const uint64_t *, const unsigned *, const unsigned *,
               int, int, int, int),
              map, type, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill);
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  (void)device;
  return CALL("cuFuncGetAttribute", (int *, int, void *), value, attribute, kernel);
}

int cuda_dialect_init_library_once(void **slot, int (*load)(void **), int (*prepare)(void **, int)) {
  void *library = NULL;
  if (*slot) return 0;
  int status = load(&library);
  if (!status && prepare) status = prepare(&library, 0);
  if (!status) *slot = library;
  return status;
}

void cuda_dialect_unload_library_once(void **slot) { *slot = NULL; }

/* `raise` makes a Python exception of a kind and the parts of a text. */
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *, const char **, int), int status) {
  char number[32];
  snprintf(number, sizeof number, "%d", status);
  const char *parts[] = {"the driver double said ", number};
  if (raise) raise("RuntimeError", parts, 2);
}
