// SPDX-License-Identifier: Apache-2.0
// Contexts, primary and explicit, and their limits.
#ifndef ALLOTMENT_CUDA_ABI_CONTEXT_H
#define ALLOTMENT_CUDA_ABI_CONTEXT_H

#include "device.h"

typedef enum CUctx_flags {
  CU_CTX_SCHED_AUTO = 0,
  CU_CTX_SCHED_SPIN = 1,
  CU_CTX_SCHED_YIELD = 2,
  CU_CTX_SCHED_BLOCKING_SYNC = 4,
  CU_CTX_BLOCKING_SYNC = 4,
  CU_CTX_SCHED_MASK = 7,
  CU_CTX_MAP_HOST = 8,
  CU_CTX_LMEM_RESIZE_TO_MAX = 16,
  CU_CTX_COREDUMP_ENABLE = 32,
  CU_CTX_USER_COREDUMP_ENABLE = 64,
  CU_CTX_SYNC_MEMOPS = 128,
  CU_CTX_FLAGS_MASK = 255,
} CUctx_flags;

typedef struct CUctx_st *CUcontext;

typedef struct CUexecAffinitySmCount {
  unsigned int val;
} CUexecAffinitySmCount;
typedef CUexecAffinitySmCount CUexecAffinitySmCount_v1;

typedef struct CUexecAffinityParam {
  CUexecAffinityType type;
  union {
    CUexecAffinitySmCount smCount;
  } param;
} CUexecAffinityParam;
typedef CUexecAffinityParam CUexecAffinityParam_v1;

typedef enum CUcigDataType {
  CIG_DATA_TYPE_D3D12_COMMAND_QUEUE = 1,
  CIG_DATA_TYPE_NV_BLOB = 2,
} CUcigDataType;

typedef struct CUctxCigParam {
  CUcigDataType sharedDataType;
  void *sharedData;
} CUctxCigParam;

typedef struct CUctxCreateParams {
  CUexecAffinityParam *execAffinityParams;
  int numExecAffinityParams;
  CUctxCigParam *cigParams;
} CUctxCreateParams;

typedef enum CUlimit {
  CU_LIMIT_STACK_SIZE = 0,
  CU_LIMIT_PRINTF_FIFO_SIZE = 1,
  CU_LIMIT_MALLOC_HEAP_SIZE = 2,
  CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH = 3,
  CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT = 4,
  CU_LIMIT_MAX_L2_FETCH_GRANULARITY = 5,
  CU_LIMIT_PERSISTING_L2_CACHE_SIZE = 6,
  CU_LIMIT_SHMEM_SIZE = 7,
  CU_LIMIT_CIG_ENABLED = 8,
  CU_LIMIT_CIG_SHMEM_FALLBACK_ENABLED = 9,
  CU_LIMIT_PER_BLOCK_MEMORY_SIZE = 10,
  CU_LIMIT_MAX = 11,
} CUlimit;

typedef enum CUfunc_cache {
  CU_FUNC_CACHE_PREFER_NONE = 0,
  CU_FUNC_CACHE_PREFER_SHARED = 1,
  CU_FUNC_CACHE_PREFER_L1 = 2,
  CU_FUNC_CACHE_PREFER_EQUAL = 3,
} CUfunc_cache;

typedef enum CUsharedconfig {
  CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE = 0,
  CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE = 1,
  CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE = 2,
} CUsharedconfig;

CU_ENTRY(cuDevicePrimaryCtxRetain, (CUcontext * pctx, CUdevice device));
CU_ENTRY(cuDevicePrimaryCtxRelease_v2, (CUdevice device));
CU_ENTRY(cuDevicePrimaryCtxSetFlags_v2, (CUdevice device, unsigned int flags));
CU_ENTRY(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned int *flags, int *active));
CU_ENTRY(cuDevicePrimaryCtxReset_v2, (CUdevice device));
CU_ENTRY(cuCtxCreate_v4, (CUcontext * pctx, CUctxCreateParams *ctx_create_params,
                          unsigned int flags, CUdevice device));
