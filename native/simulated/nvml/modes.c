// SPDX-License-Identifier: Apache-2.0
// What can be switched on a device: persistence, compute mode, MIG, and what is simply off.
#include "simulated/nvml/library.h"

NVML_GETTER(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, true, NVML_FEATURE_ENABLED)
NVML_GETTER(nvmlDeviceGetComputeMode, nvmlComputeMode_t, true, NVML_COMPUTEMODE_DEFAULT)
NVML_GETTER(nvmlDeviceGetDisplayMode, nvmlEnableState_t, true, NVML_FEATURE_DISABLED)
NVML_GETTER(nvmlDeviceGetDisplayActive, nvmlEnableState_t, true, NVML_FEATURE_DISABLED)
NVML_GETTER(nvmlDeviceGetVirtualizationMode, unsigned int, true, 0)

// Setting what is set already succeeds; these machines cannot change.
NVML_EXPORT nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode) {
  NVML_ENTER(device, mode <= NVML_FEATURE_ENABLED);
  return mode == NVML_FEATURE_ENABLED ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode) {
  NVML_ENTER(device, mode <= 3);
  return mode == NVML_COMPUTEMODE_DEFAULT ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAPIRestriction(nvmlDevice_t device, unsigned int api,
                                                     nvmlEnableState_t *restricted) {
  NVML_ENTER(device, restricted != NULL && api <= 1);
  if (nvml_is_geforce(&gpu) || api != 0) return NVML_ERROR_NOT_SUPPORTED;
  *restricted = NVML_FEATURE_DISABLED;
  return NVML_SUCCESS;
}

// ---- MIG: models that can have it have it off --------------------------------------------------

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current,
                                              unsigned int *pending) {
  NVML_ENTER(device, current != NULL && pending != NULL);
  if (gpu.description->mig_supported == 0) return NVML_ERROR_NOT_SUPPORTED;
  *current = *pending = NVML_FEATURE_DISABLED;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode,
                                              nvmlReturn_t *activation) {
  NVML_ENTER(device, activation != NULL && mode <= NVML_FEATURE_ENABLED);
  if (gpu.description->mig_supported == 0 || mode != NVML_FEATURE_DISABLED) {
    return NVML_ERROR_NOT_SUPPORTED;
  }
  *activation = NVML_SUCCESS;
  return NVML_SUCCESS;
}

NVML_GETTER(nvmlDeviceIsMigDeviceHandle, unsigned int, true, 0)
NVML_GETTER(nvmlDeviceGetMaxMigDeviceCount, unsigned int, true, 0)

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device,
                                                             unsigned int index,
                                                             nvmlDevice_t *mig) {
  NVML_ENTER(device, mig != NULL);
  return gpu.description->mig_supported != 0 ? NVML_ERROR_NOT_FOUND : NVML_ERROR_NOT_SUPPORTED;
}

// Calls that only a MIG device's handle can make.
#define ONLY_FOR_MIG(name, type)                                    \
  NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, type *value) { \
    NVML_ENTER(device, value != NULL);                              \
    return NVML_ERROR_INVALID_ARGUMENT;                             \
  }

ONLY_FOR_MIG(nvmlDeviceGetGpuInstanceId, unsigned int)
ONLY_FOR_MIG(nvmlDeviceGetComputeInstanceId, unsigned int)
ONLY_FOR_MIG(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, nvmlDevice_t)

// ---- profiling metrics -------------------------------------------------------------------------

typedef struct gpm_support {
  unsigned int version;
  unsigned int supported;
} gpm_support;

NVML_EXPORT nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, gpm_support *support) {
  NVML_ENTER(device, support != NULL);
  if (support->version != 1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  support->supported = 0;
  return NVML_SUCCESS;
}
