// SPDX-License-Identifier: Apache-2.0
// A driver of long ago: libcuda.so.1 with a handful of entry points and no version symbols.
#include <pthread.h>

#include "cuda_abi.h"

#define OLD __attribute__((visibility("default")))

// A thread may be cancelled in here, as where a driver opens files.
OLD CUresult cuInit(unsigned int flags) {
  pthread_testcancel();
  return CUDA_SUCCESS;
}
OLD CUresult cuDriverGetVersion(int *version) {
  *version = 6000;
  return CUDA_SUCCESS;
}
OLD CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
  return CUDA_ERROR_NOT_INITIALIZED;
}
