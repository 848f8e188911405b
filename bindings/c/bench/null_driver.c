// A CUDA driver that does nothing, in the shape of an H200's: what is left of a call on it is this library's own.
// See issue.c.

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;

static void *current;


Result cuInit(unsigned flags) { return (void)flags, 0; }
Result cuDriverGetVersion(int *version) { return *version = 13000, 0; }
Result cuGetErrorString(int code, const char **text) { return (void)code, *text = "null driver", 0; }
// NVRTC calls this in every driver that it finds.
Result cuGetExportTable(const void **table, const void *id) { return (void)id, *table = NULL, 500; }

Result cuDeviceGetCount(int *count) { return *count = 1, 0; }
Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
Result cuDeviceGetName(char *name, int bytes, int device) {
  return (void)device, strncpy(name, "null", (size_t)bytes), 0;
}
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case 16: *value = 132; break;      // multiprocessors
    case 75: *value = 9; break;        // compute capability, major
    case 76: *value = 0; break;        // minor
    case 97: *value = 232448; break;   // shared memory of a block
    default: *value = 1000000; break;  // clocks and the like
  }
  return 0;
}
Result cuDevicePrimaryCtxRetain(void **context, int device) {
  return (void)device, *context = current = &current, 0;
}
Result cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, 0; }
Result cuCtxGetCurrent(void **context) { return *context = current, 0; }
Result cuCtxSetCurrent(void *context) { return current = context, 0; }

Result cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  return *address = (uint64_t)aligned_alloc(256, (bytes + 255) / 256 * 256), 0;
}
Result cuMemFree_v2(uint64_t address) { return free((void *)address), 0; }
Result cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void *stream) {
  return (void)address, (void)value, (void)bytes, (void)stream, 0;
}
Result cuStreamSynchronize(void *stream) { return (void)stream, 0; }

Result cuModuleLoadData(void **module, const void *image) { return (void)image, *module = &current, 0; }
Result cuModuleUnload(void *module) { return (void)module, 0; }
Result cuModuleGetFunction(void **function, void *module, const char *name) {
  return (void)module, (void)name, *function = &current, 0;
}
Result cuFuncSetAttribute(void *function, int attribute, int value) {
  return (void)function, (void)attribute, (void)value, 0;
}
Result cuTensorMapEncodeTiled(void *map) { return (void)map, 0; }
Result cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) {
  return (void)config, (void)function, (void)arguments, (void)extra, 0;
}
