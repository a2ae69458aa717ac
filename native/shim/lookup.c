// SPDX-License-Identifier: Apache-2.0
// cuGetProcAddress: the program's request goes to the driver as it is, with its version and flags,
// and of what comes back an owned function is exchanged for the wrapper of that very variant.
#include <dlfcn.h>
#include <string.h>

#include "driver.h"

// Drivers return the addresses that they also export, which tells the variant. For one that does
// not, this is the order in which variants of a name came: of those up to the version that was
// asked for, the last. Versions as in NVIDIA's cudaTypedefs.h.
typedef struct variant {
  const char *name;
  int version;
  int entry;
  int per_thread;  // its form for per-thread default streams, or -1
} variant;

#define ONE(name, version) {#name, version, ENTRY_##name, -1}
#define TWO(name, version) {#name, version, ENTRY_##name, ENTRY_##name##_ptsz}
#define AS(name, version, entry) {#name, version, ENTRY_##entry, -1}
#define PER(name, version, entry, own) {#name, version, ENTRY_##entry, ENTRY_##own}

static const variant variants[] = {
    AS(cuArray3DCreate, 2000, cuArray3DCreate),
    AS(cuArray3DCreate, 3020, cuArray3DCreate_v2),
    AS(cuArrayCreate, 2000, cuArrayCreate),
    AS(cuArrayCreate, 3020, cuArrayCreate_v2),
    ONE(cuArrayDestroy, 2000),
    ONE(cuCheckpointProcessRestore, 12080),
    AS(cuCtxCreate, 2000, cuCtxCreate),
    AS(cuCtxCreate, 3020, cuCtxCreate_v2),
    AS(cuCtxCreate, 11040, cuCtxCreate_v3),
    AS(cuCtxCreate, 12050, cuCtxCreate_v4),
    AS(cuCtxDestroy, 2000, cuCtxDestroy),
    AS(cuCtxDestroy, 4000, cuCtxDestroy_v2),
    ONE(cuCtxDetach, 2000),
    ONE(cuCtxSetLimit, 3010),
    AS(cuCtxSynchronize, 2000, cuCtxSynchronize),
    AS(cuCtxSynchronize, 13000, cuCtxSynchronize_v2),
    ONE(cuCtxWaitEvent, 12050),
    ONE(cuDeviceGraphMemTrim, 11040),
    AS(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease),
    AS(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2),
    AS(cuDevicePrimaryCtxReset, 7000, cuDevicePrimaryCtxReset),
    AS(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2),
    ONE(cuDevicePrimaryCtxRetain, 7000),
    AS(cuDeviceTotalMem, 2000, cuDeviceTotalMem),
    AS(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2),
    ONE(cuEventSynchronize, 2000),
    AS(cuGLCtxCreate, 2000, cuGLCtxCreate),
    AS(cuGLCtxCreate, 3020, cuGLCtxCreate_v2),
    AS(cuGetProcAddress, 11030, cuGetProcAddress),
    AS(cuGetProcAddress, 12000, cuGetProcAddress_v2),
    ONE(cuGraphExecDestroy, 10000),
    AS(cuGraphInstantiate, 10000, cuGraphInstantiate),
    AS(cuGraphInstantiate, 11000, cuGraphInstantiate_v2),
    AS(cuGraphInstantiate, 12000, cuGraphInstantiateWithFlags),
    ONE(cuGraphInstantiateWithFlags, 11040),
    TWO(cuGraphInstantiateWithParams, 12000),
    TWO(cuGraphLaunch, 10000),
    TWO(cuGraphUpload, 11010),
    ONE(cuGreenCtxCreate, 12040),
    ONE(cuGreenCtxDestroy, 12040),
    ONE(cuGreenCtxWaitEvent, 12040),
    ONE(cuInit, 2000),
    AS(cuLaunch, 2000, cuLaunch),
    PER(cuLaunchCooperativeKernel, 9000, cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz),
    AS(cuLaunchCooperativeKernelMultiDevice, 9000, cuLaunchCooperativeKernelMultiDevice),
    AS(cuLaunchGrid, 2000, cuLaunchGrid),
    AS(cuLaunchGridAsync, 2000, cuLaunchGridAsync),
    PER(cuLaunchHostFunc, 10000, cuLaunchHostFunc, cuLaunchHostFunc_ptsz),
    PER(cuLaunchHostFunc, 13010, cuLaunchHostFunc_v2, cuLaunchHostFunc_v2_ptsz),
    PER(cuLaunchKernel, 4000, cuLaunchKernel, cuLaunchKernel_ptsz),
    PER(cuLaunchKernelEx, 11060, cuLaunchKernelEx, cuLaunchKernelEx_ptsz),
    ONE(cuLibraryLoadData, 12000),
    ONE(cuLibraryLoadFromFile, 12000),
    ONE(cuLibraryUnload, 12000),
    ONE(cuLogicalEndpointBindAddr, 13030),
    ONE(cuLogicalEndpointBindMem, 13030),
    ONE(cuLogicalEndpointUnbind, 13030),
    AS(cuMemAlloc, 2000, cuMemAlloc),
    AS(cuMemAlloc, 3020, cuMemAlloc_v2),
    TWO(cuMemAllocAsync, 11020),
    TWO(cuMemAllocFromPoolAsync, 11020),
    ONE(cuMemAllocManaged, 6000),
    AS(cuMemAllocPitch, 2000, cuMemAllocPitch),
    AS(cuMemAllocPitch, 3020, cuMemAllocPitch_v2),
    ONE(cuMemCreate, 10020),
    ONE(cuMemExportToShareableHandle, 10020),
    AS(cuMemFree, 2000, cuMemFree),
    AS(cuMemFree, 3020, cuMemFree_v2),
    TWO(cuMemFreeAsync, 11020),
    ONE(cuMemGetHandleForAddressRange, 11070),
    AS(cuMemGetInfo, 2000, cuMemGetInfo),
    AS(cuMemGetInfo, 3020, cuMemGetInfo_v2),
    ONE(cuMemMap, 10020),
    TWO(cuMemMapArrayAsync, 11010),
    ONE(cuMemPoolCreate, 11020),
    ONE(cuMemPoolDestroy, 11020),
    ONE(cuMemPoolSetAttribute, 11020),
    ONE(cuMemPoolTrimTo, 11020),
    ONE(cuMemRelease, 10020),
    ONE(cuMemRetainAllocationHandle, 11000),
    ONE(cuMemUnmap, 10020),
    PER(cuMemcpy, 4000, cuMemcpy, cuMemcpy_ptds),
    AS(cuMemcpy2D, 2000, cuMemcpy2D),
    PER(cuMemcpy2D, 3020, cuMemcpy2D_v2, cuMemcpy2D_v2_ptds),
    AS(cuMemcpy2DAsync, 2000, cuMemcpy2DAsync),
    PER(cuMemcpy2DAsync, 3020, cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz),
    AS(cuMemcpy2DUnaligned, 2000, cuMemcpy2DUnaligned),
    PER(cuMemcpy2DUnaligned, 3020, cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds),
    AS(cuMemcpy3D, 2000, cuMemcpy3D),
    PER(cuMemcpy3D, 3020, cuMemcpy3D_v2, cuMemcpy3D_v2_ptds),
    AS(cuMemcpy3DAsync, 2000, cuMemcpy3DAsync),
    PER(cuMemcpy3DAsync, 3020, cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz),
    PER(cuMemcpy3DBatchAsync, 12080, cuMemcpy3DBatchAsync, cuMemcpy3DBatchAsync_ptsz),
    PER(cuMemcpy3DBatchAsync, 13000, cuMemcpy3DBatchAsync_v2, cuMemcpy3DBatchAsync_v2_ptsz),
    PER(cuMemcpy3DPeer, 4000, cuMemcpy3DPeer, cuMemcpy3DPeer_ptds),
    PER(cuMemcpy3DPeerAsync, 4000, cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz),
    PER(cuMemcpy3DWithAttributesAsync, 13020, cuMemcpy3DWithAttributesAsync,
        cuMemcpy3DWithAttributesAsync_ptsz),
    PER(cuMemcpyAsync, 4000, cuMemcpyAsync, cuMemcpyAsync_ptsz),
    AS(cuMemcpyAtoA, 2000, cuMemcpyAtoA),
    PER(cuMemcpyAtoA, 3020, cuMemcpyAtoA_v2, cuMemcpyAtoA_v2_ptds),
    AS(cuMemcpyAtoD, 2000, cuMemcpyAtoD),
    PER(cuMemcpyAtoD, 3020, cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds),
    AS(cuMemcpyAtoH, 2000, cuMemcpyAtoH),
    PER(cuMemcpyAtoH, 3020, cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds),
    AS(cuMemcpyAtoHAsync, 2000, cuMemcpyAtoHAsync),
    PER(cuMemcpyAtoHAsync, 3020, cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2_ptsz),
    PER(cuMemcpyBatchAsync, 12080, cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz),
    PER(cuMemcpyBatchAsync, 13000, cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz),
    AS(cuMemcpyDtoA, 2000, cuMemcpyDtoA),
    PER(cuMemcpyDtoA, 3020, cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds),
    AS(cuMemcpyDtoD, 2000, cuMemcpyDtoD),
    PER(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds),
    AS(cuMemcpyDtoDAsync, 3000, cuMemcpyDtoDAsync),
    PER(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz),
    AS(cuMemcpyDtoH, 2000, cuMemcpyDtoH),
    PER(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds),
    AS(cuMemcpyDtoHAsync, 2000, cuMemcpyDtoHAsync),
    PER(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz),
    AS(cuMemcpyHtoA, 2000, cuMemcpyHtoA),
    PER(cuMemcpyHtoA, 3020, cuMemcpyHtoA_v2, cuMemcpyHtoA_v2_ptds),
    AS(cuMemcpyHtoAAsync, 2000, cuMemcpyHtoAAsync),
    PER(cuMemcpyHtoAAsync, 3020, cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync_v2_ptsz),
    AS(cuMemcpyHtoD, 2000, cuMemcpyHtoD),
    PER(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds),
    AS(cuMemcpyHtoDAsync, 2000, cuMemcpyHtoDAsync),
    PER(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz),
    PER(cuMemcpyPeer, 4000, cuMemcpyPeer, cuMemcpyPeer_ptds),
    PER(cuMemcpyPeerAsync, 4000, cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz),
    PER(cuMemcpyWithAttributesAsync, 13020, cuMemcpyWithAttributesAsync,
        cuMemcpyWithAttributesAsync_ptsz),
    AS(cuMemsetD16, 2000, cuMemsetD16),
    PER(cuMemsetD16, 3020, cuMemsetD16_v2, cuMemsetD16_v2_ptds),
    PER(cuMemsetD16Async, 3020, cuMemsetD16Async, cuMemsetD16Async_ptsz),
    AS(cuMemsetD2D16, 2000, cuMemsetD2D16),
    PER(cuMemsetD2D16, 3020, cuMemsetD2D16_v2, cuMemsetD2D16_v2_ptds),
    PER(cuMemsetD2D16Async, 3020, cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz),
    AS(cuMemsetD2D32, 2000, cuMemsetD2D32),
    PER(cuMemsetD2D32, 3020, cuMemsetD2D32_v2, cuMemsetD2D32_v2_ptds),
    PER(cuMemsetD2D32Async, 3020, cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz),
    AS(cuMemsetD2D8, 2000, cuMemsetD2D8),
    PER(cuMemsetD2D8, 3020, cuMemsetD2D8_v2, cuMemsetD2D8_v2_ptds),
    PER(cuMemsetD2D8Async, 3020, cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz),
    AS(cuMemsetD32, 2000, cuMemsetD32),
    PER(cuMemsetD32, 3020, cuMemsetD32_v2, cuMemsetD32_v2_ptds),
    PER(cuMemsetD32Async, 3020, cuMemsetD32Async, cuMemsetD32Async_ptsz),
    AS(cuMemsetD8, 2000, cuMemsetD8),
    PER(cuMemsetD8, 3020, cuMemsetD8_v2, cuMemsetD8_v2_ptds),
    PER(cuMemsetD8Async, 3020, cuMemsetD8Async, cuMemsetD8Async_ptsz),
    ONE(cuMipmappedArrayCreate, 5000),
    ONE(cuMipmappedArrayDestroy, 5000),
    ONE(cuModuleLoad, 2000),
    ONE(cuModuleLoadData, 2000),
    ONE(cuModuleLoadDataEx, 2010),
    ONE(cuModuleLoadFatBinary, 2000),
    ONE(cuModuleUnload, 2000),
    AS(cuMulticastBindAddr, 12010, cuMulticastBindAddr),
    AS(cuMulticastBindAddr, 13010, cuMulticastBindAddr_v2),
    AS(cuMulticastBindMem, 12010, cuMulticastBindMem),
    AS(cuMulticastBindMem, 13010, cuMulticastBindMem_v2),
    ONE(cuMulticastUnbind, 12010),
    PER(cuStreamAddCallback, 5000, cuStreamAddCallback, cuStreamAddCallback_ptsz),
    PER(cuStreamBatchMemOp, 8000, cuStreamBatchMemOp, cuStreamBatchMemOp_ptsz),
    PER(cuStreamBatchMemOp, 11070, cuStreamBatchMemOp_v2, cuStreamBatchMemOp_v2_ptsz),
    PER(cuStreamBeginCapture, 10000, cuStreamBeginCapture, cuStreamBeginCapture_ptsz),
    PER(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz),
    PER(cuStreamBeginCaptureToCig, 13010, cuStreamBeginCaptureToCig,
        cuStreamBeginCaptureToCig_ptsz),
    PER(cuStreamBeginCaptureToGraph, 12030, cuStreamBeginCaptureToGraph,
        cuStreamBeginCaptureToGraph_ptsz),
    PER(cuStreamBeginRecaptureToGraph, 13030, cuStreamBeginRecaptureToGraph,
        cuStreamBeginRecaptureToGraph_ptsz),
    AS(cuStreamDestroy, 2000, cuStreamDestroy),
    AS(cuStreamDestroy, 4000, cuStreamDestroy_v2),
    PER(cuStreamEndCapture, 10000, cuStreamEndCapture, cuStreamEndCapture_ptsz),
    TWO(cuStreamSynchronize, 2000),
    PER(cuStreamWaitEvent, 3020, cuStreamWaitEvent, cuStreamWaitEvent_ptsz),
    PER(cuStreamWaitValue32, 8000, cuStreamWaitValue32, cuStreamWaitValue32_ptsz),
    PER(cuStreamWaitValue32, 11070, cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz),
    PER(cuStreamWaitValue64, 9000, cuStreamWaitValue64, cuStreamWaitValue64_ptsz),
    PER(cuStreamWaitValue64, 11070, cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz),
    AS(cuVDPAUCtxCreate, 3010, cuVDPAUCtxCreate),
    AS(cuVDPAUCtxCreate, 3020, cuVDPAUCtxCreate_v2),
    PER(cuWaitExternalSemaphoresAsync, 10000, cuWaitExternalSemaphoresAsync,
        cuWaitExternalSemaphoresAsync_ptsz),
};

