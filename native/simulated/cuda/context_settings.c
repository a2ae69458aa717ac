// SPDX-License-Identifier: Apache-2.0
// What can be asked of a context and set in it.
#include "simulated/cuda/driver.h"

CUresult cuCtxSynchronize(void) {
  ENTER_CONTEXT(current);
  TRY(capture_forbids(current));
  TRY(context_synchronize(current));
  pools_release_surplus(current->gpu);
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize_v2(CUcontext handle) {
  context *waited;
  TRY(context_of(handle, &waited));
  TRY(context_synchronize(waited));
  pools_release_surplus(waited->gpu);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int *flags) {
  ENTER_CONTEXT(current);
  if (flags == NULL) return CUDA_ERROR_INVALID_VALUE;
  *flags = current->flags;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned int flags) {
  ENTER_CONTEXT(current);
  if ((flags & ~(unsigned)CU_CTX_FLAGS_MASK) != 0) return CUDA_ERROR_INVALID_VALUE;
  current->flags = flags;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext handle, unsigned long long *id) {
  context *asked;
  TRY(context_of(handle, &asked));
  if (id == NULL) return CUDA_ERROR_INVALID_VALUE;
  *id = asked->head.id;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext handle, unsigned int *version) {
  context *asked;
  TRY(context_of(handle, &asked));
  if (version == NULL) return CUDA_ERROR_INVALID_VALUE;
  *version = asked->api_version;
  return CUDA_SUCCESS;
}

static CUresult check_limit(CUlimit limit) {
  if (limit >= CU_LIMIT_MAX) return CUDA_ERROR_INVALID_VALUE;
  return limit >= CU_LIMIT_SHMEM_SIZE ? CUDA_ERROR_UNSUPPORTED_LIMIT : CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  ENTER_CONTEXT(current);
  if (value == NULL) return CUDA_ERROR_INVALID_VALUE;
  TRY(check_limit(limit));
  *value = current->limits[limit];
  return CUDA_SUCCESS;
}

#define STACK_PAGE (2 * MIB)
#define LARGEST_STACK ((size_t)512 << 10)

// Each thread that the GPU can hold has a stack, whether it runs or not.
static CUresult resize_stacks(context *of, size_t value) {
  if (value > LARGEST_STACK) return CUDA_ERROR_INVALID_VALUE;
  uint64_t threads =
      (uint64_t)mps_multiprocessors(of->gpu) * driver_description(of->gpu)->max_threads_per_sm;
  uint64_t wanted = 0;
  if (value > DEFAULT_STACK_BYTES) {
    uint64_t whole = (threads * value + STACK_PAGE - 1) / STACK_PAGE * STACK_PAGE;
    wanted = whole - threads * DEFAULT_STACK_BYTES;
  }
  // Kernels that run have the stacks that are there.
  if (wanted != of->stack_bytes) context_drain(of->gpu, of);
  LOCK();
  uint64_t before = of->stack_bytes;
  bool fits = wanted <= before || allot_gpu_take(&driver.machine, of->gpu, wanted - before);
  if (fits) of->stack_bytes = wanted;
  if (wanted < before) allot_gpu_give_back(&driver.machine, of->gpu, before - wanted);
  UNLOCK();
  return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  ENTER_CONTEXT(current);
  TRY(check_limit(limit));
  if (limit == CU_LIMIT_STACK_SIZE) TRY(resize_stacks(current, value));
  current->limits[limit] = value;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCacheConfig(CUfunc_cache *config) {
  ENTER_CONTEXT(current);
  if (config == NULL) return CUDA_ERROR_INVALID_VALUE;
  *config = current->cache;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCacheConfig(CUfunc_cache config) {
  ENTER_CONTEXT(current);
  if (config > CU_FUNC_CACHE_PREFER_EQUAL) return CUDA_ERROR_INVALID_VALUE;
  current->cache = config;
  return CUDA_SUCCESS;
}

// Shared-memory banks have had one width since Maxwell: 4 bytes.
CUresult cuCtxGetSharedMemConfig(CUsharedconfig *config) {
  ENTER_CONTEXT(current);
  if (config == NULL) return CUDA_ERROR_INVALID_VALUE;
  *config = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetSharedMemConfig(CUsharedconfig config) {
  ENTER_CONTEXT(current);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  ENTER_CONTEXT(current);
  if (least != NULL) *least = 0;
  if (greatest != NULL) *greatest = STREAM_GREATEST_PRIORITY;
  return CUDA_SUCCESS;
}

CUresult cuCtxResetPersistingL2Cache(void) {
  ENTER_CONTEXT(current);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetExecAffinity(CUexecAffinityParam *affinity, CUexecAffinityType type) {
  ENTER_CONTEXT(current);
  return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
}
