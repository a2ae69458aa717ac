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
  X(cuDeviceGraphMemTrim) \
  X(cuDevicePrimaryCtxRelease) \
  X(cuDevicePrimaryCtxRelease_v2) \
  X(cuDevicePrimaryCtxReset) \
  X(cuDevicePrimaryCtxReset_v2) \
  X(cuDevicePrimaryCtxRetain) \
  X(cuDeviceTotalMem) \
  X(cuDeviceTotalMem_v2) \
  X(cuEventSynchronize) \
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
  X(cuInit) \
  X(cuLaunch) \
  X(cuLaunchCooperativeKernel) \
  X(cuLaunchCooperativeKernelMultiDevice) \
  X(cuLaunchCooperativeKernel_ptsz) \
  X(cuLaunchGrid) \
  X(cuLaunchGridAsync) \
  X(cuLaunchKernel) \
  X(cuLaunchKernelEx) \
  X(cuLaunchKernelEx_ptsz) \
  X(cuLaunchKernel_ptsz) \
  X(cuLibraryLoadData) \
  X(cuLibraryLoadFromFile) \
  X(cuLibraryUnload) \
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
  X(cuMemPoolSetAttribute) \
  X(cuMemPoolTrimTo) \
  X(cuMemRelease) \
  X(cuMemRetainAllocationHandle) \
  X(cuMemUnmap) \
  X(cuMipmappedArrayCreate) \
  X(cuMipmappedArrayDestroy) \
  X(cuModuleLoad) \
  X(cuModuleLoadData) \
  X(cuModuleLoadDataEx) \
  X(cuModuleLoadFatBinary) \
  X(cuModuleUnload) \
  X(cuStreamSynchronize) \
  X(cuStreamSynchronize_ptsz)

#define SHIM_NVML_ENTRIES(X) \
  X(nvmlDeviceGetComputeRunningProcesses) \
  X(nvmlDeviceGetComputeRunningProcesses_v2) \
  X(nvmlDeviceGetComputeRunningProcesses_v3) \
  X(nvmlDeviceGetCount) \
  X(nvmlDeviceGetCount_v2) \
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
  X(nvmlDeviceGetProcessUtilization) \
  X(nvmlDeviceGetProcessesUtilizationInfo) \
  X(nvmlDeviceGetRunningProcessDetailList) \
  X(nvmlDeviceGetTopologyNearestGpus) \
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
