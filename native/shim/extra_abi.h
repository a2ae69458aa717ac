// SPDX-License-Identifier: Apache-2.0
// Entry points of the driver that only the shim needs, in the manner of cuda_abi.h.
#ifndef ALLOTMENT_SHIM_EXTRA_ABI_H
#define ALLOTMENT_SHIM_EXTRA_ABI_H

#include "cuda_abi.h"

typedef struct CUdevResourceDesc_st *CUdevResourceDesc;

CU_ENTRY_PTSZ(cuWaitExternalSemaphoresAsync, (const void *semaphores, const void *parameters,
                                              unsigned int count, CUstream stream));
CU_ENTRY_PTSZ(cuStreamBeginCaptureToCig, (CUstream stream, void *parameters));
CU_ENTRY(cuLogicalEndpointBindAddr, (uint32_t endpoint, CUdevice device, uint64_t offset,
                                     void *address, uint64_t size, unsigned long long flags));
CU_ENTRY(cuLogicalEndpointBindMem,
         (uint32_t endpoint, CUdevice device, uint64_t offset, CUmemGenericAllocationHandle memory,
          uint64_t from, uint64_t size, unsigned long long flags));
CU_ENTRY(cuLogicalEndpointUnbind,
         (uint32_t endpoint, CUdevice device, uint64_t offset, uint64_t size));
CU_ENTRY(cuLaunch, (CUfunction function));
CU_ENTRY(cuLaunchGrid, (CUfunction function, int width, int height));
CU_ENTRY(cuLaunchGridAsync, (CUfunction function, int width, int height, CUstream stream));
CU_ENTRY(cuCtxDetach, (CUcontext ctx));
CU_ENTRY(cuGreenCtxCreate, (CUgreenCtx * context, CUdevResourceDesc description, CUdevice device,
                            unsigned int flags));
CU_ENTRY(cuGreenCtxDestroy, (CUgreenCtx context));
CU_ENTRY(cuGreenCtxWaitEvent, (CUgreenCtx context, CUevent event));
CU_ENTRY(cuCtxFromGreenCtx, (CUcontext * context, CUgreenCtx part));

#endif
