// SPDX-License-Identifier: Apache-2.0
// NVLink, NVSwitch and the link to a coherent processor.
#include <stdio.h>
#include <string.h>

#include "simulated/nvml/library.h"

enum {
  TO_SWITCH = -2,
  SWITCH_BUS = 0xF4,
  SWITCH_ID_AMPERE = 0x1AF110DE,
  SWITCH_ID_LATER = 0x22A310DE,
  FABRIC_COMPLETED = 3,
  NVLINK_VERSION_2 = 2,
  NVLINK_VERSION_3 = 4,
  NVLINK_VERSION_4 = 6,
};

bool nvml_link_is_active(const nvml_gpu *gpu, unsigned int link) {
  return link < gpu->description->nvlink_count && gpu->description->nvlink_peer[link] != -1;
}

// Each direction of one link.
unsigned int nvml_link_mbps(const nvml_gpu *gpu) {
  switch (gpu->description->nvlink_version) {
    case NVLINK_VERSION_2:
      return 25781;
    case NVLINK_VERSION_3:
      return 25000;
    case NVLINK_VERSION_4:
      return 26562;
    default:
      return 53125;
  }
}

bool nvml_are_linked(const nvml_gpu *one, const nvml_gpu *other) {
  for (unsigned int link = 0; link < one->description->nvlink_count; link++) {
    int peer = one->description->nvlink_peer[link];
    if (peer == other->index) return true;
    // A switch joins the GPUs of one kind of board.
    if (peer == TO_SWITCH && strcmp(one->description->name, other->description->name) == 0) {
      return true;
    }
  }
  return false;
}

// Starts a call on one link. A device without links does not support it.
static nvmlReturn_t check_link(const nvml_gpu *gpu, unsigned int link) {
  if (gpu->description->nvlink_count == 0) return NVML_ERROR_NOT_SUPPORTED;
  return link < gpu->description->nvlink_count ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

#define ENTER_LINK(device, link, sane)               \
  NVML_ENTER(device, sane);                          \
  do {                                               \
    nvmlReturn_t checked = check_link(&gpu, (link)); \
    if (checked != NVML_SUCCESS) return checked;     \
  } while (0)

NVML_EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link,
                                                  nvmlEnableState_t *active) {
  ENTER_LINK(device, link, active != NULL);
  *active = nvml_link_is_active(&gpu, link) ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link,
                                                    unsigned int *version) {
  ENTER_LINK(device, link, version != NULL);
  *version = gpu.description->nvlink_version;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link,
                                                       nvmlNvLinkCapability_t capability,
                                                       unsigned int *result) {
  ENTER_LINK(device, link, result != NULL && capability < NVML_NVLINK_CAP_COUNT);
  if (!nvml_link_is_active(&gpu, link)) return NVML_ERROR_NOT_SUPPORTED;
  *result = capability != NVML_NVLINK_CAP_SLI_BRIDGE;
  return NVML_SUCCESS;
}

static void fill_switch(const nvml_gpu *gpu, unsigned int link, nvmlPciInfo_t *pci) {
  memset(pci, 0, sizeof *pci);
  pci->bus = SWITCH_BUS + link % 4;
  bool ampere = gpu->description->nvml_architecture == NVML_DEVICE_ARCH_AMPERE;
  pci->pciDeviceId = ampere ? SWITCH_ID_AMPERE : SWITCH_ID_LATER;
  snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:%02X:00.0", pci->bus & 0xFFu);
  snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", pci->bus & 0xFFu);
}

static nvmlReturn_t remote_pci(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci,
                               size_t size) {
  ENTER_LINK(device, link, pci != NULL);
  if (!nvml_link_is_active(&gpu, link)) return NVML_ERROR_NOT_SUPPORTED;
  int peer = gpu.description->nvlink_peer[link];
  nvmlPciInfo_t whole;
  nvml_gpu other;
  if (peer == TO_SWITCH) {
    fill_switch(&gpu, link, &whole);
  } else if (peer >= 0 && peer < ALLOT_MACHINE_GPUS &&
             nvml_find(nvml_device(peer), &other) == NVML_SUCCESS) {
    nvml_fill_pci(&other, &whole);
  } else {
    return NVML_ERROR_UNKNOWN;
  }
  memcpy(pci, &whole, size);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link,
                                                             nvmlPciInfo_t *pci) {
  return remote_pci(device, link, pci, sizeof *pci);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link,
                                                          nvmlPciInfo_t *pci) {
  return remote_pci(device, link, pci, offsetof(nvmlPciInfo_t, busId));
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link,
                                                             nvmlIntNvLinkDeviceType_t *type) {
  ENTER_LINK(device, link, type != NULL);
  int peer = gpu.description->nvlink_peer[link];
  *type = NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
  if (peer == TO_SWITCH) *type = NVML_NVLINK_DEVICE_TYPE_SWITCH;
  if (peer >= 0) *type = NVML_NVLINK_DEVICE_TYPE_GPU;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link,
                                                         nvmlNvLinkErrorCounter_t counter,
                                                         unsigned long long *value) {
  ENTER_LINK(device, link, value != NULL && counter < NVML_NVLINK_ERROR_COUNT);
  if (!nvml_link_is_active(&gpu, link)) return NVML_ERROR_NOT_SUPPORTED;
  *value = 0;
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceResetNvLinkErrorCounters(nvmlDevice_t device,
                                                            unsigned int link) {
  ENTER_LINK(device, link, true);
  return NVML_SUCCESS;
}

// ---- the fabric that NVSwitches make, from Hopper on -------------------------------------------

static bool has_fabric(const nvml_gpu *gpu) {
  return nvml_is_at_least(gpu, NVML_DEVICE_ARCH_HOPPER) && gpu->description->nvlink_count > 0 &&
         gpu->description->nvlink_peer[0] == TO_SWITCH;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device,
                                                    nvmlGpuFabricInfo_t *info) {
  NVML_ENTER(device, info != NULL);
  if (!has_fabric(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  *info = (nvmlGpuFabricInfo_t){.status = NVML_SUCCESS, .state = FABRIC_COMPLETED};
  return NVML_SUCCESS;
}

// Version 2 is version 3 without its last byte.
NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device,
                                                     nvmlGpuFabricInfo_v3_t *info) {
  NVML_ENTER(device, info != NULL);
  unsigned int version = info->version;
  bool known = version == nvmlGpuFabricInfo_v2 || version == nvmlGpuFabricInfo_v3;
  if (!known) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  if (!has_fabric(&gpu)) return NVML_ERROR_NOT_SUPPORTED;
  nvmlGpuFabricInfo_v3_t whole = {
      .version = version, .status = NVML_SUCCESS, .state = FABRIC_COMPLETED, .healthSummary = 1};
  memcpy(info, &whole,
         version == nvmlGpuFabricInfo_v2 ? sizeof(nvmlGpuFabricInfo_v2_t) : sizeof whole);
  return NVML_SUCCESS;
}

// One flag: is the link to the processor on?
NVML_GETTER(nvmlDeviceGetC2cModeInfoV, unsigned int, gpu.description->integrated != 0, 1)
