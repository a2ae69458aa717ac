// SPDX-License-Identifier: Apache-2.0
// A device's memory as NVML tells it: the share's part, with nothing kept back by the driver.
#include "nvml.h"
#include "report.h"

// `device` gets the policy's index if NVML itself answers for the device.
static nvmlReturn_t answered(nvmlReturn_t result, nvmlDevice_t handle, process **own, int *device) {
  if (result != NVML_SUCCESS) return result;
  *own = process_view();
  return *own == NULL ? NVML_NO_SHARE : nvml_device(*own, handle, device);
}

NVML_WRAPPER(nvmlDeviceGetMemoryInfo, (nvmlDevice_t handle, nvmlMemory_t *memory)) {
  if (memory == NULL || !governed()) return REAL(nvmlDeviceGetMemoryInfo)(handle, memory);
  nvmlMemory_t whole;
  process *own;
  int device;
  nvmlReturn_t result =
      answered(DRIVER(REAL(nvmlDeviceGetMemoryInfo)(handle, &whole)), handle, &own, &device);
  if (result != NVML_SUCCESS) return result;
  memory_report report = report_memory(own, device);
  *memory = (nvmlMemory_t){.total = report.total, .free = report.free, .used = report.used};
  return NVML_SUCCESS;
}

NVML_WRAPPER(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t handle, nvmlMemory_v2_t *memory)) {
  if (memory == NULL || !governed()) return REAL(nvmlDeviceGetMemoryInfo_v2)(handle, memory);
  nvmlMemory_v2_t whole = {.version = memory->version};
  process *own;
  int device;
  nvmlReturn_t result =
      answered(DRIVER(REAL(nvmlDeviceGetMemoryInfo_v2)(handle, &whole)), handle, &own, &device);
  if (result != NVML_SUCCESS) return result;
  memory_report report = report_memory(own, device);
  *memory = (nvmlMemory_v2_t){
      .version = whole.version, .total = report.total, .free = report.free, .used = report.used};
  return NVML_SUCCESS;
}
