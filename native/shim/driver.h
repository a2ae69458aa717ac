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

// What the driver writes as a result goes to the shim's own variable first, as the program's may be
// written by another thread. RESULT is its place, GIVE_RESULT hands it over.
#define RESULT(theirs, own) ((theirs) == NULL ? NULL : &(own))
#define GIVE_RESULT(theirs, own, result) \
  do {                                   \
    if ((result) == CUDA_SUCCESS) {      \
      *(theirs) = (own);                 \
    }                                    \
  } while (0)

// A call of the driver on the shim's behalf, in the frame that makes it. The driver's own calls of
// its exported functions do not come to the wrappers (libraries.c). So a wrapper that is called
// from below such a frame is called by the program: by a signal's handler, or a function that the
// driver calls back. It does as always, unless the thread holds a lock of the shim, which it could
// wait for: then the call is refused, or is the driver's if it takes nothing.
//
// A signal's handler may jump out of such a call (siglongjmp). So the entry counts only while its
// frame is there: what is left of it after a jump says nothing.
typedef struct driver_entry {
  uintptr_t self;  // names the entry itself, until it is left
  struct driver_entry *outer;
} driver_entry;

// The innermost of this thread; NULL: it is not in the driver.
extern __thread driver_entry *driver_inside __attribute__((tls_model("initial-exec")));

#define ENTRY_SELF(entry) ((uintptr_t)(entry) ^ UINTPTR_MAX)

static inline void driver_enter(driver_entry *entry) {
  entry->outer = driver_inside;
  __atomic_store_n(&entry->self, ENTRY_SELF(entry), __ATOMIC_RELAXED);
  driver_inside = entry;
}

static inline void driver_leave(driver_entry *entry) {
  driver_inside = entry->outer;
  __atomic_store_n(&entry->self, 0, __ATOMIC_RELAXED);
}

// Was the wrapper called from below the innermost entry, with a lock held? Forgets the entry if it
// was not called from below. `frame`: where the wrapper's own frame begins. An entry that a jump
// left in it is still whole.
bool driver_holds_lock(const void *frame);

// Does this call concern the share? If not, it is the driver's alone, or refused.
static inline bool governed(void) {
  return share_present() &&
         (LIKELY(driver_inside == NULL) || !driver_holds_lock(__builtin_dwarf_cfa()));
}

// Is a call that is not governed the program's, from within one of the driver?
bool driver_refuses(void);
CUresult driver_refusal(void);

// The driver's own function behind an owned entry.
#define REAL(name) ((__typeof__(&name))libraries_real(ENTRY_##name))
// For a call that is not governed and could change what is charged.
#define UNGOVERNED(name) \
  (UNLIKELY(driver_refuses()) ? (__typeof__(&name))(void *)driver_refusal : REAL(name))

// The driver's functions that the shim uses without owning them.
// clang-format off
#define DRIVER_FUNCTIONS(X) \
  X(cuCtxFromGreenCtx) \
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
  X(cuDeviceSetMemPool) \
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
  X(cuMemGetMemPool) \
  X(cuMemPoolGetAttribute) \
  X(cuMemPrefetchAsync) \
  X(cuMemSetMemPool) \
  X(cuModuleGetGlobal_v2) \
  X(cuStreamCreate) \
  X(cuStreamDestroy_v2) \
  X(cuStreamGetCtx) \
  X(cuStreamGetFlags) \
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
    driver_entry entry_;        \
    driver_enter(&entry_);      \
    __auto_type result_ = call; \
    driver_leave(&entry_);      \
    result_;                    \
  })

#endif
