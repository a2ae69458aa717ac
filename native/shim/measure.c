// SPDX-License-Identifier: Apache-2.0
// Asks NVML who uses a device. Starting NVML takes milliseconds. So that is done only where a
// context is made, which takes far longer, and where memory of dead processes is wanted.
#include "measure.h"

#include <string.h>
#include <unistd.h>

#include "driver.h"

typedef nvmlReturn_t nvml_start(void);
typedef nvmlReturn_t nvml_by_uuid(const char *uuid, nvmlDevice_t *device);
typedef nvmlReturn_t nvml_processes(nvmlDevice_t device, unsigned *count,
                                    nvmlProcessInfo_v2_t *list);

static bool list_of(nvmlDevice_t device, process_list *list) {
  nvml_processes *list_processes =
      (nvml_processes *)entry_real(entry_real(ENTRY_nvmlDeviceGetComputeRunningProcesses_v3) != NULL
                                       ? ENTRY_nvmlDeviceGetComputeRunningProcesses_v3
                                       : ENTRY_nvmlDeviceGetComputeRunningProcesses_v2);
  list->count = MEASURED_PROCESSES;
  return list_processes != NULL &&
         DRIVER(list_processes(device, &list->count, list->processes)) == NVML_SUCCESS;
}

bool measure_processes(const char *uuid, process_list *list) {
  nvml_start *start = (nvml_start *)libraries_symbol(LIBRARY_NVML, "nvmlInit_v2");
  nvml_start *stop = (nvml_start *)libraries_symbol(LIBRARY_NVML, "nvmlShutdown");
  nvml_by_uuid *by_uuid = (nvml_by_uuid *)entry_real(ENTRY_nvmlDeviceGetHandleByUUID);
  if (start == NULL || stop == NULL || by_uuid == NULL) return false;
  char text[ALLOT_UUID_BYTES + 1] = {0};
  memcpy(text, uuid, ALLOT_UUID_BYTES);
  if (DRIVER(start()) != NVML_SUCCESS) return false;
  nvmlDevice_t handle;
  bool listed = DRIVER(by_uuid(text, &handle)) == NVML_SUCCESS && list_of(handle, list);
  DRIVER(stop());
  return listed;
}

bool measure_process_bytes(process *own, int device, uint64_t *bytes) {
  process_list list;
  if (!measure_processes(own->policies[device]->uuid, &list)) return false;
  *bytes = 0;  // before its first context a process is not in the list
  for (unsigned i = 0; i < list.count; i++) {
    if (list.processes[i].pid != (unsigned)getpid()) continue;
    if (list.processes[i].usedGpuMemory == (unsigned long long)NVML_VALUE_NOT_AVAILABLE) {
      return false;
    }
    *bytes += list.processes[i].usedGpuMemory;
  }
  return true;
}
