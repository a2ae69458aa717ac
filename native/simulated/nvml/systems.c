// SPDX-License-Identifier: Apache-2.0
// Calls about the system: versions, names of processes and of errors, units.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated/nvml/library.h"

NVML_EXPORT const char *nvmlErrorString(nvmlReturn_t result) {
  switch (result) {
    case NVML_SUCCESS:
      return "Success";
    case NVML_ERROR_UNINITIALIZED:
      return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
      return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
      return "Not Supported";
    case NVML_ERROR_NO_PERMISSION:
      return "Insufficient Permissions";
    case NVML_ERROR_ALREADY_INITIALIZED:
      return "Already Initialized";
    case NVML_ERROR_NOT_FOUND:
      return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
      return "Insufficient Size";
    case NVML_ERROR_INSUFFICIENT_POWER:
      return "Insufficient External Power";
    case NVML_ERROR_DRIVER_NOT_LOADED:
      return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT:
      return "Timeout";
    case NVML_ERROR_IRQ_ISSUE:
      return "Interrupt Request Issue";
    case NVML_ERROR_LIBRARY_NOT_FOUND:
      return "NVML Shared Library Not Found";
    case NVML_ERROR_FUNCTION_NOT_FOUND:
      return "Function Not Found";
    case NVML_ERROR_CORRUPTED_INFOROM:
      return "Corrupted infoROM";
    case NVML_ERROR_GPU_IS_LOST:
      return "GPU is lost";
    case NVML_ERROR_RESET_REQUIRED:
      return "GPU requires restart";
    case NVML_ERROR_OPERATING_SYSTEM:
      return "The operating system has blocked the request.";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH:
      return "Driver/library version mismatch";
    case NVML_ERROR_IN_USE:
      return "In use by another client";
    case NVML_ERROR_MEMORY:
      return "Insufficient Memory";
    case NVML_ERROR_NO_DATA:
      return "No data";
    case NVML_ERROR_VGPU_ECC_NOT_SUPPORTED:
      return "vGPU ECC is not supported";
    case NVML_ERROR_INSUFFICIENT_RESOURCES:
      return "Insufficient resources";
    case NVML_ERROR_FREQ_NOT_SUPPORTED:
      return "Ran out of critical resources, other than memory";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
      return "The provided version is invalid/unsupported";
    case NVML_ERROR_DEPRECATED:
      return "The requested functionality has been deprecated";
    case NVML_ERROR_NOT_READY:
      return "The system is not ready for the request";
    case NVML_ERROR_GPU_NOT_FOUND:
      return "No GPUs were found";
    case NVML_ERROR_INVALID_STATE:
      return "Resource not in correct state to perform requested operation";
    case NVML_ERROR_RESET_TYPE_NOT_SUPPORTED:
      return "Reset not supported for given device/parameters";
    case NVML_ERROR_UNKNOWN:
      break;
  }
  return "Unknown Error";
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
  NVML_READY(version != NULL);
  return nvml_copy_text(nvml_engine()->machine->description.driver_version, version, length);
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
  NVML_READY(version != NULL);
  return nvml_copy_text(nvml_engine()->machine->description.nvml_version, version, length);
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_v1_t *branch,
                                                   unsigned int length) {
  NVML_READY(branch != NULL);
  if (branch->version != nvmlSystemDriverBranchInfo_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  char text[sizeof branch->branch];
  long number = strtol(nvml_engine()->machine->description.driver_version, NULL, 10);
  snprintf(text, sizeof text, "r%ld_00", number);
  return nvml_copy_text(text, branch->branch,
                        length < sizeof branch->branch ? length : sizeof branch->branch);
}

// The first word of the process's command line, cut to fit.
NVML_EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name,
                                                  unsigned int length) {
  NVML_READY(name != NULL && length > 0);
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return NVML_ERROR_NOT_FOUND;
  ssize_t got = read(descriptor, name, length - 1);
  close(descriptor);
  if (got < 0) return NVML_ERROR_NO_PERMISSION;
  name[got] = '\0';
  return NVML_SUCCESS;
}

// Units are S-class racks of long ago; interface cards for them, too.
NVML_EXPORT nvmlReturn_t nvmlUnitGetCount(unsigned int *count) {
  NVML_READY(count != NULL);
  *count = 0;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlUnitGetHandleByIndex(unsigned int index, nvmlUnit_t *unit) {
  NVML_READY(unit != NULL);
  return NVML_ERROR_INVALID_ARGUMENT;
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetHicVersion(unsigned int *count, void *entries) {
  NVML_READY(count != NULL);
  *count = 0;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned int *count) {
  if (count == NULL) return NVML_ERROR_INVALID_ARGUMENT;
  *count = 0;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlGetExcludedDeviceInfoByIndex(unsigned int index, void *info) {
  return NVML_ERROR_INVALID_ARGUMENT;
}