#define PER_THREAD_STREAM_VERSION 7000

static int entry_of_request(const char *name, int version, uint64_t flags) {
  const variant *chosen = NULL;
  for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
    if (variants[i].version <= version && strcmp(variants[i].name, name) == 0) {
      chosen = &variants[i];
    }
  }
  // A name may also be given with its suffix, and then means that one.
  if (chosen == NULL) return entry_by_name(name);
  bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
  return per_thread && chosen->per_thread >= 0 && version >= PER_THREAD_STREAM_VERSION
             ? chosen->per_thread
             : chosen->entry;
}

// The name under which the driver exports the very address, or NULL.
static const char *exported_name(const void *address) {
  Dl_info info;
  return dladdr(address, &info) != 0 && info.dli_saddr == address ? info.dli_sname : NULL;
}

static void exchange(const char *name, void **function, int version, uint64_t flags) {
  if (name == NULL || function == NULL || *function == NULL) return;
  int entry = entry_by_address(*function);
  if (entry < 0) {
    const char *exported = exported_name(*function);
    // A name that is not owned is also a variant that came after this shim.
    entry = exported != NULL ? entry_by_name(exported) : entry_of_request(name, version, flags);
    // Calls go through the pointer that the driver gave.
    if (entry >= 0) entry_learn(entry, *function);
  }
  if (entry >= 0) *function = entry_wrapper(entry);
}

CUDA_WRAPPER(cuGetProcAddress, (const char *symbol, void **function, int version, uint64_t flags)) {
  CUresult result = DRIVER(REAL(cuGetProcAddress)(symbol, function, version, flags));
  if (result == CUDA_SUCCESS && share_present()) exchange(symbol, function, version, flags);
  return result;
}

CUDA_WRAPPER(cuGetProcAddress_v2, (const char *symbol, void **function, int version, uint64_t flags,
                                   CUdriverProcAddressQueryResult *status)) {
  CUresult result = DRIVER(REAL(cuGetProcAddress_v2)(symbol, function, version, flags, status));
  if (result == CUDA_SUCCESS && share_present()) exchange(symbol, function, version, flags);
  return result;
}
