// SPDX-License-Identifier: Apache-2.0
// Init and shutdown are counted; threads may come and go between them; nothing is read past an end.
//
// machine: a100-80gb:2,t4
// libraries: simulated/libnvidia-ml.so.1
#include "calls.h"

#include <pthread.h>
#include <string.h>

enum { THREADS = 4, ROUNDS = 200 };

static void *come_and_go(void *unused) {
  for (int i = 0; i < ROUNDS; i++) {
    unsigned int count = 0;
    nvmlDevice_t device;
    char name[NVML_DEVICE_NAME_BUFFER_SIZE];
    CHECK(nvmlInit_v2());
    CHECK(nvmlDeviceGetCount_v2(&count));
    assert(count == 3);
    CHECK(nvmlDeviceGetHandleByIndex_v2(2, &device));
    CHECK(nvmlDeviceGetName(device, name, sizeof name));
    assert(strcmp(name, "Tesla T4") == 0);
    CHECK(nvmlShutdown());
  }
  return NULL;
}

static void check_texts(void) {
  nvmlDevice_t device, same;
  char uuid[NVML_DEVICE_UUID_BUFFER_SIZE];
  CHECK(nvmlDeviceGetHandleByIndex_v2(1, &device));
  CHECK(nvmlDeviceGetUUID(device, uuid, sizeof uuid));
  char exact[41];
  for (unsigned int length = 0; length <= 40; length++) {
    memset(exact, '#', sizeof exact);
    assert(nvmlDeviceGetUUID(device, exact, length) == NVML_ERROR_INSUFFICIENT_SIZE);
    assert(exact[0] == '#');
  }
  CHECK(nvmlDeviceGetUUID(device, exact, sizeof exact));
  assert(strcmp(exact, uuid) == 0);
  CHECK(nvmlDeviceGetHandleByUUID(uuid, &same));
  assert(same == device);
  uuid[10] = uuid[10] == '0' ? '1' : '0';
  assert(nvmlDeviceGetHandleByUUID(uuid, &same) == NVML_ERROR_NOT_FOUND);
}

// Callers of the first versions have room for less.
static void check_pci(void) {
  nvmlDevice_t device, same;
  nvmlPciInfo_t whole, part;
  CHECK(nvmlDeviceGetHandleByIndex_v2(1, &device));
  CHECK(nvmlDeviceGetPciInfo_v3(device, &whole));
  assert(strcmp(whole.busId, "00000000:16:00.0") == 0);
  assert(strcmp(whole.busIdLegacy, "0000:16:00.0") == 0);
  assert(whole.pciDeviceId == 0x20B210DEu);
  memset(&part, 0x5A, sizeof part);
  CHECK(nvmlDeviceGetPciInfo_v2(device, &part));
  assert(part.pciSubSystemId == whole.pciSubSystemId);
  assert((unsigned char)part.busId[0] == 0x5A);
  memset(&part, 0x5A, sizeof part);
  CHECK(nvmlDeviceGetPciInfo(device, &part));
  assert(part.pciDeviceId == whole.pciDeviceId);
  assert(part.pciSubSystemId == 0x5A5A5A5Au);
  const char *spellings[] = {"00000000:16:00.0", "0000:16:00.0", "0000:16:00", "16:00.0", "16:00"};
  for (size_t i = 0; i < sizeof spellings / sizeof spellings[0]; i++) {
    CHECK(nvmlDeviceGetHandleByPciBusId_v2(spellings[i], &same));
    assert(same == device);
  }
  assert(nvmlDeviceGetHandleByPciBusId_v2("0000:17:00.0", &same) == NVML_ERROR_NOT_FOUND);
  const char *nonsense[] = {"", "16", "16:00.", "16:00.0x", "zz:00.0", "0:0:0:0:0", ":::"};
  for (size_t i = 0; i < sizeof nonsense / sizeof nonsense[0]; i++) {
    assert(nvmlDeviceGetHandleByPciBusId_v2(nonsense[i], &same) == NVML_ERROR_INVALID_ARGUMENT);
  }
}

static void check_handles(void) {
  nvmlDevice_t device;
  unsigned int power;
  CHECK(nvmlDeviceGetHandleByIndex_v2(0, &device));
  assert(nvmlDeviceGetHandleByIndex_v2(3, &device) == NVML_ERROR_INVALID_ARGUMENT);
  nvmlDevice_t wrong[] = {NULL,
                          (nvmlDevice_t)1,
                          (nvmlDevice_t)(void *)&device,
                          (nvmlDevice_t)((uintptr_t)device + 1),
                          (nvmlDevice_t)((uintptr_t)device + 4096),
                          (nvmlDevice_t)UINTPTR_MAX};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    assert(nvmlDeviceGetPowerUsage(wrong[i], &power) == NVML_ERROR_INVALID_ARGUMENT);
  }
  assert(nvmlDeviceGetPowerUsage(device, NULL) == NVML_ERROR_INVALID_ARGUMENT);
}

int main(void) {
  unsigned int count;
  assert(nvmlShutdown() == NVML_ERROR_UNINITIALIZED);
  assert(nvmlDeviceGetCount_v2(&count) == NVML_ERROR_UNINITIALIZED);

  CHECK(nvmlInit_v2());
  CHECK(nvmlInit_v2());
  CHECK(nvmlShutdown());
  CHECK(nvmlDeviceGetCount_v2(&count));
  check_texts();
  check_pci();
  check_handles();
  CHECK(nvmlShutdown());
  assert(nvmlDeviceGetCount_v2(&count) == NVML_ERROR_UNINITIALIZED);

  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++)
    assert(pthread_create(&threads[i], NULL, come_and_go, NULL) == 0);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  assert(nvmlShutdown() == NVML_ERROR_UNINITIALIZED);
  return 0;
}
