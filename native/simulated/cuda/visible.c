// SPDX-License-Identifier: Apache-2.0
// CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, among the GPUs that the process can reach.
//
// The list is read from the left and ends at the first entry that names no device, or one that is
// named already: what stands before it is visible.
#include <stdlib.h>
#include <string.h>

#include "simulated/cuda/driver.h"

static uint64_t pci_place(const allot_gpu_description *gpu) {
  return (uint64_t)gpu->pci_domain << 24 | gpu->pci_bus << 16 | gpu->pci_device << 8 |
         gpu->pci_function;
}

// A coarse guess at speed, which is all that FASTEST_FIRST promises.
static uint64_t speed(const allot_gpu_description *gpu) {
  return (uint64_t)gpu->sm_count * gpu->sm_clock_max_mhz;
}

static bool comes_before(const allot_gpu_description *one, const allot_gpu_description *other,
                         bool by_place) {
  if (!by_place && speed(one) != speed(other)) return speed(one) > speed(other);
  return pci_place(one) < pci_place(other);
}

// Returns how many the process can reach.
static int order(const allot_machine_description *description, uint32_t nodes,
                 int gpus[ALLOT_MACHINE_GPUS]) {
  const char *wanted = getenv("CUDA_DEVICE_ORDER");
  bool by_place = wanted != NULL && strcmp(wanted, "PCI_BUS_ID") == 0;
  int count = 0;
  for (int gpu = 0; gpu < (int)description->gpu_count; gpu++) {
    if (!(nodes >> gpu & 1)) continue;
    int at = count++;
    while (at > 0 &&
           comes_before(&description->gpus[gpu], &description->gpus[gpus[at - 1]], by_place)) {
      gpus[at] = gpus[at - 1];
      at--;
    }
    gpus[at] = gpu;
  }
  return count;
}

static int by_index(const char *text, size_t length, int count) {
  int index = 0;
  for (size_t i = 0; i < length; i++) {
    if (text[i] < '0' || text[i] > '9' || index > count) return -1;
    index = index * 10 + (text[i] - '0');
  }
  return index < count ? index : -1;
}

// A UUID may be cut short as long as it names one device.
static int by_uuid(const allot_machine_description *description, const int *ordered, int there,
                   const char *text, size_t length) {
  int found = -1;
  for (int i = 0; i < there; i++) {
    if (strncmp(description->gpus[ordered[i]].uuid, text, length) != 0) continue;
    if (found >= 0) return -1;
    found = i;
  }
  return found;
}

static int match(const allot_machine_description *description, const int *ordered, int there,
                 const char *text, size_t length) {
  if (length == 0) return -1;
  if (length > 4 && strncmp(text, "GPU-", 4) == 0) {
    return by_uuid(description, ordered, there, text, length);
  }
  // MIG devices are no GPUs (mig.c).
  return by_index(text, length, there);
}

static bool is_blank(char letter) {
  return letter == ' ' || letter == '\t';
}

int visible_devices(const allot_machine_description *description, uint32_t nodes,
                    int gpus[ALLOT_MACHINE_GPUS]) {
  int ordered[ALLOT_MACHINE_GPUS] = {0};
  int there = order(description, nodes, ordered);
  const char *at = getenv("CUDA_VISIBLE_DEVICES");
  if (at == NULL) {
    memcpy(gpus, ordered, sizeof ordered);
    return there;
  }
  int count = 0;
  uint32_t seen = 0;
  while (count < ALLOT_MACHINE_GPUS) {
    while (is_blank(*at)) at++;
    size_t length = strcspn(at, ",");
    size_t kept = length;
    while (kept > 0 && is_blank(at[kept - 1])) kept--;
    int found = match(description, ordered, there, at, kept);
    if (found < 0 || (seen & 1u << found)) break;
    seen |= 1u << found;
    gpus[count++] = ordered[found];
    at += length;
    if (*at == '\0') break;
    at++;
  }
  return count;
}
