// SPDX-License-Identifier: Apache-2.0
// The driver's functions that the shim calls but does not wrap.
#include "driver.h"

__thread driver_entry *driver_inside __attribute__((tls_model("initial-exec")));

// Stacks grow downwards: a frame that the wrapper was not called from begins below its own, or
// other frames have taken its place.
__attribute__((noinline)) SHIM_EARLY bool driver_calls_back(const void *frame) {
  const driver_entry *entry = driver_inside;
  if ((uintptr_t)entry >= (uintptr_t)frame &&
      __atomic_load_n(&entry->self, __ATOMIC_RELAXED) == ENTRY_SELF(entry)) {
    return true;
  }
  driver_inside = NULL;
  return false;
}

static const char *const names[USED_COUNT] = {
#define DRIVER_FUNCTION(name) [USED_##name] = #name,
    DRIVER_FUNCTIONS(DRIVER_FUNCTION)
#undef DRIVER_FUNCTION
};

static void *addresses[USED_COUNT];

static CUresult not_there(void) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

void *driver_function_address(driver_function function) {
  void *address = __atomic_load_n(&addresses[function], __ATOMIC_ACQUIRE);
  if (LIKELY(address != NULL)) return address;
  address = libraries_symbol(LIBRARY_CUDA, names[function]);
  if (address == NULL) return (void *)not_there;
  __atomic_store_n(&addresses[function], address, __ATOMIC_RELEASE);
  return address;
}
