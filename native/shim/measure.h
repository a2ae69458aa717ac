// SPDX-License-Identifier: Apache-2.0
// What the driver itself reports of the processes of a device.
#ifndef ALLOTMENT_SHIM_MEASURE_H
#define ALLOTMENT_SHIM_MEASURE_H

#include "nvml_abi.h"
#include "process.h"

#define MEASURED_PROCESSES 256 /* of one device; of more there is no list */

typedef struct process_list {
  unsigned count;
  nvmlProcessInfo_v2_t processes[MEASURED_PROCESSES];
} process_list;

// NVML's list of the processes of a device that this process's pid namespace has numbers for.
// False: there is none (no NVML, too many processes).
bool measure_processes(const char *uuid, process_list *list);

// This process's own memory. False: NVML cannot tell (no list, or this process is not in it under
// the number that it has here).
bool measure_process_bytes(process *own, int device, uint64_t *bytes);

#endif
