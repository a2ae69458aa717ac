// SPDX-License-Identifier: Apache-2.0
// NVML inside a share. The machine has four GPUs; the share has numbers 2 and 0, in this order.
#include "host.h"

nvmlReturn_t nvmlInit_v2(void);
nvmlReturn_t nvmlShutdown(void);
nvmlReturn_t nvmlDeviceGetCount(unsigned *);
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *);
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned, nvmlDevice_t *);
nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned, nvmlDevice_t *);
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *, nvmlDevice_t *);
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *, nvmlDevice_t *);
nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *, nvmlDevice_t *);
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t, char *, unsigned);
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t, unsigned *);
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t, nvmlMemory_t *);
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t, nvmlMemory_v2_t *);
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t, unsigned *, nvmlProcessInfo_v1_t *);
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t, unsigned *,
                                                     nvmlProcessInfo_v2_t *);
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t, unsigned *,
                                                     nvmlProcessInfo_v2_t *);
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t, unsigned *,
                                                      nvmlProcessInfo_v2_t *);
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t, unsigned *,
                                                        nvmlProcessInfo_v2_t *);
nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t, nvmlProcessDetailList_v1_t *);
nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t, nvmlProcessUtilizationSample_t *,
                                             unsigned *, unsigned long long);
nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t,
                                                   nvmlProcessesUtilizationInfo_v1_t *);
nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t, unsigned *, unsigned *);
nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t, unsigned, nvmlAccountingStats_t *);
nvmlReturn_t nvmlDeviceGetEncoderSessions(nvmlDevice_t, unsigned *, nvmlEncoderSessionInfo_t *);
nvmlReturn_t nvmlDeviceGetFBCSessions(nvmlDevice_t, unsigned *, void *);
nvmlReturn_t nvmlDeviceGetConfComputeProtectedMemoryUsage(nvmlDevice_t, nvmlMemory_t *);
nvmlReturn_t nvmlSystemGetProcessName(unsigned, char *, unsigned);
nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t, unsigned, unsigned *, nvmlDevice_t *);

static const allot_gpu_description *gpu(int index) {
  return &simulation.machine->description.gpus[index];
}

static nvmlDevice_t handle_of(unsigned index) {
  nvmlDevice_t handle;
  OK(nvmlDeviceGetHandleByIndex_v2(index, &handle));
  return handle;
}

static void only_the_shares_devices_are_there(void) {
  unsigned count;
  GIVES(nvmlDeviceGetCount_v2(&count), NVML_ERROR_UNINITIALIZED);
  nvmlDevice_t handle;
  GIVES(nvmlDeviceGetHandleByIndex_v2(0, &handle), NVML_ERROR_UNINITIALIZED);
  GIVES(nvmlDeviceGetHandleByIndex_v2(9, &handle), NVML_ERROR_UNINITIALIZED);
  OK(nvmlInit_v2());
  OK(nvmlDeviceGetCount_v2(&count));
  EXPECT_EQUAL(count, 2);
  OK(nvmlDeviceGetCount(&count));
  EXPECT_EQUAL(count, 2);
  static const int machine_index[] = {2, 0};
  for (unsigned i = 0; i < 2; i++) {
    char uuid[96];
    unsigned index;
    OK(nvmlDeviceGetHandleByIndex(i, &handle));
    OK(nvmlDeviceGetUUID(handle, uuid, sizeof uuid));
    EXPECT(strcmp(uuid, gpu(machine_index[i])->uuid) == 0);
    OK(nvmlDeviceGetIndex(handle, &index));
    EXPECT_EQUAL(index, i);
    OK(nvmlDeviceGetHandleByUUID(uuid, &handle));
    EXPECT(handle == handle_of(i));
    OK(nvmlDeviceGetHandleBySerial(gpu(machine_index[i])->serial, &handle));
    EXPECT(handle == handle_of(i));
  }
  GIVES(nvmlDeviceGetHandleByIndex_v2(2, &handle), NVML_ERROR_INVALID_ARGUMENT);
  GIVES(nvmlDeviceGetHandleByUUID(gpu(1)->uuid, &handle), NVML_ERROR_NOT_FOUND);
  GIVES(nvmlDeviceGetHandleBySerial(gpu(3)->serial, &handle), NVML_ERROR_NOT_FOUND);
  char bus[32];
  snprintf(bus, sizeof bus, "%08x:%02x:%02x.0", gpu(1)->pci_domain, gpu(1)->pci_bus,
           gpu(1)->pci_device);
  GIVES(nvmlDeviceGetHandleByPciBusId_v2(bus, &handle), NVML_ERROR_NOT_FOUND);
  GIVES(nvmlDeviceGetCount_v2(NULL), NVML_ERROR_INVALID_ARGUMENT);
  OK(nvmlShutdown());
}

