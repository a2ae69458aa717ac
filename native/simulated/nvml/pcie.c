// SPDX-License-Identifier: Apache-2.0
// A device on its PCI bus.
#include <stdio.h>
#include <string.h>

#include "simulated/nvml/library.h"

enum { PCI_CLASS_DISPLAY = 3, PCI_SUBCLASS_3D = 2, PCI_SUBCLASS_VGA = 0 };

void nvml_fill_pci(const nvml_gpu *gpu, nvmlPciInfo_t *pci) {
  const allot_gpu_description *d = gpu->description;
  memset(pci, 0, sizeof *pci);
  snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.%X", d->pci_domain & 0xFFFFu,
           d->pci_bus & 0xFFu, d->pci_device & 0xFFu, d->pci_function & 0xFu);
  snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.%X", d->pci_domain, d->pci_bus & 0xFFu,
           d->pci_device & 0xFFu, d->pci_function & 0xFu);
  pci->domain = d->pci_domain;
  pci->bus = d->pci_bus;
  pci->device = d->pci_device;
  pci->pciDeviceId = d->pci_device_id;
  pci->pciSubSystemId = d->pci_subsystem_id;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
  NVML_ENTER(device, pci != NULL);
  nvml_fill_pci(&gpu, pci);
  return NVML_SUCCESS;
}

// Callers of the older versions have room for no more than this.
static nvmlReturn_t short_pci(nvmlDevice_t device, nvmlPciInfo_t *pci, size_t size) {
  NVML_ENTER(device, pci != NULL);
  nvmlPciInfo_t whole;
  nvml_fill_pci(&gpu, &whole);
  memcpy(pci, &whole, size);
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci) {
  return short_pci(device, pci, offsetof(nvmlPciInfo_t, busId));
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci) {
  return short_pci(device, pci, offsetof(nvmlPciInfo_t, pciSubSystemId));
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_v1_t *pci) {
  NVML_ENTER(device, pci != NULL);
  if (pci->version != nvmlPciInfoExt_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  nvmlPciInfo_t plain;
  nvml_fill_pci(&gpu, &plain);
  pci->domain = plain.domain;
  pci->bus = plain.bus;
  pci->device = plain.device;
  pci->pciDeviceId = plain.pciDeviceId;
  pci->pciSubSystemId = plain.pciSubSystemId;
  pci->baseClass = PCI_CLASS_DISPLAY;
  pci->subClass = nvml_is_geforce(&gpu) ? PCI_SUBCLASS_VGA : PCI_SUBCLASS_3D;
  memcpy(pci->busId, plain.busId, sizeof pci->busId);
  return NVML_SUCCESS;
}

NVML_GETTER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, true,
            gpu.description->pcie_generation)
NVML_GETTER(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned int, true,
            gpu.description->pcie_generation)
NVML_GETTER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, true,
            gpu.description->pcie_generation)
NVML_GETTER(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, true, gpu.description->pcie_width)
NVML_GETTER(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, true, gpu.description->pcie_width)
NVML_GETTER(nvmlDeviceGetPcieReplayCounter, unsigned int, true, 0)
NVML_GETTER(nvmlDeviceGetPcieLinkMaxSpeed, unsigned int, true, gpu.description->pcie_generation)

// Megabits a second on each lane: 2500 for the first generation, doubling but for the third.
static unsigned int lane_speed(unsigned int generation) {
  static const unsigned int speeds[] = {0, 2500, 5000, 8000, 16000, 32000, 64000};
  return generation < sizeof speeds / sizeof speeds[0] ? speeds[generation] : 0;
}

NVML_GETTER(nvmlDeviceGetPcieSpeed, unsigned int, true,
            lane_speed(gpu.description->pcie_generation))

// Copies are not told apart by direction: each has half of them.
unsigned int nvml_pcie_kib_per_s(const nvml_gpu *gpu, nvmlPcieUtilCounter_t counter) {
  unsigned long long percent = nvml_copy_percent(gpu);
  unsigned long long rate = counter == NVML_PCIE_UTIL_TX_BYTES ? gpu->description->d2h_mib_per_s
                                                               : gpu->description->h2d_mib_per_s;
  return (unsigned int)(rate * 1024u * percent / 200u);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device,
                                                     nvmlPcieUtilCounter_t counter,
                                                     unsigned int *value) {
  NVML_ENTER(device, value != NULL && counter <= NVML_PCIE_UTIL_RX_BYTES);
  *value = nvml_pcie_kib_per_s(&gpu, counter);
  return NVML_SUCCESS;
}
