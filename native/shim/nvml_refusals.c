// SPDX-License-Identifier: Apache-2.0
// What NVML shows of other tenants and cannot show of the share alone: their processes by the
// host's numbers, the memory that all of them use, limits of any cgroup.
#include "nvml.h"

#define REFUSE(name, parameters, arguments)       \
  NVML_WRAPPER(name, parameters) {                \
    if (!governed()) return REAL(name) arguments; \
    return NVML_ERROR_NO_PERMISSION;              \
  }

REFUSE(nvmlDeviceGetAccountingPids, (nvmlDevice_t device, unsigned int *count, unsigned int *pids),
       (device, count, pids))
REFUSE(nvmlDeviceGetAccountingStats,
       (nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *stats), (device, pid, stats))
REFUSE(nvmlDeviceGetAccountingStats_v2, (nvmlDevice_t device, void *stats), (device, stats))
REFUSE(nvmlDeviceGetEncoderSessions,
       (nvmlDevice_t device, unsigned int *count, nvmlEncoderSessionInfo_t *sessions),
       (device, count, sessions))
REFUSE(nvmlDeviceGetFBCSessions, (nvmlDevice_t device, unsigned int *count, void *sessions),
       (device, count, sessions))
REFUSE(nvmlDeviceGetConfComputeProtectedMemoryUsage, (nvmlDevice_t device, nvmlMemory_t *memory),
       (device, memory))
REFUSE(nvmlDeviceGetMemoryLimits_v1, (nvmlDevice_t device, void *limits), (device, limits))
REFUSE(nvmlDeviceSetMemoryLimits_v1, (nvmlDevice_t device, void *limits), (device, limits))
