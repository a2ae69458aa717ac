// SPDX-License-Identifier: Apache-2.0
// Event sets: XIDs from each GPU's ring of faults, delivered to whoever registered before them.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "simulated/nvml/library.h"

#define RING 64u
#define POLL_NS 5000000L
#define WAIT_FOR_EVER 0xFFFFFFFFu
#define XID_DOUBLE_BIT_ECC 48u

struct nvmlEventSet_st {
  pthread_mutex_t lock;
  unsigned long long types[ALLOT_MACHINE_GPUS];  // 0: not registered
  uint32_t seen[ALLOT_MACHINE_GPUS];             // XIDs of the GPU up to here were delivered
};

static unsigned long long supported_types(const nvml_gpu *gpu) {
  unsigned long long types = NVML_EVENT_XID_CRITICAL_ERROR | NVML_EVENT_PSTATE | NVML_EVENT_CLOCK;
  if (nvml_counts_ecc(gpu)) {
    types |= NVML_EVENT_SINGLE_BIT_ECC_ERROR | NVML_EVENT_DOUBLE_BIT_ECC_ERROR;
  }
  if (nvml_can_mig(gpu)) types |= NVML_EVENT_MIG_CONFIG_CHANGE;
  return types;
}

NVML_GETTER(nvmlDeviceGetSupportedEventTypes, unsigned long long, true, supported_types(&gpu))

NVML_EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
  NVML_READY(set != NULL);
  nvmlEventSet_t made = calloc(1, sizeof *made);
  if (made == NULL) return NVML_ERROR_MEMORY;
  pthread_mutex_init(&made->lock, NULL);
  *set = made;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
  NVML_READY(set != NULL);
  pthread_mutex_destroy(&set->lock);
  free(set);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                                  nvmlEventSet_t set) {
  NVML_ENTER(device, set != NULL);
  if ((types & ~supported_types(&gpu)) != 0) return NVML_ERROR_NOT_SUPPORTED;
  pthread_mutex_lock(&set->lock);
  if (set->types[gpu.index] == 0) set->seen[gpu.index] = allot_load(&gpu.faults->xid_head);
  set->types[gpu.index] |= types;
  pthread_mutex_unlock(&set->lock);
  return NVML_SUCCESS;
}

// What the set's owner wants to hear of an XID, 0: nothing.
static unsigned long long event_of(unsigned long long types, uint64_t xid) {
  if (xid == XID_DOUBLE_BIT_ECC && (types & NVML_EVENT_DOUBLE_BIT_ECC_ERROR) != 0) {
    return NVML_EVENT_DOUBLE_BIT_ECC_ERROR;
  }
  return types & NVML_EVENT_XID_CRITICAL_ERROR;
}

static bool next_of(nvmlEventSet_t set, int index, nvmlEventData_t *data) {
  const allot_gpu_faults *faults = &nvml_engine()->machine->faults.gpus[index];
  uint32_t head = allot_load(&faults->xid_head);
  // Older ones than the ring holds are lost, as they are when a real queue overflows.
  if (head - set->seen[index] > RING) set->seen[index] = head - RING;
  while (set->seen[index] != head) {
    uint64_t xid = allot_load(&faults->xids[set->seen[index] % RING].xid);
    unsigned long long type = event_of(set->types[index], xid);
    set->seen[index]++;
    if (type == 0) continue;
    *data = (nvmlEventData_t){.device = nvml_device(index),
                              .eventType = type,
                              .eventData = xid,
                              .gpuInstanceId = NVML_NO_INSTANCE,
                              .computeInstanceId = NVML_NO_INSTANCE};
    return true;
  }
  return false;
}

// An event, or the news that a GPU is lost (after its events), or TIMEOUT: nothing yet.
static nvmlReturn_t poll_set(nvmlEventSet_t set, nvmlEventData_t *data) {
  nvmlReturn_t result = NVML_ERROR_TIMEOUT;
  pthread_mutex_lock(&set->lock);
  for (int i = 0; i < ALLOT_MACHINE_GPUS && result == NVML_ERROR_TIMEOUT; i++) {
    if (set->types[i] != 0 && next_of(set, i, data)) result = NVML_SUCCESS;
  }
  for (int i = 0; i < ALLOT_MACHINE_GPUS && result == NVML_ERROR_TIMEOUT; i++) {
    const allot_gpu_faults *faults = &nvml_engine()->machine->faults.gpus[i];
    if (set->types[i] != 0 && allot_load(&faults->lost) != 0) result = NVML_ERROR_GPU_IS_LOST;
  }
  pthread_mutex_unlock(&set->lock);
  return result;
}

static nvmlReturn_t wait_for(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
  uint64_t end_ns = allot_now_ns() + timeout_ms * 1000000ull;
  for (;;) {
    nvmlReturn_t result = nvml_ready();
    if (result == NVML_SUCCESS) result = poll_set(set, data);
    if (result != NVML_ERROR_TIMEOUT) return result;
    if (timeout_ms != WAIT_FOR_EVER && allot_now_ns() >= end_ns) return result;
    // The ring has no bell: whoever writes it may be a shell. Two hundred looks a second are cheap.
    struct timespec pause = {.tv_nsec = POLL_NS};
    nanosleep(&pause, NULL);
  }
}

NVML_EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data,
                                             unsigned int timeout_ms) {
  NVML_READY(set != NULL && data != NULL);
  return wait_for(set, data, timeout_ms);
}

NVML_EXPORT nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data,
                                          unsigned int timeout_ms) {
  NVML_READY(set != NULL && data != NULL);
  nvmlEventData_t whole;
  nvmlReturn_t result = wait_for(set, &whole, timeout_ms);
  if (result == NVML_SUCCESS) memcpy(data, &whole, offsetof(nvmlEventData_t, gpuInstanceId));
  return result;
}
