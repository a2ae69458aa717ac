// SPDX-License-Identifier: Apache-2.0
// Processes are listed with what they have, in every version of the lists, until they die.
//
// The children here are users of the engine itself: attached, with memory, a context and work.
//
// sources: simulated/engine/*.c
// sanitizers: plain address,undefined
// machine: a100-80gb,t4
// libraries: simulated/libnvidia-ml.so.1
#include "calls.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "simulated/engine/engine.h"

#define GIB (1ull << 30)
#define MIB (1ull << 20)

typedef struct child {
  pid_t pid;
  int gpu;
  uint64_t bytes;
  int stop;  // closing it lets the child end by itself
} child;

static void submit_kernel(allot_handle *handle, int gpu, uint64_t duration_ns) {
  allot_work *work = allot_work_new(handle, gpu);
  assert(work != NULL);
  uint32_t own = (uint32_t)(allot_load(&handle->machine->rings[handle->slot][gpu].head) + 1);
  memset(work, 0, sizeof *work);
  work->kind = ALLOT_WORK_KERNEL;
  work->previous = own - 1;
  work->after = own;
  work->duration_ns = duration_ns;
  work->submitted_ns = allot_now_ns();
  work->progress = ALLOT_PROGRESS(ALLOT_WAITING, duration_ns);
  allot_work_submit(handle, gpu);
}

static child start(int gpu, uint64_t bytes, uint64_t busy_ns) {
  int ready[2], stop[2];
  char byte;
  assert(pipe(ready) == 0 && pipe(stop) == 0);
  pid_t pid = fork();
  assert(pid >= 0);
  if (pid == 0) {
    close(stop[1]);
    allot_handle handle;
    if (allot_machine_open(&handle) != 0 ||
        allot_machine_attach(&handle, ALLOT_PROCESS_COMPUTE) != 0)
      _exit(1);
    if (!allot_gpu_take(&handle, gpu, bytes)) _exit(2);
    allot_store(&handle.machine->processes[handle.slot].gpus[gpu].contexts, 1u);
    if (busy_ns > 0) submit_kernel(&handle, gpu, busy_ns);
    if (write(ready[1], "r", 1) != 1) _exit(3);
    while (read(stop[0], &byte, 1) > 0) {
    }
    _exit(0);
  }
  close(ready[1]);
  close(stop[0]);
  assert(read(ready[0], &byte, 1) == 1);
  close(ready[0]);
  return (child){.pid = pid, .gpu = gpu, .bytes = bytes, .stop = stop[1]};
}

static void kill_child(child *one) {
  kill(one->pid, SIGKILL);
  assert(waitpid(one->pid, NULL, 0) == one->pid);
}

static nvmlDevice_t device_of(int gpu) {
  nvmlDevice_t device;
  CHECK(nvmlDeviceGetHandleByIndex_v2((unsigned int)gpu, &device));
  return device;
}

static unsigned long long used(int gpu) {
  nvmlMemory_t first;
  nvmlMemory_v2_t second = {.version = nvmlMemory_v2};
  CHECK(nvmlDeviceGetMemoryInfo(device_of(gpu), &first));
  CHECK(nvmlDeviceGetMemoryInfo_v2(device_of(gpu), &second));
  assert(first.total == second.total);
  assert(first.used == second.used + second.reserved);
  assert(first.free == second.free && first.free == first.total - first.used);
  return second.used;
}

static unsigned int listed(int gpu) {
  unsigned int count = 0;
  nvmlReturn_t result = nvmlDeviceGetComputeRunningProcesses_v3(device_of(gpu), &count, NULL);
  assert(result == (count == 0 ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE));
  return count;
}

