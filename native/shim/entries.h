// SPDX-License-Identifier: Apache-2.0
// The entry points that the shim owns: each is exported by it under the driver's own name, and its
// address takes the place of the driver's wherever a program may look it up. Everything that is not
// named here goes straight to the driver and costs nothing.
//
// Both lists are in the order of strcmp, for the look-up by name (a test holds them to it).
#ifndef ALLOTMENT_SHIM_ENTRIES_H
#define ALLOTMENT_SHIM_ENTRIES_H

#include "shim.h"

// clang-format off
#define SHIM_CUDA_ENTRIES(X) \
  X(cuArray3DCreate) \
  X(cuArray3DCreate_v2) \
  X(cuArrayCreate) \
  X(cuArrayCreate_v2) \
  X(cuArrayDestroy) \
  X(cuCheckpointProcessRestore) \
  X(cuCtxCreate) \
  X(cuCtxCreate_v2) \
  X(cuCtxCreate_v3) \
  X(cuCtxCreate_v4) \
  X(cuCtxDestroy) \
  X(cuCtxDestroy_v2) \
  X(cuCtxDetach) \
  X(cuCtxSetLimit) \
  X(cuCtxSynchronize) \
  X(cuCtxSynchronize_v2) \
  X(cuCtxWaitEvent) \
  X(cuDeviceGraphMemTrim) \
  X(cuDevicePrimaryCtxRelease) \
  X(cuDevicePrimaryCtxRelease_v2) \
  X(cuDevicePrimaryCtxReset) \
  X(cuDevicePrimaryCtxReset_v2) \
  X(cuDevicePrimaryCtxRetain) \
  X(cuDeviceTotalMem) \
  X(cuDeviceTotalMem_v2) \
  X(cuEventSynchronize) \
  X(cuGLCtxCreate) \
  X(cuGLCtxCreate_v2) \
  X(cuGetProcAddress) \
  X(cuGetProcAddress_v2) \
  X(cuGraphExecDestroy) \
  X(cuGraphInstantiate) \
  X(cuGraphInstantiateWithFlags) \
  X(cuGraphInstantiateWithParams) \
  X(cuGraphInstantiateWithParams_ptsz) \
  X(cuGraphInstantiate_v2) \
  X(cuGraphLaunch) \
  X(cuGraphLaunch_ptsz) \
  X(cuGraphUpload) \
  X(cuGraphUpload_ptsz) \
  X(cuGreenCtxCreate) \
  X(cuGreenCtxDestroy) \
  X(cuGreenCtxWaitEvent) \
  X(cuInit) \
  X(cuLaunch) \
  X(cuLaunchCooperativeKernel) \
  X(cuLaunchCooperativeKernelMultiDevice) \
  X(cuLaunchCooperativeKernel_ptsz) \
  X(cuLaunchGrid) \
  X(cuLaunchGridAsync) \
  X(cuLaunchHostFunc) \
  X(cuLaunchHostFunc_ptsz) \
  X(cuLaunchHostFunc_v2) \
  X(cuLaunchHostFunc_v2_ptsz) \
  X(cuLaunchKernel) \
  X(cuLaunchKernelEx) \
  X(cuLaunchKernelEx_ptsz) \
  X(cuLaunchKernel_ptsz) \
  X(cuLibraryLoadData) \
  X(cuLibraryLoadFromFile) \
  X(cuLibraryUnload) \
  X(cuLogicalEndpointBindAddr) \
  X(cuLogicalEndpointBindMem) \
  X(cuLogicalEndpointUnbind) \
  X(cuMemAlloc) \
  X(cuMemAllocAsync) \
  X(cuMemAllocAsync_ptsz) \
  X(cuMemAllocFromPoolAsync) \
  X(cuMemAllocFromPoolAsync_ptsz) \
  X(cuMemAllocManaged) \
  X(cuMemAllocPitch) \
  X(cuMemAllocPitch_v2) \
  X(cuMemAlloc_v2) \
  X(cuMemCreate) \
  X(cuMemExportToShareableHandle) \
  X(cuMemFree) \
  X(cuMemFreeAsync) \
  X(cuMemFreeAsync_ptsz) \
  X(cuMemFree_v2) \
  X(cuMemGetHandleForAddressRange) \
  X(cuMemGetInfo) \
  X(cuMemGetInfo_v2) \
  X(cuMemMap) \
  X(cuMemMapArrayAsync) \
  X(cuMemMapArrayAsync_ptsz) \
  X(cuMemPoolCreate) \
  X(cuMemPoolDestroy) \
  X(cuMemPoolImportFromShareableHandle) \
  X(cuMemPoolSetAttribute) \
  X(cuMemPoolTrimTo) \
  X(cuMemRelease) \
  X(cuMemRetainAllocationHandle) \
  X(cuMemUnmap) \
  X(cuMemcpy) \
  X(cuMemcpy2D) \
  X(cuMemcpy2DAsync) \
  X(cuMemcpy2DAsync_v2) \
  X(cuMemcpy2DAsync_v2_ptsz) \
  X(cuMemcpy2DUnaligned) \
  X(cuMemcpy2DUnaligned_v2) \
  X(cuMemcpy2DUnaligned_v2_ptds) \
  X(cuMemcpy2D_v2) \
  X(cuMemcpy2D_v2_ptds) \
  X(cuMemcpy3D) \
  X(cuMemcpy3DAsync) \
  X(cuMemcpy3DAsync_v2) \
  X(cuMemcpy3DAsync_v2_ptsz) \
  X(cuMemcpy3DBatchAsync) \
  X(cuMemcpy3DBatchAsync_ptsz) \
  X(cuMemcpy3DBatchAsync_v2) \
  X(cuMemcpy3DBatchAsync_v2_ptsz) \
  X(cuMemcpy3DPeer) \
  X(cuMemcpy3DPeerAsync) \
  X(cuMemcpy3DPeerAsync_ptsz) \
  X(cuMemcpy3DPeer_ptds) \
  X(cuMemcpy3DWithAttributesAsync) \
  X(cuMemcpy3DWithAttributesAsync_ptsz) \
  X(cuMemcpy3D_v2) \
  X(cuMemcpy3D_v2_ptds) \
  X(cuMemcpyAsync) \
  X(cuMemcpyAsync_ptsz) \
  X(cuMemcpyAtoA) \
  X(cuMemcpyAtoA_v2) \
  X(cuMemcpyAtoA_v2_ptds) \
  X(cuMemcpyAtoD) \
  X(cuMemcpyAtoD_v2) \
  X(cuMemcpyAtoD_v2_ptds) \
  X(cuMemcpyAtoH) \
  X(cuMemcpyAtoHAsync) \
  X(cuMemcpyAtoHAsync_v2) \
  X(cuMemcpyAtoHAsync_v2_ptsz) \
  X(cuMemcpyAtoH_v2) \
  X(cuMemcpyAtoH_v2_ptds) \
  X(cuMemcpyBatchAsync) \
  X(cuMemcpyBatchAsync_ptsz) \
  X(cuMemcpyBatchAsync_v2) \
  X(cuMemcpyBatchAsync_v2_ptsz) \
  X(cuMemcpyDtoA) \
  X(cuMemcpyDtoA_v2) \
  X(cuMemcpyDtoA_v2_ptds) \
  X(cuMemcpyDtoD) \
  X(cuMemcpyDtoDAsync) \
  X(cuMemcpyDtoDAsync_v2) \
  X(cuMemcpyDtoDAsync_v2_ptsz) \
  X(cuMemcpyDtoD_v2) \
  X(cuMemcpyDtoD_v2_ptds) \
  X(cuMemcpyDtoH) \
  X(cuMemcpyDtoHAsync) \
  X(cuMemcpyDtoHAsync_v2) \
  X(cuMemcpyDtoHAsync_v2_ptsz) \
  X(cuMemcpyDtoH_v2) \
  X(cuMemcpyDtoH_v2_ptds) \
  X(cuMemcpyHtoA) \
  X(cuMemcpyHtoAAsync) \
  X(cuMemcpyHtoAAsync_v2) \
  X(cuMemcpyHtoAAsync_v2_ptsz) \
  X(cuMemcpyHtoA_v2) \
  X(cuMemcpyHtoA_v2_ptds) \
  X(cuMemcpyHtoD) \
  X(cuMemcpyHtoDAsync) \
  X(cuMemcpyHtoDAsync_v2) \
  X(cuMemcpyHtoDAsync_v2_ptsz) \
  X(cuMemcpyHtoD_v2) \
  X(cuMemcpyHtoD_v2_ptds) \
  X(cuMemcpyPeer) \
  X(cuMemcpyPeerAsync) \
  X(cuMemcpyPeerAsync_ptsz) \
  X(cuMemcpyPeer_ptds) \
  X(cuMemcpyWithAttributesAsync) \
  X(cuMemcpyWithAttributesAsync_ptsz) \
  X(cuMemcpy_ptds) \
  X(cuMemsetD16) \
  X(cuMemsetD16Async) \
  X(cuMemsetD16Async_ptsz) \
  X(cuMemsetD16_v2) \
  X(cuMemsetD16_v2_ptds) \
  X(cuMemsetD2D16) \
  X(cuMemsetD2D16Async) \
  X(cuMemsetD2D16Async_ptsz) \
  X(cuMemsetD2D16_v2) \
  X(cuMemsetD2D16_v2_ptds) \
  X(cuMemsetD2D32) \
  X(cuMemsetD2D32Async) \
  X(cuMemsetD2D32Async_ptsz) \
  X(cuMemsetD2D32_v2) \
  X(cuMemsetD2D32_v2_ptds) \
  X(cuMemsetD2D8) \
  X(cuMemsetD2D8Async) \
  X(cuMemsetD2D8Async_ptsz) \
  X(cuMemsetD2D8_v2) \
  X(cuMemsetD2D8_v2_ptds) \
  X(cuMemsetD32) \
  X(cuMemsetD32Async) \
  X(cuMemsetD32Async_ptsz) \
  X(cuMemsetD32_v2) \
  X(cuMemsetD32_v2_ptds) \
  X(cuMemsetD8) \
  X(cuMemsetD8Async) \
  X(cuMemsetD8Async_ptsz) \
  X(cuMemsetD8_v2) \
  X(cuMemsetD8_v2_ptds) \
  X(cuMipmappedArrayCreate) \
  X(cuMipmappedArrayDestroy) \
  X(cuModuleLoad) \
  X(cuModuleLoadData) \
  X(cuModuleLoadDataEx) \
  X(cuModuleLoadFatBinary) \
  X(cuModuleUnload) \
  X(cuMulticastBindAddr) \
  X(cuMulticastBindAddr_v2) \
  X(cuMulticastBindMem) \
  X(cuMulticastBindMem_v2) \
  X(cuMulticastUnbind) \
  X(cuStreamAddCallback) \
  X(cuStreamAddCallback_ptsz) \
  X(cuStreamBatchMemOp) \
  X(cuStreamBatchMemOp_ptsz) \
  X(cuStreamBatchMemOp_v2) \
  X(cuStreamBatchMemOp_v2_ptsz) \
  X(cuStreamBeginCapture) \
  X(cuStreamBeginCaptureToCig) \
  X(cuStreamBeginCaptureToCig_ptsz) \
  X(cuStreamBeginCaptureToGraph) \
  X(cuStreamBeginCaptureToGraph_ptsz) \
  X(cuStreamBeginCapture_ptsz) \
  X(cuStreamBeginCapture_v2) \
  X(cuStreamBeginCapture_v2_ptsz) \
  X(cuStreamBeginRecaptureToGraph) \
  X(cuStreamBeginRecaptureToGraph_ptsz) \
  X(cuStreamDestroy) \
  X(cuStreamDestroy_v2) \
  X(cuStreamEndCapture) \
  X(cuStreamEndCapture_ptsz) \
  X(cuStreamSynchronize) \
  X(cuStreamSynchronize_ptsz) \
  X(cuStreamWaitEvent) \
  X(cuStreamWaitEvent_ptsz) \
  X(cuStreamWaitValue32) \
  X(cuStreamWaitValue32_ptsz) \
  X(cuStreamWaitValue32_v2) \
  X(cuStreamWaitValue32_v2_ptsz) \
  X(cuStreamWaitValue64) \
  X(cuStreamWaitValue64_ptsz) \
  X(cuStreamWaitValue64_v2) \
  X(cuStreamWaitValue64_v2_ptsz) \
  X(cuVDPAUCtxCreate) \
  X(cuVDPAUCtxCreate_v2) \
  X(cuWaitExternalSemaphoresAsync) \
  X(cuWaitExternalSemaphoresAsync_ptsz)

