// SPDX-License-Identifier: Apache-2.0
// Asks NVML for this process's own memory. Starting NVML takes milliseconds and is done only where
// a context's cost is not known from the policy; making a context takes far longer.
#include "measure.h"

#include <unistd.h>

#include "driver.h"

#define PROCESSES 256 /* of one device; with more of them the estimate has to do */

typedef nvmlReturn_t nvml_start(void);
typedef nvmlReturn_t nvml_by_uuid(const char *uuid, nvmlDevice_t *device);
typedef nvmlReturn_t nvml_processes(nvmlDevice_t device, unsigned *count,
                                    nvmlProcessInfo_v2_t *list);

static bool find_own(nvmlDevice_t device, uint64_t *bytes) {
  nvml_processes *list_processes =
      (nvml_processes *)entry_real(entry_real(ENTRY_nvmlDeviceGetComputeRunningProcesses_v3) != NULL
                                       ? ENTRY_nvmlDeviceGetComputeRunningProcesses_v3
                                       : ENTRY_nvmlDeviceGetComputeRunningProcesses_v2);
  nvmlProcessInfo_v2_t list[PROCESSES];
  unsigned count = PROCESSES;
  if (list_processes == NULL || DRIVER(list_processes(device, &count, list)) != NVML_SUCCESS) {
    return false;
  }
  *bytes = 0;  // before its first context a process is not in the list
  for (unsigned i = 0; i < count && i < PROCESSES; i++) {
    if (list[i].pid != (unsigned)getpid()) continue;
    if (list[i].usedGpuMemory == (unsigned long long)NVML_VALUE_NOT_AVAILABLE) return false;
    *bytes += list[i].usedGpuMemory;
  }
  return true;
}

bool measure_process_bytes(process *own, int device, uint64_t *bytes) {
  nvml_start *start = (nvml_start *)libraries_symbol(LIBRARY_NVML, "nvmlInit_v2");
  nvml_start *stop = (nvml_start *)libraries_symbol(LIBRARY_NVML, "nvmlShutdown");
  nvml_by_uuid *by_uuid = (nvml_by_uuid *)entry_real(ENTRY_nvmlDeviceGetHandleByUUID);
  if (start == NULL || stop == NULL || by_uuid == NULL) return false;
  if (DRIVER(start()) != NVML_SUCCESS) return false;
  nvmlDevice_t handle;
  bool told = DRIVER(by_uuid(own->ledger.policy->devices[device].uuid, &handle)) == NVML_SUCCESS &&
              find_own(handle, bytes);
  DRIVER(stop());
  return told;
}
