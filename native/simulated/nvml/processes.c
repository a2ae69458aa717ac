// SPDX-License-Identifier: Apache-2.0
// Who uses a device: the lists of compute, graphics and MPS processes, and each one's part.
#include <stdlib.h>
#include <string.h>

#include "simulated/nvml/library.h"

typedef struct user {
  unsigned int pid;
  int slot;
  unsigned long long used;
  unsigned int gpu_instance, compute_instance;  // ids, NVML_NO_INSTANCE of a whole GPU
} user;

// Of a process on a GPU with MIG: where.
static void find_instance(const nvml_gpu *gpu, user *found) {
  found->gpu_instance = found->compute_instance = NVML_NO_INSTANCE;
  int place = allot_compute_place(gpu->engine, found->slot, gpu->index);
  if (place == gpu->index || allot_mig_compute(gpu->engine, place) == NULL) return;
  nvml_gpu own = *gpu;
  own.place = place;
  found->gpu_instance = allot_load(&nvml_cut(&own, nvml_cut_around(&own))->id);
  found->compute_instance = allot_load(&nvml_compute(&own)->id);
}

// The processes that have a context on the GPU or MIG device, none of them dead, and each to be
// seen by the caller. Returns how many.
static unsigned int list_users(const nvml_gpu *gpu, user users[ALLOT_MACHINE_PROCESSES]) {
  allot_handle *engine = gpu->engine;
  nvml_number numbers[ALLOT_MACHINE_PROCESSES];
  unsigned int found = 0, count = 0;
  allot_machine_reap(engine);
  for (int slot = 0; slot < allot_machine_high(engine); slot++) {
    const allot_process *process = &engine->machine->processes[slot];
    if (!allot_machine_taken(engine, slot)) continue;
    if (allot_load(&process->gpus[gpu->index].contexts) == 0) continue;
    bool is_elsewhere = allot_compute_place(engine, slot, gpu->index) != gpu->place;
    if (nvml_is_mig_device(gpu) && is_elsewhere) continue;
    // A checkpointed process has let go of the GPU.
    if (allot_checkpoint_state(engine, slot) == ALLOT_CHECKPOINT_SAVED) continue;
    numbers[found++] = (nvml_number){.slot = slot,
                                     .inside = allot_load(&process->pid),
                                     .namespace_id = allot_load(&process->namespace_id),
                                     .start_time = allot_load(&process->start_time)};
  }
  nvml_number_here(numbers, found);
  for (unsigned int i = 0; i < found; i++) {
    if (numbers[i].here == 0) continue;
    int slot = numbers[i].slot;
    users[count++] = (user){
        .pid = numbers[i].here, .slot = slot, .used = allot_process_used(engine, slot, gpu->index)};
    find_instance(gpu, &users[count - 1]);
  }
  return count;
}

// Says how many there are; true if the caller's array has room for them.
static bool has_room(unsigned int *room, unsigned int count, const void *array) {
  bool enough = *room >= count && (count == 0 || array != NULL);
  *room = count;
  return enough;
}

// Of those only who works through an MPS server; these are compute processes all the same.
static unsigned int list_clients(const nvml_gpu *gpu, user users[ALLOT_MACHINE_PROCESSES]) {
  unsigned int found = list_users(gpu, users), count = 0;
  for (unsigned int i = 0; i < found; i++) {
    if (allot_mps_is_client(gpu->engine, users[i].slot)) users[count++] = users[i];
  }
  return count;
}

typedef unsigned int lister(const nvml_gpu *gpu, user users[ALLOT_MACHINE_PROCESSES]);

static nvmlReturn_t list_v1(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *infos,
                            lister *list) {
  NVML_ENTER_ANY(device, count != NULL);
  user users[ALLOT_MACHINE_PROCESSES];
  unsigned int found = list(&gpu, users);
  if (!has_room(count, found, infos)) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (unsigned int i = 0; i < found; i++) {
    infos[i] = (nvmlProcessInfo_v1_t){.pid = users[i].pid, .usedGpuMemory = users[i].used};
  }
  return NVML_SUCCESS;
}

static nvmlReturn_t list_v2(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *infos,
                            lister *list) {
  NVML_ENTER_ANY(device, count != NULL);
  user users[ALLOT_MACHINE_PROCESSES];
  unsigned int found = list(&gpu, users);
  if (!has_room(count, found, infos)) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (unsigned int i = 0; i < found; i++) {
    infos[i] = (nvmlProcessInfo_v2_t){.pid = users[i].pid,
                                      .usedGpuMemory = users[i].used,
                                      .gpuInstanceId = users[i].gpu_instance,
                                      .computeInstanceId = users[i].compute_instance};
  }
  return NVML_SUCCESS;
}

// Nobody draws on these machines.
static nvmlReturn_t list_none(nvmlDevice_t device, unsigned int *count) {
  NVML_ENTER_ANY(device, count != NULL);
  *count = 0;
  return NVML_SUCCESS;
}

