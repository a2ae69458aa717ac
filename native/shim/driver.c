// SPDX-License-Identifier: Apache-2.0
// The driver's functions that the shim calls but does not wrap.
#include "driver.h"

#include "process.h"

__thread driver_entry *driver_inside __attribute__((tls_model("initial-exec")));

// Stacks grow downwards: a frame that the wrapper was not called from begins below its own, or
// other frames have taken its place.
__attribute__((noinline)) SHIM_EARLY bool driver_holds_lock(const void *frame) {
  const driver_entry *entry = driver_inside;
  if ((uintptr_t)entry >= (uintptr_t)frame &&
      __atomic_load_n(&entry->self, __ATOMIC_RELAXED) == ENTRY_SELF(entry)) {
    return process_holds_lock();
  }
  driver_inside = NULL;
  return false;
}

bool driver_refuses(void) {
  return driver_inside != NULL && share_present();
}

CUresult driver_refusal(void) {
  return CUDA_ERROR_NOT_PERMITTED;
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