static void neighbours_are_the_shares(void) {
  OK(nvmlInit_v2());
  nvmlDevice_t found[8];
  unsigned count = 0;
  OK(nvmlDeviceGetTopologyNearestGpus(handle_of(0), 50, &count, NULL));
  EXPECT(count <= 1);
  count = 8;
  OK(nvmlDeviceGetTopologyNearestGpus(handle_of(0), 50, &count, found));
  for (unsigned i = 0; i < count; i++) EXPECT(found[i] == handle_of(1));
}

static void memory_is_the_shares(void) {
  OK(nvmlInit_v2());
  CUdeviceptr pointer;
  start_on(1);
  OK(cuMemAlloc_v2(&pointer, 30 * MIB));
  nvmlMemory_t memory;
  OK(nvmlDeviceGetMemoryInfo(handle_of(1), &memory));
  EXPECT_EQUAL(memory.total, limit_of(1));
  EXPECT_EQUAL(memory.used, context_cost() + 30 * MIB);
  EXPECT_EQUAL(memory.free, memory.total - memory.used);
  nvmlMemory_v2_t newer = {.version = nvmlMemory_v2};
  OK(nvmlDeviceGetMemoryInfo_v2(handle_of(1), &newer));
  EXPECT_EQUAL(newer.total, memory.total);
  EXPECT_EQUAL(newer.used, memory.used);
  EXPECT_EQUAL(newer.free, memory.free);
  EXPECT_EQUAL(newer.reserved, 0);
  newer.version = 5;
  GIVES(nvmlDeviceGetMemoryInfo_v2(handle_of(1), &newer), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
  OK(nvmlDeviceGetMemoryInfo(handle_of(0), &memory));
  EXPECT_EQUAL(memory.total, limit_of(0));
  EXPECT_EQUAL(memory.used, 0);
  size_t free, total;
  OK(cuMemGetInfo_v2(&free, &total));
  EXPECT_EQUAL(total, newer.total);
  EXPECT_EQUAL(free, newer.free);
  GIVES(nvmlDeviceGetMemoryInfo(NULL, &memory), NVML_ERROR_INVALID_ARGUMENT);
  EXPECT_EQUAL(physical(0), context_cost() + 30 * MIB);  // the second of the share
  EXPECT_EQUAL(physical(2), 0);
}

static void expect_list(unsigned index, unsigned wanted, const unsigned *pids) {
  nvmlDevice_t device = handle_of(index);
  unsigned count = 0;
  nvmlReturn_t result = nvmlDeviceGetComputeRunningProcesses_v3(device, &count, NULL);
  EXPECT_EQUAL(result, wanted == 0 ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE);
  EXPECT_EQUAL(count, wanted);
  nvmlProcessInfo_v2_t list[8];
  nvmlProcessInfo_v1_t old[8];
  nvmlProcessDetail_v1_t entries[8];
  nvmlProcessDetailList_v1_t details = {nvmlProcessDetailList_v1, NVML_PROCESS_MODE_COMPUTE, 8,
                                        entries};
  count = 8;
  OK(nvmlDeviceGetComputeRunningProcesses_v2(device, &count, list));
  EXPECT_EQUAL(count, wanted);
  count = 8;
  OK(nvmlDeviceGetComputeRunningProcesses(device, &count, old));
  EXPECT_EQUAL(count, wanted);
  OK(nvmlDeviceGetRunningProcessDetailList(device, &details));
  EXPECT_EQUAL(details.numProcArrayEntries, wanted);
  count = 8;
  OK(nvmlDeviceGetComputeRunningProcesses_v3(device, &count, list));
  EXPECT_EQUAL(count, wanted);
  uint64_t sum = 0;
  for (unsigned i = 0; i < wanted; i++) {
    bool known = false;
    for (unsigned k = 0; k < wanted; k++) known = known || list[i].pid == pids[k];
    EXPECT(known);
    EXPECT_EQUAL(old[i].pid, list[i].pid);
    EXPECT_EQUAL(old[i].usedGpuMemory, list[i].usedGpuMemory);
    EXPECT_EQUAL(entries[i].pid, list[i].pid);
    EXPECT_EQUAL(entries[i].usedGpuMemory, list[i].usedGpuMemory);
    EXPECT_EQUAL(list[i].gpuInstanceId, NVML_NO_INSTANCE);
    sum += list[i].usedGpuMemory;
  }
  nvmlMemory_t memory;
  OK(nvmlDeviceGetMemoryInfo(device, &memory));
  EXPECT_EQUAL(memory.used, sum);
  count = 8;
  OK(nvmlDeviceGetGraphicsRunningProcesses_v3(device, &count, list));
  EXPECT_EQUAL(count, 0);
  count = 8;
  OK(nvmlDeviceGetMPSComputeRunningProcesses_v3(device, &count, list));
  EXPECT_EQUAL(count, 0);
}

static void processes_are_the_shares(void) {
  OK(nvmlInit_v2());
  expect_list(0, 0, NULL);
  int ready[2], done[2];
  OK(pipe(ready));
  OK(pipe(done));
  pid_t child = fork();
  char byte = 0;
  if (child == 0) {
    close(done[1]);
    CUdeviceptr pointer;
    start_on(0);
    OK(cuMemAlloc_v2(&pointer, 40 * MIB));
    EXPECT(write(ready[1], &byte, 1) == 1);
    _exit((int)read(done[0], &byte, 1));
  }
  EXPECT(read(ready[0], &byte, 1) == 1);
  start_on(0);
  unsigned pids[] = {(unsigned)child, (unsigned)getpid()};
  expect_list(0, 2, pids);
  expect_list(1, 0, NULL);
  close(done[1]);
  int status;
  waitpid(child, &status, 0);
  EXPECT_EQUAL(status, 0);
  expect_list(0, 1, &pids[1]);
}

// ---- utilisation by process ----

#define NEIGHBOUR "neighbour"

static const char spin[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry allot_spin(.param .u64 nanoseconds)\n{\n  ret;\n}\n";

static void keep_busy(CUdevice ordinal) {
  CUmodule module;
  CUfunction function;
  uint64_t nanoseconds = 20 * 1000 * 1000;
  void *parameters[] = {&nanoseconds};
  start_on(ordinal);
  OK(cuModuleLoadData(&module, spin));
  OK(cuModuleGetFunction(&function, module, "allot_spin"));
  OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
  OK(cuCtxSynchronize());
}

// Does one of both lists name the process? All samples of the last second are asked for.
static bool has_sample(nvmlDevice_t device, unsigned pid) {
  nvmlProcessUtilizationSample_t samples[16];
  nvmlProcessUtilizationInfo_v1_t newer[16];
  nvmlProcessesUtilizationInfo_v1_t info = {nvmlProcessesUtilizationInfo_v1, 16, 0, newer};
  unsigned count = 16;
  bool found = false;
  if (nvmlDeviceGetProcessUtilization(device, samples, &count, 0) != NVML_SUCCESS) count = 0;
  for (unsigned i = 0; i < count; i++) found = found || samples[i].pid == pid;
  count = 0;
  if (nvmlDeviceGetProcessesUtilizationInfo(device, &info) == NVML_SUCCESS) {
    count = info.processSamplesCount;
  }
  for (unsigned i = 0; i < count; i++) found = found || newer[i].pid == pid;
  return found;
}

// The program again, without a share: on the GPU that is the share's first. It ends with the pipe.
static void is_a_neighbour(void) {
  char byte = 0;
  nvmlDevice_t device;
  keep_busy(2);
  OK(nvmlInit_v2());
  OK(nvmlDeviceGetHandleByIndex_v2(2, &device));
  EXPECT(has_sample(device, (unsigned)getpid()));
  EXPECT(write(1, &byte, 1) == 1);
  _exit((int)read(0, &byte, 1));
}

static void samples_of_neighbours_are_left_out(void) {
  int ready[2], done[2];
  OK(pipe(ready));
  OK(pipe(done));
  pid_t neighbour = fork();
  if (neighbour == 0) {
    dup2(done[0], 0);
    dup2(ready[1], 1);
    close(done[1]);
    unsetenv("ALLOTMENT_SHARE");
    execl("/proc/self/exe", "host_nvml", NEIGHBOUR, NULL);
    _exit(9);
  }
  char byte;
  close(ready[1]);
  EXPECT(read(ready[0], &byte, 1) == 1);
  OK(nvmlInit_v2());
  EXPECT(!has_sample(handle_of(0), (unsigned)neighbour));
  keep_busy(0);
  EXPECT(has_sample(handle_of(0), (unsigned)getpid()));
  EXPECT(!has_sample(handle_of(0), (unsigned)neighbour));
  close(done[1]);
  int status;
  EXPECT(waitpid(neighbour, &status, 0) == neighbour && status == 0);
}

// Lists that NVML cannot tell for the share alone.
static void lists_of_all_tenants_are_refused(void) {
  OK(nvmlInit_v2());
  nvmlDevice_t device = handle_of(0);
  unsigned count = 0;
  nvmlAccountingStats_t stats;
  nvmlMemory_t memory;
  GIVES(nvmlDeviceGetAccountingPids(device, &count, NULL), NVML_ERROR_NO_PERMISSION);
  GIVES(nvmlDeviceGetAccountingStats(device, 1, &stats), NVML_ERROR_NO_PERMISSION);
  GIVES(nvmlDeviceGetEncoderSessions(device, &count, NULL), NVML_ERROR_NO_PERMISSION);
  GIVES(nvmlDeviceGetFBCSessions(device, &count, NULL), NVML_ERROR_NO_PERMISSION);
  GIVES(nvmlDeviceGetConfComputeProtectedMemoryUsage(device, &memory), NVML_ERROR_NO_PERMISSION);
}

static void names_are_of_the_shares_processes(void) {
  OK(nvmlInit_v2());
  char name[64];
  pid_t other = fork();
  if (other == 0) {
    pause();
    _exit(0);
  }
  OK(nvmlSystemGetProcessName((unsigned)getpid(), name, sizeof name));
  GIVES(nvmlSystemGetProcessName((unsigned)other, name, sizeof name), NVML_ERROR_NOT_FOUND);
  kill(other, SIGKILL);
  EXPECT(waitpid(other, NULL, 0) == other);
}

// A program that only looks takes no slot.
static void looking_takes_no_slot(void) {
  OK(nvmlInit_v2());
  nvmlMemory_t memory;
  OK(nvmlDeviceGetMemoryInfo(handle_of(0), &memory));
  expect_list(0, 0, NULL);
  EXPECT_EQUAL(share.usage->high_slot, 0);
}

static const test_case cases[] = {
    {"only_the_shares_devices_are_there", only_the_shares_devices_are_there},
    {"neighbours_are_the_shares", neighbours_are_the_shares},
    {"memory_is_the_shares", memory_is_the_shares},
    {"processes_are_the_shares", processes_are_the_shares},
    {"samples_of_neighbours_are_left_out", samples_of_neighbours_are_left_out},
    {"lists_of_all_tenants_are_refused", lists_of_all_tenants_are_refused},
    {"names_are_of_the_shares_processes", names_are_of_the_shares_processes},
    {"looking_takes_no_slot", looking_takes_no_slot},
    {NULL, NULL},
};

int main(int argc, char **argv) {
  if (argc == 2 && strcmp(argv[1], NEIGHBOUR) == 0) is_a_neighbour();
  return run_case(cases, argc, argv);
}
