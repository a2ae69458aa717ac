// SPDX-License-Identifier: Apache-2.0
// A plugin that is linked with the driver: opened by host_plugin.c in unusual ways. With
// OPENS_OTHERS a library that only opens such a plugin.
#include <dlfcn.h>
#include <stdlib.h>

#include "cuda_abi.h"

#ifdef OPENS_OTHERS

__attribute__((visibility("default"))) void *open_other(const char *name) {
  return dlopen(name, RTLD_NOW);
}

#else

// Before other libraries' constructors, if it is preloaded.
__attribute__((constructor)) static void start_early(void) {
  if (getenv("PLUGIN_STARTS_EARLY") != NULL) cuInit(0);
}

// As plugin.c was bound when it was opened. Returns the first error.
__attribute__((visibility("default"))) int plugin_allocate(unsigned long long *pointer,
                                                           unsigned long long bytes) {
  CUcontext context;
  int result = cuInit(0);
  if (result == 0) result = cuDevicePrimaryCtxRetain(&context, 0);
  if (result == 0) result = cuCtxSetCurrent(context);
  if (result == 0) result = cuMemAlloc_v2(pointer, bytes);
  return result;
}

// By its own look-ups.
__attribute__((visibility("default"))) int plugin_look_up_and_allocate(unsigned long long *pointer,
                                                                       unsigned long long bytes) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL) return -1;
  __typeof__(&cuInit) init = (__typeof__(&cuInit))dlsym(library, "cuInit");
  __typeof__(&cuMemAlloc_v2) allocate =
      (__typeof__(&cuMemAlloc_v2))dlvsym(library, "cuMemAlloc_v2", "ANY");
  if (allocate == NULL) allocate = (__typeof__(&cuMemAlloc_v2))dlsym(library, "cuMemAlloc_v2");
  __typeof__(&cuDevicePrimaryCtxRetain) retain =
      (__typeof__(&cuDevicePrimaryCtxRetain))dlsym(library, "cuDevicePrimaryCtxRetain");
  __typeof__(&cuCtxSetCurrent) set =
      (__typeof__(&cuCtxSetCurrent))dlsym(RTLD_DEFAULT, "cuCtxSetCurrent");
  if (set == NULL) set = (__typeof__(&cuCtxSetCurrent))dlsym(library, "cuCtxSetCurrent");
  CUcontext context;
  int result = init(0);
  if (result == 0) result = retain(&context, 0);
  if (result == 0) result = set(context);
  if (result == 0) result = allocate(pointer, bytes);
  return result;
}

// By the driver's own look-up.
__attribute__((visibility("default"))) int plugin_get_proc_and_allocate(unsigned long long *pointer,
                                                                        unsigned long long bytes) {
  __typeof__(&cuMemAlloc_v2) allocate;
  int result = plugin_allocate(pointer, bytes);
  if (result == 0) result = cuMemFree_v2(*pointer);
  if (result == 0) result = cuGetProcAddress_v2("cuMemAlloc", (void **)&allocate, 12000, 0, NULL);
  return result == 0 ? (int)allocate(pointer, bytes) : result;
}

#endif
