// SPDX-License-Identifier: Apache-2.0
// NVML's process lists: the share's processes, with their numbers and their use as the ledger has
// them. (NVML itself tells the host's numbers, and every tenant's processes.)
#include <string.h>
#include <unistd.h>

#include "dead.h"
#include "nvml.h"
#include "report.h"

typedef struct member {
  unsigned pid;
  uint64_t bytes;
} member;

typedef struct membership {
  unsigned count;
  member members[ALLOT_MAX_SLOTS];
} membership;

// `index` is the device's in the ledger; -1: any, whether a process uses its memory or not.
static void add_members(allot_ledger *ledger, int index, membership *all) {
  dead_reap(ledger);
  const allot_usage *usage = ledger->usage;
  for (int slot = 0; slot < ALLOT_MAX_SLOTS && slot < (int)usage->high_slot; slot++) {
    // Those that have ended are listed for as long as the driver has their memory, as it does.
    if (__atomic_load_n(&usage->slots[slot].state, __ATOMIC_ACQUIRE) == ALLOT_SLOT_FREE) continue;
    uint64_t bytes = index < 0 ? 0 : allot_ledger_slot_used(ledger, slot, index);
    if (index >= 0 && bytes == 0) continue;
    if (all->count == ALLOT_MAX_SLOTS) return;
    all->members[all->count++] = (member){(unsigned)usage->slots[slot].pid, bytes};
  }
}

// `device` -1: of any device.
static void find_members(process *own, int device, membership *all) {
  all->count = 0;
  if (device >= 0) {
    add_members(own->joined[device].ledger, own->joined[device].index, all);
    return;
  }
  for (uint32_t share = 0; share < own->share_count; share++) {
    add_members(&own->ledgers[share], -1, all);
  }
}

static bool is_member(const membership *all, unsigned pid) {
  for (unsigned i = 0; i < all->count; i++) {
    if (all->members[i].pid == pid) return true;
  }
  return false;
}

// NVML's own answer matters where it is an error: not started, no such device, GPU lost.
static bool is_error(nvmlReturn_t result) {
  return result != NVML_SUCCESS && result != NVML_ERROR_INSUFFICIENT_SIZE;
}

typedef struct lists {
  nvmlDevice_t handle;
  unsigned *count;
  bool is_empty;  // of kinds of processes that a share has none of
} lists;

// Fills in a list by NVML's rule: too little room is an error that tells how much it takes.
static nvmlReturn_t fill(const lists *asked, nvmlReturn_t real_result, nvmlProcessInfo_v1_t *old,
                         nvmlProcessInfo_v2_t *list) {
  if (is_error(real_result)) return real_result;
  process *own = process_view();
  if (own == NULL) return NVML_NO_SHARE;
  int device;
  nvmlReturn_t result = nvml_device(own, asked->handle, &device);
  if (result != NVML_SUCCESS) return result;
  membership all = {.count = 0};
  if (!asked->is_empty) find_members(own, device, &all);
  unsigned room = *asked->count;
  *asked->count = all.count;
  if (all.count == 0) return NVML_SUCCESS;
  if (room < all.count) return NVML_ERROR_INSUFFICIENT_SIZE;
  if (old == NULL && list == NULL) return NVML_ERROR_INVALID_ARGUMENT;
  for (unsigned i = 0; i < all.count; i++) {
    const member *listed = &all.members[i];
    if (old != NULL) {
      old[i] = (nvmlProcessInfo_v1_t){.pid = listed->pid, .usedGpuMemory = listed->bytes};
    } else {
      list[i] = (nvmlProcessInfo_v2_t){.pid = listed->pid,
                                       .usedGpuMemory = listed->bytes,
                                       .gpuInstanceId = NVML_NO_INSTANCE,
                                       .computeInstanceId = NVML_NO_INSTANCE};
    }
  }
  return NVML_SUCCESS;
}

