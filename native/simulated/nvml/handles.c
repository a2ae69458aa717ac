// SPDX-License-Identifier: Apache-2.0
// Finding devices: by index, UUID, serial number and PCI address.
#include <stdio.h>
#include <string.h>

#include "simulated/nvml/library.h"

// Of the machine; each that the process has no node of is passed over.
static unsigned int gpu_count(void) {
  return nvml_engine()->machine->description.gpu_count;
}

static unsigned int there_count(void) {
  return (unsigned int)__builtin_popcount(allot_load(&nvml_engine()->nodes));
}

// The machine's number of the GPU at that place among those that are there.
static unsigned int at_place(unsigned int place) {
  uint32_t left = allot_load(&nvml_engine()->nodes);
  while (place-- > 0) left &= left - 1;
  return (unsigned int)__builtin_ctz(left);
}

static const allot_gpu_description *description(unsigned int index) {
  return &nvml_engine()->machine->description.gpus[index];
}

// A lost GPU has no handle to give.
static nvmlReturn_t give(unsigned int index, nvmlDevice_t *device) {
  nvml_gpu gpu;
  nvmlReturn_t result = nvml_enter(nvml_device((int)index), &gpu);
  if (result == NVML_SUCCESS) *device = nvml_device((int)index);
  return result;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
  NVML_READY(count != NULL);
  *count = there_count();
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) {
  return nvmlDeviceGetCount_v2(count);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
  NVML_READY(device != NULL && index < there_count());
  return give(at_place(index), device);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
  NVML_READY(uuid != NULL && device != NULL);
  for (unsigned int i = 0; i < gpu_count(); i++) {
    if (!nvml_has_node((int)i)) continue;
    if (strcmp(uuid, description(i)->uuid) == 0) return give(i, device);
  }
  int place = allot_mig_find(nvml_engine(), uuid);
  if (place < 0 || !nvml_has_node(allot_place_gpu(place))) return NVML_ERROR_NOT_FOUND;
  if (!allot_reaches(nvml_engine(), place)) return NVML_ERROR_NOT_FOUND;
  nvml_gpu gpu;
  nvmlReturn_t result = nvml_enter_any(nvml_device(place), &gpu);
  if (result == NVML_SUCCESS) *device = nvml_device(place);
  return result;
}

// "GPU-" and the sixteen bytes in hexadecimal digits.
static void uuid_text(const unsigned char *bytes, char *text, size_t size) {
  size_t at = (size_t)snprintf(text, size, "GPU-");
  for (int i = 0; i < 16; i++) {
    bool dash = i == 4 || i == 6 || i == 8 || i == 10;
    at += (size_t)snprintf(text + at, size - at, dash ? "-%02x" : "%02x", bytes[i]);
  }
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_v1_t *uuid,
                                                    nvmlDevice_t *device) {
  NVML_READY(uuid != NULL && device != NULL);
  if (uuid->version != nvmlUUID_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  char text[64];
  if (uuid->type == NVML_UUID_TYPE_ASCII) {
    snprintf(text, sizeof text, "%.*s", (int)sizeof uuid->value.str, uuid->value.str);
  } else if (uuid->type == NVML_UUID_TYPE_BINARY) {
    uuid_text(uuid->value.bytes, text, sizeof text);
  } else {
    return NVML_ERROR_INVALID_ARGUMENT;
  }
  return nvmlDeviceGetHandleByUUID(text, device);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
  NVML_READY(serial != NULL && *serial != '\0' && device != NULL);
  for (unsigned int i = 0; i < gpu_count(); i++) {
    if (!nvml_has_node((int)i)) continue;
    if (strcmp(serial, description(i)->serial) == 0) return give(i, device);
  }
  return NVML_ERROR_NOT_FOUND;
}

// "domain:bus:device.function" in hexadecimal digits; domain and function may be left out.
static bool parse_address(const char *text, unsigned int address[4]) {
  int end = 0;
  memset(address, 0, 4 * sizeof address[0]);
  if (sscanf(text, "%8x:%2x:%2x%n", &address[0], &address[1], &address[2], &end) != 3) {
    address[0] = 0;
    if (sscanf(text, "%2x:%2x%n", &address[1], &address[2], &end) != 2) return false;
  }
  text += end;
  if (*text == '\0') return true;
  return sscanf(text, ".%1x%n", &address[3], &end) == 1 && text[end] == '\0';
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id,
                                                          nvmlDevice_t *device) {
  NVML_READY(bus_id != NULL && device != NULL);
  unsigned int address[4];
  if (!parse_address(bus_id, address)) return NVML_ERROR_INVALID_ARGUMENT;
  for (unsigned int i = 0; i < gpu_count(); i++) {
    if (!nvml_has_node((int)i)) continue;
    const allot_gpu_description *gpu = description(i);
    if (address[0] == gpu->pci_domain && address[1] == gpu->pci_bus &&
        address[2] == gpu->pci_device && address[3] == gpu->pci_function) {
      return give(i, device);
    }
  }
  return NVML_ERROR_NOT_FOUND;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device) {
  return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}
