// SPDX-License-Identifier: Apache-2.0
// NVML inside shares: there are the devices of these, in the process's order, and no others.
//
// Handles are NVML's own, so every call that is not wrapped works on them as it always does.
#include "nvml.h"

#include <string.h>

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device);
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device);

typedef nvmlReturn_t get_uuid(nvmlDevice_t device, char *uuid, unsigned length);

static nvmlReturn_t uuid_of(nvmlDevice_t handle, char uuid[96]) {
  get_uuid *ask = (get_uuid *)libraries_symbol(LIBRARY_NVML, "nvmlDeviceGetUUID");
  return ask == NULL ? NVML_ERROR_FUNCTION_NOT_FOUND : DRIVER(ask(handle, uuid, 96));
}

nvmlReturn_t nvml_device(process *own, nvmlDevice_t handle, int *device) {
  char uuid[96];
  nvmlReturn_t result = uuid_of(handle, uuid);
  if (result != NVML_SUCCESS) return result;
  *device = process_device_by_uuid(own, uuid);
  return *device < 0 ? NVML_ERROR_NO_PERMISSION : NVML_SUCCESS;
}

// Is NVML there and started? Asked with a call that costs little.
typedef nvmlReturn_t count_devices(unsigned *count);

static nvmlReturn_t count_own(count_devices *real, unsigned *count) {
  if (count == NULL) return DRIVER(real(count));
  unsigned ignored;
  nvmlReturn_t result = DRIVER(real(&ignored));
  if (result != NVML_SUCCESS) return result;
  process *own = process_view();
  if (own == NULL) return NVML_NO_SHARE;
  *count = own->device_count;
  return NVML_SUCCESS;
}

NVML_WRAPPER(nvmlDeviceGetCount, (unsigned int *count)) {
  if (!governed()) return REAL(nvmlDeviceGetCount)(count);
  return count_own(REAL(nvmlDeviceGetCount), count);
}

NVML_WRAPPER(nvmlDeviceGetCount_v2, (unsigned int *count)) {
  if (!governed()) return REAL(nvmlDeviceGetCount_v2)(count);
  return count_own(REAL(nvmlDeviceGetCount_v2), count);
}

static nvmlReturn_t share_by_index(unsigned index, nvmlDevice_t *device) {
  process *own = process_view();
  if (own == NULL) return NVML_NO_SHARE;
  if (index >= own->device_count) {
    // Before nvmlInit every index is answered with that; this index no NVML has.
    return DRIVER(REAL(nvmlDeviceGetHandleByIndex_v2)(UINT32_MAX, device));
  }
  char uuid[ALLOT_UUID_BYTES + 1] = {0};
  memcpy(uuid, own->policies[index]->uuid, ALLOT_UUID_BYTES);
  return DRIVER(REAL(nvmlDeviceGetHandleByUUID)(uuid, device));
}

NVML_WRAPPER(nvmlDeviceGetHandleByIndex, (unsigned int index, nvmlDevice_t *device)) {
  if (!governed()) return REAL(nvmlDeviceGetHandleByIndex)(index, device);
  return share_by_index(index, device);
}

NVML_WRAPPER(nvmlDeviceGetHandleByIndex_v2, (unsigned int index, nvmlDevice_t *device)) {
  if (!governed()) return REAL(nvmlDeviceGetHandleByIndex_v2)(index, device);
  return share_by_index(index, device);
}

// What was found is shown only if it is the share's.
static nvmlReturn_t only_own(nvmlReturn_t result, nvmlDevice_t *device) {
  if (result != NVML_SUCCESS || !governed()) return result;
  process *own = process_view();
  if (own == NULL) return NVML_NO_SHARE;
  int index;
  result = nvml_device(own, *device, &index);
  return result == NVML_ERROR_NO_PERMISSION ? NVML_ERROR_NOT_FOUND : result;
}

NVML_WRAPPER(nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice_t *device)) {
  return only_own(DRIVER(REAL(nvmlDeviceGetHandleByUUID)(uuid, device)), device);
}

NVML_WRAPPER(nvmlDeviceGetHandleByUUIDV, (const nvmlUUID_v1_t *uuid, nvmlDevice_t *device)) {
  return only_own(DRIVER(REAL(nvmlDeviceGetHandleByUUIDV)(uuid, device)), device);
}

