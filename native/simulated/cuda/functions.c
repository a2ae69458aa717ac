// SPDX-License-Identifier: Apache-2.0
// What can be asked of functions, and how many of their blocks fit on the GPU.
#include <string.h>

#include "simulated/cuda/driver.h"

// Registers are what a modest kernel uses; nothing is compiled here that would tell.
#define REGISTERS_PER_THREAD 32

CUresult function_attribute(const function *asked, const context *owner,
                            CUfunction_attribute attribute, int *value) {
  const allot_gpu_description *own = driver_description(owner->gpu);
  int capability = (int)(own->compute_major * 10 + own->compute_minor);
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = (int)own->max_threads_per_block;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = REGISTERS_PER_THREAD;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *value = capability;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = asked->dynamic_shared > 0 ? asked->dynamic_shared : (int)own->shared_per_block;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      *value = asked->carveout;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
      *value = asked->cluster[0];
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
      *value = asked->cluster[1];
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
      *value = asked->cluster[2];
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      *value = asked->nonportable_cluster;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      *value = asked->cluster_schedule;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
      *value = 0;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult function_set_attribute(function *changed, const context *owner,
                                CUfunction_attribute attribute, int value) {
  const allot_gpu_description *own = driver_description(owner->gpu);
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      if (value < 0 || (uint32_t)value > own->shared_per_block_optin)
        return CUDA_ERROR_INVALID_VALUE;
      changed->dynamic_shared = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      if (value < -1 || value > 100) return CUDA_ERROR_INVALID_VALUE;
      changed->carveout = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
      changed->cluster[0] = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
      changed->cluster[1] = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
      changed->cluster[2] = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      changed->nonportable_cluster = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      changed->cluster_schedule = value;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
  ENTER_CONTEXT(current);
  function *asked;
  TRY(function_of(handle, &asked));
  return value != NULL ? function_attribute(asked, current, attribute, value)
                       : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  ENTER_CONTEXT(current);
  function *changed;
  TRY(function_of(handle, &changed));
  return function_set_attribute(changed, current, attribute, value);
}

CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config) {
  ENTER_CONTEXT(current);
  function *changed;
  TRY(function_of(handle, &changed));
  changed->cache = config;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetSharedMemConfig(CUfunction handle, CUsharedconfig config) {
  ENTER_CONTEXT(current);
  function *changed;
  return function_of(handle, &changed);
}

CUresult cuFuncGetModule(CUmodule *owner, CUfunction handle) {
  ENTER_CONTEXT(current);
  function *asked;
  TRY(function_of(handle, &asked));
  if (owner == NULL) return CUDA_ERROR_INVALID_VALUE;
  *owner = (CUmodule)asked->module;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **name, CUfunction handle) {
  ENTER_CONTEXT(current);
  function *asked;
  TRY(function_of(handle, &asked));
  if (name == NULL) return CUDA_ERROR_INVALID_VALUE;
  *name = asked->name;
  return CUDA_SUCCESS;
}

// Parameters are not known here beyond what a launch brings.
CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *size) {
  ENTER_CONTEXT(current);
  function *asked;
  TRY(function_of(handle, &asked));
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFuncGetParamCount(CUfunction handle, size_t *count) {
  ENTER_CONTEXT(current);
  function *asked;
  TRY(function_of(handle, &asked));
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction handle) {
  ENTER_CONTEXT(current);
  function *asked;
  TRY(function_of(handle, &asked));
  if (state == NULL) return CUDA_ERROR_INVALID_VALUE;
  *state = CU_FUNCTION_LOADING_STATE_LOADED;
  return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction handle) {
  ENTER_CONTEXT(current);
  function *asked;
  return function_of(handle, &asked);
}

// ---- occupancy ---------------------------------------------------------------------------------

static unsigned smaller(unsigned one, unsigned other) {
  return one < other ? one : other;
}

static unsigned blocks_per_sm(const context *owner, unsigned threads, size_t shared) {
  const allot_gpu_description *own = driver_description(owner->gpu);
  if (threads == 0 || threads > own->max_threads_per_block) return 0;
  unsigned warps = (threads + own->warp_size - 1) / own->warp_size;
  unsigned most = device_blocks_per_sm(own);
  unsigned blocks = smaller(most, own->max_threads_per_sm / (warps * own->warp_size));
  blocks = smaller(blocks, own->registers_per_sm / (REGISTERS_PER_THREAD * warps * own->warp_size));
  if (shared > 0) {
    // The system keeps 1 KiB of each block's shared memory since compute capability 8.
    size_t taken = shared + (own->compute_major >= 8 ? 1024 : 0);
    blocks = smaller(blocks, (unsigned)(own->shared_per_sm / taken));
  }
  return blocks;
}

uint64_t launch_blocks(const CUlaunchConfig *config) {
  return (uint64_t)config->gridDimX * config->gridDimY * config->gridDimZ;
}

static uint32_t wanted_sms(const context *owner, const CUlaunchConfig *config) {
  uint64_t blocks = launch_blocks(config);
  if (blocks <= 1) return 1;
  uint32_t sms = driver_description(owner->gpu)->sm_count;
  unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  unsigned each = blocks_per_sm(owner, threads, config->sharedMemBytes);
  if (each == 0) each = 1;
  uint64_t needed = (blocks + each - 1) / each;
  return needed < sms ? (uint32_t)needed : sms;
}

uint32_t launch_sms(const context *owner, const CUlaunchConfig *config) {
  uint32_t wanted = wanted_sms(owner, config), most = mps_multiprocessors(owner->gpu);
  return wanted < most ? wanted : most;
}

uint64_t launch_ns(const context *owner, const CUlaunchConfig *config, uint64_t duration_ns) {
  uint32_t wanted = wanted_sms(owner, config), most = mps_multiprocessors(owner->gpu);
  if (wanted <= most) return duration_ns;
  return (uint64_t)((unsigned __int128)duration_ns * wanted / most);
}

uint64_t occupancy_blocks(const function *asked, const context *owner,
                          const CUlaunchConfig *config) {
  unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  return (uint64_t)blocks_per_sm(owner, threads, config->sharedMemBytes) *
         driver_description(owner->gpu)->sm_count;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction handle,
                                                              int threads, size_t shared,
                                                              unsigned int flags) {
  ENTER_CONTEXT(current);
  function *asked;
  TRY(function_of(handle, &asked));
  if (blocks == NULL || threads <= 0 || flags > 1) return CUDA_ERROR_INVALID_VALUE;
  *blocks = (int)blocks_per_sm(current, (unsigned)threads, shared);
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction handle, int threads,
                                                     size_t shared) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, handle, threads, shared, 0);
}

CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction handle,
                                                   CUoccupancyB2DSize shared_of, size_t shared,
                                                   int limit, unsigned int flags) {
  ENTER_CONTEXT(current);
  function *asked;
  TRY(function_of(handle, &asked));
  if (grid == NULL || block == NULL || flags > 1) return CUDA_ERROR_INVALID_VALUE;
  const allot_gpu_description *own = driver_description(current->gpu);
  int most = (int)own->max_threads_per_block;
  if (limit > 0 && limit < most) most = limit;
  int warp = (int)own->warp_size;
  unsigned best_threads = 0;
  for (int threads = most; threads > 0; threads = (threads - 1) / warp * warp) {
    size_t needed = shared_of != NULL ? (size_t)shared_of(threads) : shared;
    unsigned blocks = blocks_per_sm(current, (unsigned)threads, needed);
    if (blocks * (unsigned)threads <= best_threads) continue;
    best_threads = blocks * (unsigned)threads;
    *block = threads;
    *grid = (int)(blocks * own->sm_count);
  }
  return best_threads > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction handle,
                                          CUoccupancyB2DSize shared_of, size_t shared, int limit) {
  return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, handle, shared_of, shared, limit,
                                                   0);
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *shared, CUfunction handle, int blocks,
                                                 int threads) {
  ENTER_CONTEXT(current);
  function *asked;
  TRY(function_of(handle, &asked));
  if (shared == NULL || blocks <= 0 || threads <= 0) return CUDA_ERROR_INVALID_VALUE;
  const allot_gpu_description *own = driver_description(current->gpu);
  size_t each = own->shared_per_sm / (unsigned)blocks;
  size_t kept = own->compute_major >= 8 ? 1024 : 0;
  each = each > kept ? each - kept : 0;
  *shared = each < own->shared_per_block ? each : own->shared_per_block;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialClusterSize(int *size, CUfunction handle,
                                            const CUlaunchConfig *config) {
  ENTER_CONTEXT(current);
  function *asked;
  TRY(function_of(handle, &asked));
  if (size == NULL || config == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (driver_description(current->gpu)->compute_major < 9) return CUDA_ERROR_NOT_SUPPORTED;
  *size = asked->nonportable_cluster ? 16 : 8;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction handle,
                                      const CUlaunchConfig *config) {
  ENTER_CONTEXT(current);
  function *asked;
  TRY(function_of(handle, &asked));
  if (clusters == NULL || config == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (driver_description(current->gpu)->compute_major < 9) return CUDA_ERROR_NOT_SUPPORTED;
  unsigned size = 1;
  for (unsigned i = 0; i < config->numAttrs; i++) {
    if (config->attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
    size = config->attrs[i].value.clusterDim.x * config->attrs[i].value.clusterDim.y *
           config->attrs[i].value.clusterDim.z;
  }
  if (size == 0) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
  *clusters = (int)(occupancy_blocks(asked, current, config) / size);
  return CUDA_SUCCESS;
}
