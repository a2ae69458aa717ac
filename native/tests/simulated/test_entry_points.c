// SPDX-License-Identifier: Apache-2.0
// Entry points by name and version, and which devices a process sees under which numbers.
//
// sources: simulated/engine/*.c simulated/cuda/*.c
// machine: a100-80gb,t4,h100-80gb
#include "simulated/engine/engine.h"
#include "tests/simulated/driver_test.h"

static void *entry(const char *name, int version, uint64_t flags,
                   CUdriverProcAddressQueryResult wanted) {
  void *found = &found;
  CUdriverProcAddressQueryResult status;
  OK(cuGetProcAddress_v2(name, &found, version, flags, &status));
  if (status != wanted) {
    fprintf(stderr, "%s at %d: status %d\n", name, version, (int)status);
    abort();
  }
  return found;
}

#define IS(name, version, flags, function) \
  assert(entry(name, version, flags, CU_GET_PROC_ADDRESS_SUCCESS) == (void *)(uintptr_t)function)

static void by_version(void) {
  const uint64_t own = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  IS("cuMemAlloc", 12000, 0, cuMemAlloc_v2);
  IS("cuCtxCreate", 11030, 0, cuCtxCreate_v2);
  IS("cuCtxCreate", 11040, 0, cuCtxCreate_v3);
  IS("cuCtxCreate", 13000, 0, cuCtxCreate_v4);
  IS("cuMemcpyHtoD", 12000, 0, cuMemcpyHtoD_v2);
  IS("cuMemcpyHtoD", 12000, own, cuMemcpyHtoD_v2_ptds);
  IS("cuLaunchKernel", 12000, CU_GET_PROC_ADDRESS_LEGACY_STREAM, cuLaunchKernel);
  IS("cuLaunchKernel", 12000, own, cuLaunchKernel_ptsz);
  IS("cuMemAlloc", 12000, own, cuMemAlloc_v2);  // has no form for the thread's stream
  IS("cuGraphInstantiate", 11000, 0, cuGraphInstantiate_v2);
  IS("cuGraphInstantiate", 12000, 0, cuGraphInstantiateWithFlags);
  IS("cuStreamGetCaptureInfo", 12030, own, cuStreamGetCaptureInfo_v3_ptsz);
  IS("cuGetProcAddress", 12000, 0, cuGetProcAddress_v2);
  assert(entry("cuMemCreate", 10010, 0, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT) == NULL);
  assert(entry("cuNoSuchThing", 12000, 0, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND) == NULL);
  void *found;
  FAILS(CUDA_ERROR_INVALID_VALUE, cuGetProcAddress_v2("cuInit", &found, 99000, 0, NULL));
  FAILS(CUDA_ERROR_INVALID_VALUE, cuGetProcAddress_v2("cuInit", &found, 12000, 8, NULL));
  FAILS(CUDA_ERROR_NOT_FOUND, cuGetProcAddress("cuNoSuchThing", &found, 12000, 0));
  OK(cuGetProcAddress("cuInit", &found, 12000, 0));
}

// A driver of CUDA 11.8 does not know what came later. Runs in a child, on a changed machine.
static void of_an_older_driver(allot_handle *machine) {
  uint32_t version = machine->machine->description.cuda_version;
  machine->machine->description.cuda_version = 11080;
  pid_t child = fork();
  assert(child >= 0);
  if (child == 0) {
    int reported;
    OK(cuDriverGetVersion(&reported));
    assert(reported == 11080);
    IS("cuCtxCreate", 11080, 0, cuCtxCreate_v3);
    assert(entry("cuLibraryLoadData", 11080, 0, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND) == NULL);
    void *found;
    FAILS(CUDA_ERROR_INVALID_VALUE,
          cuGetProcAddress_v2("cuLibraryLoadData", &found, 12000, 0, NULL));
    _exit(0);
  }
  expect_success(child);
  machine->machine->description.cuda_version = version;
}

// What CUDA_VISIBLE_DEVICES shows: the machine's GPUs, in the order of the process's numbers.
static void shows(const allot_handle *machine, const char *list, const char *order,
                  const char *wanted) {
  pid_t child = fork();
  assert(child >= 0);
  if (child == 0) {
    if (list != NULL) setenv("CUDA_VISIBLE_DEVICES", list, 1);
    if (order != NULL) setenv("CUDA_DEVICE_ORDER", order, 1);
    int count = 0;
    CUresult result = cuInit(0);
    if (*wanted == '\0') {
      assert(result == CUDA_ERROR_NO_DEVICE);
      _exit(0);
    }
    assert(result == CUDA_SUCCESS);
    OK(cuDeviceGetCount(&count));
    char seen[17] = {0};
    for (int i = 0; i < count; i++) {
      char name[96];
      OK(cuDeviceGetName(name, sizeof name, i));
      for (int gpu = 0; gpu < 3; gpu++) {
        if (strcmp(name, machine->machine->description.gpus[gpu].name) == 0) {
          seen[i] = (char)('0' + gpu);
        }
      }
    }
    if (strcmp(seen, wanted) != 0) {
      fprintf(stderr, "\"%s\" shows %s, not %s\n", list != NULL ? list : "(unset)", seen, wanted);
      _exit(1);
    }
    _exit(0);
  }
  expect_success(child);
}

static void visible_devices(const allot_handle *machine) {
  const allot_gpu_description *gpus = machine->machine->description.gpus;
  const char *place = "PCI_BUS_ID";
  shows(machine, NULL, place, "012");
  shows(machine, NULL, NULL, "201");  // fastest first
  shows(machine, "1", place, "1");
  shows(machine, "2,0", place, "20");
  shows(machine, " 2 , 1", place, "21");
  shows(machine, "0,7,1", place, "0");  // the list ends at what is not there
  shows(machine, "0,0,1", place, "0");  // or was named before
  shows(machine, "0,-1,1", place, "0");
  shows(machine, "", place, "");
  shows(machine, "-1", place, "");
  shows(machine, "NoDevFiles", place, "");
  shows(machine, "MIG-GPU-1234/1/0", place, "");
  shows(machine, gpus[1].uuid, place, "1");
  char list[200], brief[12];
  snprintf(list, sizeof list, "%.47s,%.47s", gpus[2].uuid, gpus[0].uuid);
  shows(machine, list, place, "20");
  snprintf(brief, sizeof brief, "%.11s", gpus[2].uuid);
  shows(machine, brief, place, "2");
  shows(machine, "GPU-", place, "");  // short of any one
}

int main(void) {
  allot_handle machine;
  assert(allot_machine_open(&machine) == 0);
  visible_devices(&machine);
  of_an_older_driver(&machine);
  by_version();
  return 0;
}
