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

static const variant variants[] = {
    AS(cuArray3DCreate, 2000, cuArray3DCreate),
    AS(cuArray3DCreate, 3020, cuArray3DCreate_v2),
    AS(cuArrayCreate, 2000, cuArrayCreate),
    AS(cuArrayCreate, 3020, cuArrayCreate_v2),
    ONE(cuArrayDestroy, 2000),
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
    ONE(cuDeviceGraphMemTrim, 11040),
    AS(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease),
    AS(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2),
    AS(cuDevicePrimaryCtxReset, 7000, cuDevicePrimaryCtxReset),
    AS(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2),
    ONE(cuDevicePrimaryCtxRetain, 7000),
    AS(cuDeviceTotalMem, 2000, cuDeviceTotalMem),
    AS(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2),
    ONE(cuEventSynchronize, 2000),
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
    ONE(cuInit, 2000),
    ONE(cuLibraryLoadData, 12000),
    ONE(cuLibraryLoadFromFile, 12000),
    ONE(cuLibraryUnload, 12000),
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
    ONE(cuMipmappedArrayCreate, 5000),
    ONE(cuMipmappedArrayDestroy, 5000),
    ONE(cuModuleLoad, 2000),
    ONE(cuModuleLoadData, 2000),
    ONE(cuModuleLoadDataEx, 2010),
    ONE(cuModuleLoadFatBinary, 2000),
    ONE(cuModuleUnload, 2000),
    TWO(cuStreamSynchronize, 2000),
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
