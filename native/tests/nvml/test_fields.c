// SPDX-License-Identifier: Apache-2.0
// Every field number, on every model: an answer or a reason, never a crash.
//
// machine: t4,p100,v100-16gb:2,a30,a100-80gb,rtx4090,h100-80gb,gh200,b200
// libraries: simulated/libnvidia-ml.so.1
#include "calls.h"

#include <string.h>

enum { LAST = 330, MODELS = 10 };

static bool known(nvmlReturn_t result) {
  return result == NVML_SUCCESS || result == NVML_ERROR_NOT_SUPPORTED ||
         result == NVML_ERROR_INVALID_ARGUMENT;
}

static void check_all(nvmlDevice_t device, unsigned int scope) {
  nvmlFieldValue_t values[LAST];
  memset(values, 0, sizeof values);
  for (unsigned int id = 0; id < LAST; id++) {
    values[id].fieldId = id;
    values[id].scopeId = scope;
  }
  CHECK(nvmlDeviceGetFieldValues(device, LAST, values));
  for (unsigned int id = 0; id < LAST; id++) {
    assert(known(values[id].nvmlReturn) && values[id].timestamp > 0);
    bool numbered = id > 0 && id < 310;
    assert((values[id].nvmlReturn == NVML_ERROR_INVALID_ARGUMENT) == !numbered);
  }
}

int main(void) {
  CHECK(nvmlInit_v2());
  unsigned int count;
  CHECK(nvmlDeviceGetCount_v2(&count));
  assert(count == MODELS);
  for (unsigned int i = 0; i < count; i++) {
    nvmlDevice_t device;
    CHECK(nvmlDeviceGetHandleByIndex_v2(i, &device));
    unsigned int scopes[] = {0, 1, 5, 17, 18, 1000, ~0u};
    for (size_t s = 0; s < sizeof scopes / sizeof scopes[0]; s++) check_all(device, scopes[s]);
    unsigned long long before, after;
    nvmlReturn_t result = nvmlDeviceGetTotalEnergyConsumption(device, &before);
    if (result == NVML_ERROR_NOT_SUPPORTED) continue;  // Pascal
    CHECK(nvmlDeviceGetTotalEnergyConsumption(device, &after));
    assert(before > 0 && after >= before);
  }
  CHECK(nvmlShutdown());
  return 0;
}
