// SPDX-License-Identifier: Apache-2.0
// A program in a share of 1 GiB, for tests/native/test_arm64.py: the parts of the shim that are
// written for each architecture (the trampolines of dlsym, dlopen and their like, the 16-byte
// compare-and-swap), met on the way from a look-up to the limit and back.
#include <assert.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "cuda_abi.h"

#define GIB ((size_t)1 << 30)
#define PIECE ((size_t)64 << 20)

static void *driver;

static void *found(const char *name) {
  void *function = dlsym(driver, name);
  assert(function != NULL);
  return function;
}

#define LOOK_UP(name) __typeof__(&name) p_##name = (__typeof__(&name))found(#name)

int main(void) {
  driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_DEEPBIND);
  assert(driver != NULL);
  assert(dlsym(driver, "cuNoSuchFunction") == NULL);
  assert(dlvsym(RTLD_DEFAULT, "cuInit", "NO_SUCH_VERSION") == NULL);
  // What is not ours is found where the caller means, by the real dlsym.
  assert(dlsym(RTLD_DEFAULT, "strlen") != NULL && dlsym(RTLD_NEXT, "strlen") != NULL);

  LOOK_UP(cuInit);
  LOOK_UP(cuDevicePrimaryCtxRetain);
  LOOK_UP(cuCtxSetCurrent);
  LOOK_UP(cuMemGetInfo_v2);
  LOOK_UP(cuMemAlloc_v2);
  LOOK_UP(cuMemFree_v2);
  LOOK_UP(cuGetProcAddress_v2);
  CUcontext context;
  assert(p_cuInit(0) == CUDA_SUCCESS);
  assert(p_cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
  assert(p_cuCtxSetCurrent(context) == CUDA_SUCCESS);

  void *same = NULL;
  assert(p_cuGetProcAddress_v2("cuMemAlloc", &same, 12000, 0, NULL) == CUDA_SUCCESS);
  assert(same == (void *)p_cuMemAlloc_v2);

  size_t free_before, free_full, free_after, total;
  assert(p_cuMemGetInfo_v2(&free_before, &total) == CUDA_SUCCESS && total == GIB);
  CUdeviceptr pieces[GIB / PIECE];
  size_t count = 0;
  CUresult result = CUDA_SUCCESS;
  while (count < GIB / PIECE) {
    result = p_cuMemAlloc_v2(&pieces[count], PIECE);
    if (result != CUDA_SUCCESS) break;
    count++;
  }
  assert(result == CUDA_ERROR_OUT_OF_MEMORY && count == free_before / PIECE);
  assert(p_cuMemGetInfo_v2(&free_full, &total) == CUDA_SUCCESS);
  assert(free_full == free_before - count * PIECE);
  while (count > 0) assert(p_cuMemFree_v2(pieces[--count]) == CUDA_SUCCESS);
  assert(p_cuMemGetInfo_v2(&free_after, &total) == CUDA_SUCCESS && free_after == free_before);
  puts("done");
  return 0;
}
