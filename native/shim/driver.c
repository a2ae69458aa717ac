// SPDX-License-Identifier: Apache-2.0
// The driver's functions that the shim calls but does not wrap.
#include "driver.h"

__thread unsigned driver_depth __attribute__((tls_model("initial-exec")));

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
