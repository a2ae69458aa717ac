// SPDX-License-Identifier: Apache-2.0
// How wrappers are written and how they call the driver.
#ifndef ALLOTMENT_SHIM_DRIVER_H
#define ALLOTMENT_SHIM_DRIVER_H

#include "cuda_abi.h"
#include "entries.h"
#include "libraries.h"
#include "nvml_abi.h"
#include "share.h"
#include "shim.h"

// Defines wrap_<name> and exports it under the driver's name.
#define WRAPPER(type, name, parameters)                                   \
  type wrap_##name parameters;                                            \
  SHIM_EXPORT type name parameters __attribute__((alias("wrap_" #name))); \
  type wrap_##name parameters
#define CUDA_WRAPPER(name, parameters) WRAPPER(CUresult, name, parameters)
#define NVML_WRAPPER(name, parameters) WRAPPER(nvmlReturn_t, name, parameters)

// More than zero while this thread is in the driver on the shim's behalf: a driver that calls its
// own exported functions comes through here again, and is not charged twice.
extern __thread unsigned driver_depth __attribute__((tls_model("initial-exec")));

// Does this call concern the share? If not, it is the driver's alone.
static inline bool governed(void) {
  return share_present() && driver_depth == 0;
}

// The driver's own function behind an owned entry.
#define REAL(name) ((__typeof__(&name))libraries_real(ENTRY_##name))

// The driver's functions that the shim uses without owning them.
// clang-format off
#define DRIVER_FUNCTIONS(X) \
  X(cuCtxGetApiVersion) \
  X(cuCtxGetCurrent) \
  X(cuCtxGetDevice) \
  X(cuCtxGetLimit) \
  X(cuCtxPopCurrent_v2) \
  X(cuCtxPushCurrent_v2) \
  X(cuCtxSetCurrent) \
  X(cuDeviceGetAttribute) \
  X(cuDeviceGetCount) \
  X(cuDeviceGetDefaultMemPool) \
  X(cuDeviceGetGraphMemAttribute) \
  X(cuDeviceGetMemPool) \
  X(cuDeviceGetUuid) \
  X(cuDeviceGetUuid_v2) \
  X(cuDevicePrimaryCtxGetState) \
  X(cuEventCreate) \
  X(cuEventElapsedTime) \
  X(cuEventQuery) \
  X(cuEventRecord) \
  X(cuGraphChildGraphNodeGetGraph) \
  X(cuGraphGetEdges) \
  X(cuGraphGetNodes) \
  X(cuGraphMemAllocNodeGetParams) \
  X(cuGraphMemFreeNodeGetParams) \
  X(cuGraphNodeGetType) \
  X(cuLibraryGetGlobal) \
  X(cuMemAdvise) \
  X(cuMemGetAddressRange_v2) \
  X(cuMemGetDefaultMemPool) \
  X(cuMemPoolGetAttribute) \
  X(cuMemPrefetchAsync) \
  X(cuModuleGetGlobal_v2) \
  X(cuStreamCreate) \
  X(cuStreamDestroy_v2) \
  X(cuStreamGetCtx) \
  X(cuStreamIsCapturing) \
  X(cuStreamQuery) \
  X(cuThreadExchangeStreamCaptureMode)
// clang-format on

typedef enum driver_function {
#define DRIVER_FUNCTION(name) USED_##name,
  DRIVER_FUNCTIONS(DRIVER_FUNCTION)
#undef DRIVER_FUNCTION
      USED_COUNT,
} driver_function;

// Never NULL: where the driver has no such function, one that answers CUDA_ERROR_NOT_SUPPORTED.
void *driver_function_address(driver_function function);
#define USED(name) ((__typeof__(&name))driver_function_address(USED_##name))

// Runs an expression that calls the driver.
#define DRIVER(call)            \
  ({                            \
    driver_depth++;             \
    __auto_type result_ = call; \
    driver_depth--;             \
    result_;                    \
  })

#endif