#define PROCESS_LIST(name, type, old_list, new_list, empty)                    \
  NVML_WRAPPER(name, (nvmlDevice_t device, unsigned int *count, type *list)) { \
    if (count == NULL || !governed()) return REAL(name)(device, count, list);  \
    unsigned none = 0;                                                         \
    nvmlReturn_t real_result = DRIVER(REAL(name)(device, &none, NULL));        \
    lists asked = {device, count, empty};                                      \
    return fill(&asked, real_result, old_list, new_list);                      \
  }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, list, NULL, false)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, NULL, list, false)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_v2_t, NULL, list, false)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, list, NULL, true)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t, NULL, list, true)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_v2_t, NULL, list, true)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, list, NULL, true)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, NULL, list, true)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_v2_t, NULL, list, true)

NVML_WRAPPER(nvmlDeviceGetRunningProcessDetailList,
             (nvmlDevice_t handle, nvmlProcessDetailList_v1_t *details)) {
  if (details == NULL || !governed()) {
    return REAL(nvmlDeviceGetRunningProcessDetailList)(handle, details);
  }
  nvmlProcessDetailList_v1_t probe = {.version = details->version, .mode = details->mode};
  nvmlReturn_t result = DRIVER(REAL(nvmlDeviceGetRunningProcessDetailList)(handle, &probe));
  if (is_error(result)) return result;
  process *own = process_view();
  if (own == NULL) return NVML_NO_SHARE;
  int device;
  result = nvml_device(own, handle, &device);
  if (result != NVML_SUCCESS) return result;
  membership all = {.count = 0};
  bool has_any =
      details->mode == NVML_PROCESS_MODE_COMPUTE || details->mode == NVML_PROCESS_MODE_ALL;
  if (has_any) find_members(own, device, &all);
  unsigned room = details->procArray == NULL ? 0 : details->numProcArrayEntries;
  details->numProcArrayEntries = all.count;
  if (room < all.count) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < all.count; i++) {
    details->procArray[i] = (nvmlProcessDetail_v1_t){.pid = all.members[i].pid,
                                                     .usedGpuMemory = all.members[i].bytes,
                                                     .gpuInstanceId = NVML_NO_INSTANCE,
                                                     .computeInstanceId = NVML_NO_INSTANCE};
  }
  return NVML_SUCCESS;
}

// ---- utilisation by process: the neighbours' samples are left out ----

NVML_WRAPPER(nvmlDeviceGetProcessUtilization,
             (nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count,
              unsigned long long last_seen)) {
  nvmlReturn_t result =
      DRIVER(REAL(nvmlDeviceGetProcessUtilization)(device, samples, count, last_seen));
  if (result != NVML_SUCCESS || samples == NULL || !governed()) return result;
  process *own = process_view();
  if (own == NULL) return NVML_NO_SHARE;
  membership all;
  find_members(own, -1, &all);
  unsigned kept = 0;
  for (unsigned i = 0; i < *count; i++) {
    if (is_member(&all, samples[i].pid)) samples[kept++] = samples[i];
  }
  *count = kept;
  return kept > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

NVML_WRAPPER(nvmlDeviceGetProcessesUtilizationInfo,
             (nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *info)) {
  nvmlReturn_t result = DRIVER(REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, info));
  if (result != NVML_SUCCESS || info->procUtilArray == NULL || !governed()) return result;
  process *own = process_view();
  if (own == NULL) return NVML_NO_SHARE;
  membership all;
  find_members(own, -1, &all);
  unsigned kept = 0;
  for (unsigned i = 0; i < info->processSamplesCount; i++) {
    if (is_member(&all, info->procUtilArray[i].pid)) {
      info->procUtilArray[kept++] = info->procUtilArray[i];
    }
  }
  info->processSamplesCount = kept;
  return kept > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

// ---- names ----

NVML_WRAPPER(nvmlSystemGetProcessName, (unsigned int pid, char *name, unsigned int length)) {
  if (!governed()) return REAL(nvmlSystemGetProcessName)(pid, name, length);
  process *own = process_view();
  if (own == NULL) return NVML_NO_SHARE;
  membership all;
  find_members(own, -1, &all);
  if (!is_member(&all, pid) && pid != (unsigned)getpid()) return NVML_ERROR_NOT_FOUND;
  return DRIVER(REAL(nvmlSystemGetProcessName)(pid, name, length));
}