#define SHIM_NVML_ENTRIES(X) \
  X(nvmlDeviceGetAccountingPids) \
  X(nvmlDeviceGetAccountingStats) \
  X(nvmlDeviceGetAccountingStats_v2) \
  X(nvmlDeviceGetComputeRunningProcesses) \
  X(nvmlDeviceGetComputeRunningProcesses_v2) \
  X(nvmlDeviceGetComputeRunningProcesses_v3) \
  X(nvmlDeviceGetConfComputeProtectedMemoryUsage) \
  X(nvmlDeviceGetCount) \
  X(nvmlDeviceGetCount_v2) \
  X(nvmlDeviceGetEncoderSessions) \
  X(nvmlDeviceGetFBCSessions) \
  X(nvmlDeviceGetGraphicsRunningProcesses) \
  X(nvmlDeviceGetGraphicsRunningProcesses_v2) \
  X(nvmlDeviceGetGraphicsRunningProcesses_v3) \
  X(nvmlDeviceGetHandleByIndex) \
  X(nvmlDeviceGetHandleByIndex_v2) \
  X(nvmlDeviceGetHandleByPciBusId) \
  X(nvmlDeviceGetHandleByPciBusId_v2) \
  X(nvmlDeviceGetHandleBySerial) \
  X(nvmlDeviceGetHandleByUUID) \
  X(nvmlDeviceGetHandleByUUIDV) \
  X(nvmlDeviceGetIndex) \
  X(nvmlDeviceGetMPSComputeRunningProcesses) \
  X(nvmlDeviceGetMPSComputeRunningProcesses_v2) \
  X(nvmlDeviceGetMPSComputeRunningProcesses_v3) \
  X(nvmlDeviceGetMemoryInfo) \
  X(nvmlDeviceGetMemoryInfo_v2) \
  X(nvmlDeviceGetMemoryLimits_v1) \
  X(nvmlDeviceGetMigDeviceHandleByIndex) \
  X(nvmlDeviceGetProcessUtilization) \
  X(nvmlDeviceGetProcessesUtilizationInfo) \
  X(nvmlDeviceGetRunningProcessDetailList) \
  X(nvmlDeviceGetTopologyNearestGpus) \
  X(nvmlDeviceSetMemoryLimits_v1) \
  X(nvmlSystemGetProcessName) \
  X(nvmlSystemGetTopologyGpuSet)
// clang-format on

typedef int shim_entry;
enum {
#define SHIM_ENTRY(name) ENTRY_##name,
  SHIM_CUDA_ENTRIES(SHIM_ENTRY) ENTRY_CUDA_END,
  ENTRY_NVML_START = ENTRY_CUDA_END - 1,  // the next one continues the count
  SHIM_NVML_ENTRIES(SHIM_ENTRY)
#undef SHIM_ENTRY
      ENTRY_COUNT,
};

static inline bool entry_is_cuda(shim_entry entry) {
  return entry < ENTRY_CUDA_END;
}

// The owned entry of that name, or -1. Cheap for the names of everything else.
shim_entry entry_by_name(const char *name);
const char *entry_name(shim_entry entry);
// The shim's own function.
void *entry_wrapper(shim_entry entry);

// The driver's function behind an entry, NULL while it is not known or where the driver has none.
void *entry_real(shim_entry entry);
// The first address that is learned stays.
void entry_learn(shim_entry entry, void *real);
// Another address of the same function, in a further copy of the driver.
void entry_alias(shim_entry entry, const void *address);
// The entry of a driver's address that was learned, or of a wrapper's own; -1: neither.
shim_entry entry_by_address(const void *address);

#endif
