// SPDX-License-Identifier: Apache-2.0
// Errors of a device's memory, as the machine's faults have them.
#include <string.h>

#include "simulated/nvml/library.h"

enum { REMAPPER_BANKS_GDDR = 192, REMAPPER_BANKS_AMPERE = 640, REMAPPER_BANKS_LATER = 2560 };

unsigned long long nvml_ecc_count(const nvml_gpu *gpu, unsigned int error, unsigned int counter) {
  const allot_gpu_faults *faults = gpu->faults;
  bool corrected = error == NVML_MEMORY_ERROR_TYPE_CORRECTED;
  if (counter == NVML_VOLATILE_ECC) {
    return corrected ? allot_load(&faults->ecc_volatile_corrected)
                     : allot_load(&faults->ecc_volatile_uncorrected);
  }
  return corrected ? allot_load(&faults->ecc_aggregate_corrected)
                   : allot_load(&faults->ecc_aggregate_uncorrected);
}

static nvmlEnableState_t ecc_state(const nvml_gpu *gpu) {
  return gpu->description->ecc_enabled != 0 ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current,
                                              nvmlEnableState_t *pending) {
  NVML_ENTER(device, current != NULL && pending != NULL);
  if (gpu.description->ecc_supported == 0) return NVML_ERROR_NOT_SUPPORTED;
  *current = *pending = ecc_state(&gpu);
  return NVML_SUCCESS;
}

NVML_GETTER(nvmlDeviceGetDefaultEccMode, nvmlEnableState_t, gpu.description->ecc_supported != 0,
            nvml_is_geforce(&gpu) ? NVML_FEATURE_DISABLED : NVML_FEATURE_ENABLED)

NVML_EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device,
                                                     nvmlMemoryErrorType_t error,
                                                     nvmlEccCounterType_t counter,
                                                     unsigned long long *count) {
  NVML_ENTER(device, count != NULL && error <= 1 && counter <= 1);
  if (!nvml_counts_ecc(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  *count = nvml_ecc_count(&gpu, error, counter);
  return NVML_SUCCESS;
}

// All errors here are of the device's memory; its caches never fail.
NVML_EXPORT nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device,
                                                        nvmlMemoryErrorType_t error,
                                                        nvmlEccCounterType_t counter,
                                                        nvmlEccErrorCounts_t *counts) {
  NVML_ENTER(device, counts != NULL && error <= 1 && counter <= 1);
  if (!nvml_counts_ecc(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  *counts = (nvmlEccErrorCounts_t){.deviceMemory = nvml_ecc_count(&gpu, error, counter)};
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device,
                                                         nvmlMemoryErrorType_t error,
                                                         nvmlEccCounterType_t counter,
                                                         nvmlMemoryLocation_t location,
                                                         unsigned long long *count) {
  NVML_ENTER(device, count != NULL && error <= 1 && counter <= 1);
  if (location >= NVML_MEMORY_LOCATION_COUNT) return NVML_ERROR_INVALID_ARGUMENT;
  if (!nvml_counts_ecc(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  bool ampere = nvml_is_at_least(&gpu, NVML_DEVICE_ARCH_AMPERE);
  switch (location) {
    case NVML_MEMORY_LOCATION_DEVICE_MEMORY:
      *count = nvml_ecc_count(&gpu, error, counter);
      return NVML_SUCCESS;
    case NVML_MEMORY_LOCATION_SRAM:  // the one name for all caches from Ampere on
      if (!ampere) return NVML_ERROR_NOT_SUPPORTED;
      break;
    default:
      if (ampere) return NVML_ERROR_NOT_SUPPORTED;
      break;
  }
  *count = 0;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device,
                                                         nvmlEccSramErrorStatus_v1_t *status) {
  NVML_ENTER(device, status != NULL);
  if (status->version != nvmlEccSramErrorStatus_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  bool supported = nvml_counts_ecc(&gpu) && nvml_is_at_least(&gpu, NVML_DEVICE_ARCH_AMPERE);
  if (!supported) return NVML_ERROR_NOT_SUPPORTED;
  *status = (nvmlEccSramErrorStatus_v1_t){.version = nvmlEccSramErrorStatus_v1};
  return NVML_SUCCESS;
}

// ---- pages taken out of use: up to Turing ------------------------------------------------------

static nvmlReturn_t retired_pages(nvmlDevice_t device, nvmlPageRetirementCause_t cause,
                                  unsigned int *count, unsigned long long *addresses,
                                  unsigned long long *times) {
  NVML_ENTER(device, count != NULL && cause <= 1);
  if (!nvml_retires_pages(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  bool double_bit = cause == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR;
  unsigned int pages = double_bit ? allot_load(&gpu.faults->retired_pages_dbe)
                                  : allot_load(&gpu.faults->retired_pages_sbe);
  bool enough = *count >= pages && (pages == 0 || addresses != NULL);
  bool asked_for_count = *count == 0;
  *count = pages;
  if (!enough) return asked_for_count ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
  for (unsigned int i = 0; i < pages; i++) {
    addresses[i] = ((unsigned long long)cause << 20) + i;
    if (times != NULL) times[i] = 0;
  }
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device,
                                                   nvmlPageRetirementCause_t cause,
                                                   unsigned int *count,
                                                   unsigned long long *addresses) {
  return retired_pages(device, cause, count, addresses, NULL);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device,
                                                      nvmlPageRetirementCause_t cause,
                                                      unsigned int *count,
                                                      unsigned long long *addresses,
                                                      unsigned long long *times) {
  return retired_pages(device, cause, count, addresses, times);
}

NVML_GETTER(nvmlDeviceGetRetiredPagesPendingStatus, nvmlEnableState_t, nvml_retires_pages(&gpu),
            NVML_FEATURE_DISABLED)

// ---- rows put in others' place: from Ampere on -------------------------------------------------

NVML_EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected,
                                                   unsigned int *uncorrected, unsigned int *pending,
                                                   unsigned int *failed) {
  NVML_ENTER(device, corrected != NULL && uncorrected != NULL && pending != NULL && failed != NULL);
  if (!nvml_remaps_rows(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  *corrected = allot_load(&gpu.faults->remapped_rows_correctable);
  *uncorrected = allot_load(&gpu.faults->remapped_rows_uncorrectable);
  *pending = *failed = 0;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t
nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *values) {
  NVML_ENTER(device, values != NULL);
  if (!nvml_remaps_rows(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  unsigned int banks = REMAPPER_BANKS_GDDR;
  if (nvml_has_hbm(&gpu)) {
    bool later = nvml_is_at_least(&gpu, NVML_DEVICE_ARCH_HOPPER);
    banks = later ? REMAPPER_BANKS_LATER : REMAPPER_BANKS_AMPERE;
  }
  unsigned int rows = allot_load(&gpu.faults->remapped_rows_correctable) +
                      allot_load(&gpu.faults->remapped_rows_uncorrectable);
  unsigned int touched = rows < banks ? rows : banks;  // each row in a bank of its own
  *values = (nvmlRowRemapperHistogramValues_t){.max = banks - touched, .high = touched};
  return NVML_SUCCESS;
}