// Every version of the list, with exactly the room that it says it needs, tells the same.
static void check_lists(int gpu, const child *children, unsigned int expected) {
  nvmlDevice_t device = device_of(gpu);
  unsigned int count = expected;
  assert(listed(gpu) == expected);
  nvmlProcessInfo_v1_t *first = calloc(expected, sizeof *first);
  nvmlProcessInfo_v2_t *third = calloc(expected, sizeof *third);
  nvmlProcessDetail_v1_t *details = calloc(expected, sizeof *details);
  nvmlProcessDetailList_v1_t list = {.version = nvmlProcessDetailList_v1,
                                     .mode = NVML_PROCESS_MODE_COMPUTE,
                                     .numProcArrayEntries = expected,
                                     .procArray = details};
  CHECK(nvmlDeviceGetComputeRunningProcesses(device, &count, first));
  CHECK(nvmlDeviceGetComputeRunningProcesses_v3(device, &count, third));
  CHECK(nvmlDeviceGetRunningProcessDetailList(device, &list));
  assert(count == expected && list.numProcArrayEntries == expected);
  for (unsigned int i = 0; i < expected; i++) {
    assert(first[i].pid == (unsigned int)children[i].pid &&
           first[i].usedGpuMemory == children[i].bytes);
    assert(third[i].pid == first[i].pid && third[i].usedGpuMemory == first[i].usedGpuMemory);
    assert(third[i].gpuInstanceId == NVML_NO_INSTANCE);
    assert(details[i].pid == first[i].pid && details[i].usedGpuMemory == first[i].usedGpuMemory);
    assert(details[i].usedGpuCcProtectedMemory == 0);
  }
  if (expected > 0) {
    count = expected - 1;
    nvmlReturn_t result = nvmlDeviceGetComputeRunningProcesses_v3(device, &count, third);
    assert(result == NVML_ERROR_INSUFFICIENT_SIZE && count == expected);
    list.numProcArrayEntries = 0;
    assert(nvmlDeviceGetRunningProcessDetailList(device, &list) == NVML_ERROR_INSUFFICIENT_SIZE);
    assert(list.numProcArrayEntries == expected);
  }
  list.version = 1;
  assert(nvmlDeviceGetRunningProcessDetailList(device, &list) ==
         NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
  free(first);
  free(third);
  free(details);
}

static void check_utilization(int gpu, pid_t busy) {
  nvmlDevice_t device = device_of(gpu);
  nvmlUtilization_t rates;
  unsigned int power, temperature, idle_power, idle_temperature;
  CHECK(nvmlDeviceGetPowerUsage(device_of(1), &idle_power));
  CHECK(nvmlDeviceGetTemperature(device_of(1), NVML_TEMPERATURE_GPU, &idle_temperature));
  CHECK(nvmlDeviceGetUtilizationRates(device, &rates));
  assert(rates.gpu > 10 && rates.gpu <= 100);
  CHECK(nvmlDeviceGetPowerUsage(device, &power));
  CHECK(nvmlDeviceGetTemperature(device, NVML_TEMPERATURE_GPU, &temperature));
  assert(power > 58000 && power <= 400000 && temperature > 32);
  assert(idle_power == 9000 && idle_temperature == 34);

  unsigned int count = 0;
  assert(nvmlDeviceGetProcessUtilization(device, NULL, &count, 0) == NVML_ERROR_INSUFFICIENT_SIZE);
  assert(count == 1);
  nvmlProcessUtilizationSample_t sample;
  CHECK(nvmlDeviceGetProcessUtilization(device, &sample, &count, 0));
  assert(sample.pid == (unsigned int)busy && sample.smUtil > 10 && sample.smUtil <= 100);
  assert(nvmlDeviceGetProcessUtilization(device, &sample, &count, ~0ull) == NVML_ERROR_NOT_FOUND);
  nvmlProcessUtilizationInfo_v1_t info;
  nvmlProcessesUtilizationInfo_v1_t infos = {
      .version = nvmlProcessesUtilizationInfo_v1, .processSamplesCount = 1, .procUtilArray = &info};
  CHECK(nvmlDeviceGetProcessesUtilizationInfo(device, &infos));
  assert(info.pid == (unsigned int)busy);

  nvmlSample_t samples[16];
  nvmlValueType_t type;
  count = 16;
  CHECK(nvmlDeviceGetSamples(device, NVML_GPU_UTILIZATION_SAMPLES, 0, &type, &count, samples));
  assert(count >= 1 && type == NVML_VALUE_TYPE_UNSIGNED_INT);
  for (unsigned int i = 1; i < count; i++) assert(samples[i].timeStamp > samples[i - 1].timeStamp);
  unsigned int none = 16;
  nvmlReturn_t result =
      nvmlDeviceGetSamples(device, NVML_GPU_UTILIZATION_SAMPLES, ~0ull >> 1, &type, &none, samples);
  assert(result == NVML_ERROR_NOT_FOUND && none == 0);
}

int main(void) {
  CHECK(nvmlInit_v2());
  unsigned int state;
  assert(used(0) == 0 && listed(0) == 0);
  CHECK(nvmlDeviceGetPerformanceState(device_of(1), &state));
  assert(state == NVML_PSTATE_8);

  child children[3];
  children[0] = start(0, 3 * GIB, 60000000000ull);
  children[1] = start(0, 5 * GIB + 2 * MIB, 0);
  children[2] = start(1, 1 * GIB, 0);
  check_lists(0, children, 2);
  check_lists(1, &children[2], 1);
  assert(used(0) == 8 * GIB + 2 * MIB && used(1) == GIB);
  CHECK(nvmlDeviceGetPerformanceState(device_of(1), &state));
  assert(state == NVML_PSTATE_0);

  usleep(400000);
  check_utilization(0, children[0].pid);

  kill_child(&children[0]);
  assert(listed(0) == 1);
  check_lists(0, &children[1], 1);
  assert(used(0) == 5 * GIB + 2 * MIB);
  kill_child(&children[1]);
  close(children[2].stop);
  assert(waitpid(children[2].pid, NULL, 0) == children[2].pid);
  check_lists(0, NULL, 0);
  assert(used(0) == 0 && used(1) == 0 && listed(1) == 0);
  CHECK(nvmlShutdown());
  return 0;
}
