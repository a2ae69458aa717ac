// SPDX-License-Identifier: Apache-2.0
// Who a device is: names, numbers, versions of its parts.
#include <stdio.h>
#include <string.h>

#include "simulated/nvml/library.h"

// A text of the device; a model without it has an empty one.
static nvmlReturn_t text_of(const char *text, char *buffer, unsigned int length) {
  if (*text == '\0') return NVML_ERROR_NOT_SUPPORTED;
  return nvml_copy_text(text, buffer, length);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
  NVML_ENTER_ANY(device, name != NULL);
  if (!nvml_is_mig_device(&gpu)) return text_of(gpu.description->name, name, length);
  char whole[160];
  allot_mig_name(gpu.engine, gpu.place, whole, sizeof whole);
  return text_of(whole, name, length);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
  NVML_ENTER_ANY(device, uuid != NULL);
  const char *own = nvml_is_mig_device(&gpu) ? nvml_compute(&gpu)->uuid : gpu.description->uuid;
  return text_of(own, uuid, length);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial,
                                             unsigned int length) {
  NVML_ENTER(device, serial != NULL);
  return text_of(gpu.description->serial, serial, length);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t device, char *number,
                                                      unsigned int length) {
  NVML_ENTER(device, number != NULL);
  return text_of(gpu.description->part_number, number, length);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version,
                                                   unsigned int length) {
  NVML_ENTER(device, version != NULL);
  return text_of(gpu.description->vbios, version, length);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetInforomVersion(nvmlDevice_t device, unsigned int object,
                                                     char *version, unsigned int length) {
  NVML_ENTER(device, version != NULL && object <= 3);
  switch (object) {
    case 0:  // OEM
      return nvml_copy_text("2.1", version, length);
    case 1:  // ECC
      return text_of(gpu.description->ecc_supported != 0 ? "6.16" : "", version, length);
    default:  // power, DEN
      return NVML_ERROR_NOT_SUPPORTED;
  }
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetInforomImageVersion(nvmlDevice_t device, char *version,
                                                          unsigned int length) {
  NVML_ENTER(device, version != NULL);
  char text[16];
  snprintf(text, sizeof text, "G%03X.0200.00.03",
           (gpu.description->pci_subsystem_id >> 16) & 0xFFF);
  return nvml_copy_text(text, version, length);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetInforomConfigurationChecksum(nvmlDevice_t device,
                                                                   unsigned int *checksum) {
  NVML_ENTER(device, checksum != NULL);
  *checksum = 2166136261u;  // FNV-1a of what it would be computed from
  for (const char *at = gpu.description->vbios; *at != '\0'; at++) {
    *checksum = (*checksum ^ (unsigned char)*at) * 16777619u;
  }
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceValidateInforom(nvmlDevice_t device) {
  NVML_ENTER(device, true);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version) {
  NVML_ENTER(device, version != NULL);
  if (!nvml_is_at_least(&gpu, NVML_DEVICE_ARCH_TURING)) return NVML_ERROR_NOT_SUPPORTED;
  return nvml_copy_text(gpu.engine->machine->description.driver_version, version, 64);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t device, unsigned int *enabled,
                                                      unsigned int *by_default) {
  NVML_ENTER(device, enabled != NULL && by_default != NULL);
  if (!nvml_is_at_least(&gpu, NVML_DEVICE_ARCH_TURING)) return NVML_ERROR_NOT_SUPPORTED;
  *enabled = *by_default = 1;
  return NVML_SUCCESS;
}

NVML_GETTER_ANY(nvmlDeviceGetIndex, unsigned int,
                nvml_is_mig_device(&gpu) ? nvml_mig_index(&gpu) : nvml_index(&gpu))
NVML_GETTER_ANY(nvmlDeviceGetBrand, nvmlBrandType_t, gpu.description->brand)
NVML_GETTER(nvmlDeviceGetMinorNumber, unsigned int, true, gpu.description->minor)
NVML_GETTER_ANY(nvmlDeviceGetArchitecture, nvmlDeviceArchitecture_t,
                gpu.description->nvml_architecture)
NVML_GETTER(nvmlDeviceGetModuleId, unsigned int, gpu.description->nvlink_count > 0,
            (unsigned int)gpu.index)
NVML_GETTER(nvmlDeviceGetBoardId, unsigned int, true, gpu.description->pci_bus << 8)
NVML_GETTER(nvmlDeviceGetMultiGpuBoard, unsigned int, true, 0)
NVML_GETTER(nvmlDeviceGetMemoryBusWidth, unsigned int, true, gpu.description->memory_bus_width)
NVML_GETTER(nvmlDeviceGetIrqNum, unsigned int, true, 120u + (unsigned int)gpu.index)
NVML_GETTER(nvmlDeviceGetBusType, unsigned int, true, 2)      // PCIe
NVML_GETTER(nvmlDeviceGetPowerSource, unsigned int, true, 0)  // AC

static unsigned int cores_per_sm(const allot_gpu_description *description) {
  unsigned int capability = description->compute_major * 10 + description->compute_minor;
  return capability >= 86 ? 128 : 64;
}

NVML_GETTER(nvmlDeviceGetNumGpuCores, unsigned int, true,
            gpu.description->sm_count *cores_per_sm(gpu.description))

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major,
                                                            int *minor) {
  NVML_ENTER_ANY(device, major != NULL && minor != NULL);
  *major = (int)gpu.description->compute_major;
  *minor = (int)gpu.description->compute_minor;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t one, nvmlDevice_t other, int *same) {
  nvml_gpu second;
  NVML_ENTER(one, same != NULL);
  nvmlReturn_t result = nvml_enter(other, &second);
  if (result != NVML_SUCCESS) return result;
  *same = gpu.index == second.index;
  return NVML_SUCCESS;
}
