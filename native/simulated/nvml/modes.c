// SPDX-License-Identifier: Apache-2.0
// What can be switched on a device: persistence, MIG, and what is simply off.
#include "simulated/nvml/library.h"

NVML_GETTER(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, true, NVML_FEATURE_ENABLED)
NVML_GETTER(nvmlDeviceGetDisplayMode, nvmlEnableState_t, true, NVML_FEATURE_DISABLED)
NVML_GETTER(nvmlDeviceGetDisplayActive, nvmlEnableState_t, true, NVML_FEATURE_DISABLED)
NVML_GETTER(nvmlDeviceGetVirtualizationMode, unsigned int, true, 0)

// Setting what is set already succeeds; these machines cannot change.
NVML_EXPORT nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode) {
  NVML_ENTER(device, mode <= NVML_FEATURE_ENABLED);
  return mode == NVML_FEATURE_ENABLED ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAPIRestriction(nvmlDevice_t device, unsigned int api,
                                                     nvmlEnableState_t *restricted) {
  NVML_ENTER(device, restricted != NULL && api <= 1);
  if (nvml_is_geforce(&gpu) || api != 0) return NVML_ERROR_NOT_SUPPORTED;
  *restricted = NVML_FEATURE_DISABLED;
  return NVML_SUCCESS;
}