#define LIST(name, version, users)                                        \
  NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, \
                                nvmlProcessInfo_##version##_t *infos) {   \
    return list_##version(device, count, infos, users);                   \
  }

LIST(nvmlDeviceGetComputeRunningProcesses, v1, list_users)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, v2, list_users)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, v2, list_users)
LIST(nvmlDeviceGetMPSComputeRunningProcesses, v1, list_clients)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, v2, list_clients)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, v2, list_clients)

#define NO_PROCESSES(name, type)                                                         \
  NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, type *infos) { \
    return list_none(device, count);                                                     \
  }

NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_v2_t)

NVML_EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device,
                                                               nvmlProcessDetailList_v1_t *list) {
  NVML_ENTER(device, list != NULL);
  if (list->version != nvmlProcessDetailList_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  if (list->mode > NVML_PROCESS_MODE_ALL) return NVML_ERROR_INVALID_ARGUMENT;
  bool compute = list->mode == NVML_PROCESS_MODE_COMPUTE || list->mode == NVML_PROCESS_MODE_ALL;
  user users[ALLOT_MACHINE_PROCESSES];
  unsigned int found = compute ? list_users(&gpu, users) : 0;
  if (!has_room(&list->numProcArrayEntries, found, list->procArray)) {
    return NVML_ERROR_INSUFFICIENT_SIZE;
  }
  for (unsigned int i = 0; i < found; i++) {
    list->procArray[i] = (nvmlProcessDetail_v1_t){.pid = users[i].pid,
                                                  .usedGpuMemory = users[i].used,
                                                  .gpuInstanceId = users[i].gpu_instance,
                                                  .computeInstanceId = users[i].compute_instance};
  }
  return NVML_SUCCESS;
}

// ---- each one's part of the time ----

// Samples are taken six times a second; every caller within one period sees the same.
#define SAMPLE_US 166667ull

typedef struct sample {
  unsigned int pid;
  unsigned int sm;
  unsigned int memory;
} sample;

static unsigned int list_samples(const nvml_gpu *gpu, sample samples[ALLOT_MACHINE_PROCESSES]) {
  user users[ALLOT_MACHINE_PROCESSES];
  unsigned int found = list_users(gpu, users);
  unsigned int count = 0;
  nvml_advance(gpu);
  for (unsigned int i = 0; i < found; i++) {
    const allot_process *process = &gpu->engine->machine->processes[users[i].slot];
    unsigned int sm = nvml_busy_percent(&process->gpus[gpu->index].compute);
    if (sm == 0) continue;
    samples[count++] = (sample){.pid = users[i].pid, .sm = sm, .memory = sm * 45 / 100};
  }
  return count;
}

static unsigned long long sample_time(void) {
  return nvml_time_us() / SAMPLE_US * SAMPLE_US;
}

NVML_EXPORT nvmlReturn_t
nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *utilization,
                                unsigned int *count, unsigned long long last_seen) {
  NVML_ENTER(device, count != NULL);
  sample samples[ALLOT_MACHINE_PROCESSES];
  unsigned long long now = sample_time();
  unsigned int found = now > last_seen ? list_samples(&gpu, samples) : 0;
  if (found == 0) {
    *count = 0;
    return NVML_ERROR_NOT_FOUND;
  }
  if (!has_room(count, found, utilization)) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (unsigned int i = 0; i < found; i++) {
    utilization[i] = (nvmlProcessUtilizationSample_t){.pid = samples[i].pid,
                                                      .timeStamp = now,
                                                      .smUtil = samples[i].sm,
                                                      .memUtil = samples[i].memory};
  }
  return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(
    nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *info) {
  NVML_ENTER(device, info != NULL);
  if (info->version != nvmlProcessesUtilizationInfo_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  sample samples[ALLOT_MACHINE_PROCESSES];
  unsigned long long now = sample_time();
  unsigned int found = now > info->lastSeenTimeStamp ? list_samples(&gpu, samples) : 0;
  if (found == 0) {
    info->processSamplesCount = 0;
    return NVML_ERROR_NOT_FOUND;
  }
  if (!has_room(&info->processSamplesCount, found, info->procUtilArray)) {
    return NVML_ERROR_INSUFFICIENT_SIZE;
  }
  for (unsigned int i = 0; i < found; i++) {
    info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){.timeStamp = now,
                                                               .pid = samples[i].pid,
                                                               .smUtil = samples[i].sm,
                                                               .memUtil = samples[i].memory};
  }
  return NVML_SUCCESS;
}

// ---- accounting, which is off, as it is after every start of a driver ----

NVML_GETTER(nvmlDeviceGetAccountingMode, nvmlEnableState_t, true, NVML_FEATURE_DISABLED)
NVML_GETTER(nvmlDeviceGetAccountingBufferSize, unsigned int, true, 4000)

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count,
                                                     unsigned int *pids) {
  return list_none(device, count);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid,
                                                      nvmlAccountingStats_t *stats) {
  NVML_ENTER(device, stats != NULL);
  return NVML_ERROR_NOT_FOUND;
}