CU_ENTRY(cuCtxDestroy_v2, (CUcontext ctx));
CU_ENTRY(cuCtxPushCurrent_v2, (CUcontext ctx));
CU_ENTRY(cuCtxPopCurrent_v2, (CUcontext * pctx));
CU_ENTRY(cuCtxSetCurrent, (CUcontext ctx));
CU_ENTRY(cuCtxGetCurrent, (CUcontext * pctx));
CU_ENTRY(cuCtxGetDevice, (CUdevice * device));
CU_ENTRY(cuCtxGetDevice_v2, (CUdevice * device, CUcontext ctx));
CU_ENTRY(cuCtxGetFlags, (unsigned int *flags));
CU_ENTRY(cuCtxSetFlags, (unsigned int flags));
CU_ENTRY(cuCtxGetId, (CUcontext ctx, unsigned long long *ctx_id));
CU_ENTRY(cuCtxSynchronize, (void));
CU_ENTRY(cuCtxSynchronize_v2, (CUcontext ctx));
CU_ENTRY(cuCtxSetLimit, (CUlimit limit, size_t value));
CU_ENTRY(cuCtxGetLimit, (size_t *pvalue, CUlimit limit));
CU_ENTRY(cuCtxGetCacheConfig, (CUfunc_cache * pconfig));
CU_ENTRY(cuCtxSetCacheConfig, (CUfunc_cache config));
CU_ENTRY(cuCtxGetApiVersion, (CUcontext ctx, unsigned int *version));
CU_ENTRY(cuCtxGetStreamPriorityRange, (int *least_priority, int *greatest_priority));
CU_ENTRY(cuCtxResetPersistingL2Cache, (void));
CU_ENTRY(cuCtxGetExecAffinity, (CUexecAffinityParam * exec_affinity, CUexecAffinityType type));
CU_ENTRY(cuCtxGetSharedMemConfig, (CUsharedconfig * config));
CU_ENTRY(cuCtxSetSharedMemConfig, (CUsharedconfig config));
CU_ENTRY(cuCtxEnablePeerAccess, (CUcontext peer_context, unsigned int flags));
CU_ENTRY(cuCtxDisablePeerAccess, (CUcontext peer_context));
CU_ENTRY(cuCtxCreate, (CUcontext * pctx, unsigned int flags, CUdevice device));
CU_ENTRY(cuCtxCreate_v2, (CUcontext * pctx, unsigned int flags, CUdevice device));
// Of cudaGL.h and cudaVDPAU.h.
CU_ENTRY(cuGLCtxCreate, (CUcontext * pctx, unsigned int flags, CUdevice device));
CU_ENTRY(cuGLCtxCreate_v2, (CUcontext * pctx, unsigned int flags, CUdevice device));
CU_ENTRY(cuVDPAUCtxCreate, (CUcontext * pctx, unsigned int flags, CUdevice device,
                            uint32_t vdp_device, void *vdp_get_proc_address));
CU_ENTRY(cuVDPAUCtxCreate_v2, (CUcontext * pctx, unsigned int flags, CUdevice device,
                               uint32_t vdp_device, void *vdp_get_proc_address));
CU_ENTRY(cuCtxCreate_v3, (CUcontext * pctx, CUexecAffinityParam *params_array, int num_params,
                          unsigned int flags, CUdevice device));
CU_ENTRY(cuCtxDestroy, (CUcontext ctx));
CU_ENTRY(cuCtxPopCurrent, (CUcontext * pctx));
CU_ENTRY(cuCtxPushCurrent, (CUcontext ctx));
CU_ENTRY(cuDevicePrimaryCtxRelease, (CUdevice device));
CU_ENTRY(cuDevicePrimaryCtxReset, (CUdevice device));
CU_ENTRY(cuDevicePrimaryCtxSetFlags, (CUdevice device, unsigned int flags));

#endif
