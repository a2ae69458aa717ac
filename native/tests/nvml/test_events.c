// SPDX-License-Identifier: Apache-2.0
// XIDs reach those who registered before them, once and in order; a lost GPU ends the wait.
//
// sources: simulated/engine/*.c
// machine: a100-80gb:2
// libraries: simulated/libnvidia-ml.so.1
#include "calls.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "simulated/engine/engine.h"

static allot_handle other;  // a second mapping: who injects faults

static void report(int gpu, uint64_t xid) {
  allot_gpu_faults *faults = &other.machine->faults.gpus[gpu];
  uint32_t head = allot_load(&faults->xid_head);
  allot_store(&faults->xids[head % 64].xid, xid);
  allot_store(&faults->xid_head, head + 1);
}

static void *report_late(void *unused) {
  usleep(50000);
  report(1, 31);
  return NULL;
}

static void expect(nvmlEventSet_t set, nvmlDevice_t device, unsigned long long type, uint64_t xid) {
  nvmlEventData_t data;
  CHECK(nvmlEventSetWait_v2(set, &data, 20000));
  assert(data.device == device && data.eventType == type && data.eventData == xid);
  assert(data.gpuInstanceId == NVML_NO_INSTANCE && data.computeInstanceId == NVML_NO_INSTANCE);
}

static void expect_nothing(nvmlEventSet_t set) {
  nvmlEventData_t data;
  assert(nvmlEventSetWait_v2(set, &data, 0) == NVML_ERROR_TIMEOUT);
}

int main(void) {
  nvmlEventSet_t set, late;
  nvmlDevice_t first, second;
  assert(allot_machine_open(&other) == 0);
  CHECK(nvmlInit_v2());
  CHECK(nvmlDeviceGetHandleByIndex_v2(0, &first));
  CHECK(nvmlDeviceGetHandleByIndex_v2(1, &second));
  report(0, 13);  // before anyone listens
  CHECK(nvmlEventSetCreate(&set));
  CHECK(nvmlDeviceRegisterEvents(first, NVML_EVENT_XID_CRITICAL_ERROR, set));
  CHECK(nvmlDeviceRegisterEvents(
      second, NVML_EVENT_XID_CRITICAL_ERROR | NVML_EVENT_DOUBLE_BIT_ECC_ERROR, set));
  assert(nvmlDeviceRegisterEvents(first, 1ull << 40, set) == NVML_ERROR_NOT_SUPPORTED);
  expect_nothing(set);

  report(0, 43);
  report(0, 45);
  report(1, 48);
  expect(set, first, NVML_EVENT_XID_CRITICAL_ERROR, 43);
  expect(set, first, NVML_EVENT_XID_CRITICAL_ERROR, 45);
  expect(set, second, NVML_EVENT_DOUBLE_BIT_ECC_ERROR, 48);
  expect_nothing(set);

  pthread_t thread;
  assert(pthread_create(&thread, NULL, report_late, NULL) == 0);
  expect(set, second, NVML_EVENT_XID_CRITICAL_ERROR, 31);
  pthread_join(thread, NULL);

  CHECK(nvmlEventSetCreate(&late));
  CHECK(nvmlDeviceRegisterEvents(second, NVML_EVENT_XID_CRITICAL_ERROR, late));
  expect_nothing(late);
  for (uint64_t i = 1; i <= 100; i++) report(1, 100 + i);
  for (uint64_t i = 37; i <= 100; i++) expect(late, second, NVML_EVENT_XID_CRITICAL_ERROR, 100 + i);
  expect_nothing(late);

  // The first version has no room for instances.
  nvmlEventData_t data;
  memset(&data, 0x5A, sizeof data);
  report(1, 62);
  CHECK(nvmlEventSetWait(late, &data, 20000));
  assert(data.eventData == 62 && data.gpuInstanceId == 0x5A5A5A5Au);

  report(1, 79);
  allot_store(&other.machine->faults.gpus[1].lost, 1u);
  expect(late, second, NVML_EVENT_XID_CRITICAL_ERROR, 79);
  assert(nvmlEventSetWait_v2(late, &data, 20000) == NVML_ERROR_GPU_IS_LOST);
  unsigned int power;
  assert(nvmlDeviceGetPowerUsage(second, &power) == NVML_ERROR_GPU_IS_LOST);
  assert(nvmlDeviceGetHandleByIndex_v2(1, &second) == NVML_ERROR_GPU_IS_LOST);
  CHECK(nvmlDeviceGetPowerUsage(first, &power));

  CHECK(nvmlEventSetFree(set));
  CHECK(nvmlEventSetFree(late));
  CHECK(nvmlShutdown());
  allot_machine_close(&other);
  return 0;
}