NVML_WRAPPER(nvmlDeviceGetHandleBySerial, (const char *serial, nvmlDevice_t *device)) {
  return only_own(DRIVER(REAL(nvmlDeviceGetHandleBySerial)(serial, device)), device);
}

NVML_WRAPPER(nvmlDeviceGetHandleByPciBusId, (const char *bus, nvmlDevice_t *device)) {
  return only_own(DRIVER(REAL(nvmlDeviceGetHandleByPciBusId)(bus, device)), device);
}

NVML_WRAPPER(nvmlDeviceGetHandleByPciBusId_v2, (const char *bus, nvmlDevice_t *device)) {
  return only_own(DRIVER(REAL(nvmlDeviceGetHandleByPciBusId_v2)(bus, device)), device);
}

NVML_WRAPPER(nvmlDeviceGetMigDeviceHandleByIndex,
             (nvmlDevice_t parent, unsigned int index, nvmlDevice_t *device)) {
  return only_own(DRIVER(REAL(nvmlDeviceGetMigDeviceHandleByIndex)(parent, index, device)), device);
}

NVML_WRAPPER(nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned int *index)) {
  if (!governed() || index == NULL) return REAL(nvmlDeviceGetIndex)(device, index);
  unsigned real_index;
  nvmlReturn_t result = DRIVER(REAL(nvmlDeviceGetIndex)(device, &real_index));
  if (result != NVML_SUCCESS) return result;
  process *own = process_view();
  if (own == NULL) return NVML_NO_SHARE;
  int own_index;
  result = nvml_device(own, device, &own_index);
  if (result == NVML_SUCCESS) *index = (unsigned)own_index;
  return result;
}

// ---- neighbours ----

#define NEIGHBOURS 64

// Leaves the share's devices of a list; with no room asked for, only their number.
static nvmlReturn_t show_own(nvmlDevice_t *found, unsigned found_count, unsigned *count,
                             nvmlDevice_t *list) {
  process *own = process_view();
  if (own == NULL) return NVML_NO_SHARE;
  unsigned kept = 0, room = list == NULL ? 0 : *count;
  for (unsigned i = 0; i < found_count && i < NEIGHBOURS; i++) {
    int device;
    if (nvml_device(own, found[i], &device) != NVML_SUCCESS) continue;
    if (kept < room) list[kept] = found[i];
    kept++;
  }
  *count = room == 0 || kept < room ? kept : room;
  return NVML_SUCCESS;
}

NVML_WRAPPER(nvmlDeviceGetTopologyNearestGpus,
             (nvmlDevice_t device, unsigned int level, unsigned int *count, nvmlDevice_t *list)) {
  if (count == NULL || !governed()) {
    return REAL(nvmlDeviceGetTopologyNearestGpus)(device, level, count, list);
  }
  nvmlDevice_t found[NEIGHBOURS];
  unsigned found_count = 0;
  nvmlReturn_t result =
      DRIVER(REAL(nvmlDeviceGetTopologyNearestGpus)(device, level, &found_count, NULL));
  if (result != NVML_SUCCESS && result != NVML_ERROR_INSUFFICIENT_SIZE) return result;
  if (found_count > NEIGHBOURS) found_count = NEIGHBOURS;
  if (found_count > 0) {
    result = DRIVER(REAL(nvmlDeviceGetTopologyNearestGpus)(device, level, &found_count, found));
    if (result != NVML_SUCCESS) return result;
  }
  return show_own(found, found_count, count, list);
}

NVML_WRAPPER(nvmlSystemGetTopologyGpuSet,
             (unsigned int cpu, unsigned int *count, nvmlDevice_t *list)) {
  if (count == NULL || !governed()) return REAL(nvmlSystemGetTopologyGpuSet)(cpu, count, list);
  nvmlDevice_t found[NEIGHBOURS];
  unsigned found_count = 0;
  nvmlReturn_t result = DRIVER(REAL(nvmlSystemGetTopologyGpuSet)(cpu, &found_count, NULL));
  if (result != NVML_SUCCESS && result != NVML_ERROR_INSUFFICIENT_SIZE) return result;
  if (found_count > NEIGHBOURS) found_count = NEIGHBOURS;
  if (found_count > 0) {
    result = DRIVER(REAL(nvmlSystemGetTopologyGpuSet)(cpu, &found_count, found));
    if (result != NVML_SUCCESS) return result;
  }
  return show_own(found, found_count, count, list);
}
