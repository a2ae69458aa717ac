// SPDX-License-Identifier: Apache-2.0
// The GPUs that a command is about, their MIG devices and their processes.
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "simulated/smi/smi.h"

static void describe(smi_gpu *gpu, unsigned int index) {
  *gpu = (smi_gpu){.index = index, .minor = index};
  gpu->problem = nvml.nvmlDeviceGetHandleByIndex_v2(index, &gpu->device);
  if (gpu->problem != NVML_SUCCESS) return;
  nvmlPciInfo_t pci = {0};
  gpu->problem = nvml.nvmlDeviceGetUUID(gpu->device, gpu->uuid, sizeof gpu->uuid);
  nvml.nvmlDeviceGetName(gpu->device, gpu->name, sizeof gpu->name);
  nvml.nvmlDeviceGetMinorNumber(gpu->device, &gpu->minor);
  nvmlDevice_t whole = gpu->device;
  nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu->device, &whole);
  nvml.nvmlDeviceGetPciInfo_v3(whole, &pci);
  memcpy(gpu->bus_id, pci.busId, sizeof gpu->bus_id);
  gpu->has_mig =
      nvml.nvmlDeviceGetMigMode(gpu->device, &gpu->mig, &gpu->mig_pending) == NVML_SUCCESS;
}

// Bus ids are written with a domain of four digits or of eight, or without one.
static bool has_bus_id(const smi_gpu *gpu, const char *word, size_t length) {
  size_t whole = strlen(gpu->bus_id);
  return length >= sizeof "00:00.0" - 1 && length <= whole &&
         strncasecmp(gpu->bus_id + whole - length, word, length) == 0;
}

static bool is_named(const smi_gpu *gpu, const char *word, size_t length) {
  char index[16], serial[NVML_DEVICE_SERIAL_BUFFER_SIZE] = "";
  snprintf(index, sizeof index, "%u", gpu->index);
  if (gpu->problem == NVML_SUCCESS) {
    nvml.nvmlDeviceGetSerial(gpu->device, serial, sizeof serial);
  }
  const char *names[] = {index, gpu->uuid, serial};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    if (length > 0 && strlen(names[i]) == length && strncasecmp(names[i], word, length) == 0) {
      return true;
    }
  }
  return has_bus_id(gpu, word, length);
}

static int pick(const char *wanted, smi_list *list) {
  bool chosen[SMI_GPUS] = {false};
  for (const char *word = wanted, *end; word != NULL; word = *end == ',' ? end + 1 : NULL) {
    size_t length = strcspn(word, ",");
    end = word + length;
    bool found = false;
    for (unsigned int i = 0; i < list->count; i++) {
      if (is_named(&list->gpus[i], word, length)) found = chosen[i] = true;
    }
    if (!found) {
      printf("No devices were found\n");
      return SMI_NOT_FOUND;
    }
  }
  unsigned int count = 0;
  for (unsigned int i = 0; i < list->count; i++) {
    if (chosen[i]) list->gpus[count++] = list->gpus[i];
  }
  list->count = count;
  return 0;
}

int smi_list_gpus(const char *wanted, smi_list *list) {
  nvmlReturn_t result = nvml.nvmlDeviceGetCount_v2(&list->attached);
  if (result != NVML_SUCCESS || list->attached == 0) {
    puts("No devices were found");
    return SMI_NOT_FOUND;
  }
  list->count = list->attached < SMI_GPUS ? list->attached : SMI_GPUS;
  for (unsigned int i = 0; i < list->count; i++) describe(&list->gpus[i], i);
  return wanted == NULL ? 0 : pick(wanted, list);
}

void smi_report_problem(const smi_gpu *gpu, FILE *out) {
  fprintf(out, "Unable to determine the device handle for GPU%u: %s\n", gpu->index,
          nvml.nvmlErrorString(gpu->problem));
}

unsigned int smi_mig_devices(const smi_gpu *gpu, nvmlDevice_t *devices) {
  unsigned int count = 0;
  while (gpu->mig != 0 && count < SMI_MIG_DEVICES &&
         nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu->device, count, &devices[count]) ==
             NVML_SUCCESS) {
    count++;
  }
  return count;
}

static void name_process(smi_process *process) {
  char *name = process->name;
  if (nvml.nvmlSystemGetProcessName(process->info.pid, name, sizeof process->name) !=
      NVML_SUCCESS) {
    snprintf(name, sizeof process->name, "[Not Found]");
  }
}

static bool is_client(unsigned int pid, const nvmlProcessInfo_t *clients, unsigned int count) {
  for (unsigned int i = 0; i < count; i++) {
    if (clients[i].pid == pid) return true;
  }
  return false;
}

unsigned int smi_processes(const smi_gpu *gpu, smi_process *processes) {
  static nvmlProcessInfo_t infos[SMI_PROCESSES], clients[SMI_PROCESSES];
  unsigned int count = SMI_PROCESSES, served = SMI_PROCESSES;
  if (nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu->device, &count, infos) != NVML_SUCCESS) {
    return 0;
  }
  if (nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(gpu->device, &served, clients) !=
      NVML_SUCCESS) {
    served = 0;
  }
  for (unsigned int i = 0; i < count; i++) {
    processes[i] = (smi_process){.info = infos[i],
                                 .type = is_client(infos[i].pid, clients, served) ? "M+C" : "C"};
    name_process(&processes[i]);
  }
  return count;
}

const char *smi_instance(unsigned int id, char *text, size_t room) {
  snprintf(text, room, id == NVML_NO_INSTANCE ? "N/A" : "%u", id);
  return text;
}

void smi_timestamp(char *text, size_t room, const char *format) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  struct tm parts;
  localtime_r(&now.tv_sec, &parts);
  size_t length = strftime(text, room, format, &parts);
  // Milliseconds stand where the format ends with a point.
  if (length > 0 && text[length - 1] == '.') {
    snprintf(text + length, room - length, "%03ld", now.tv_nsec / 1000000);
  }
}
